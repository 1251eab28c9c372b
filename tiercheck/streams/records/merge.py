"""Consecutive differentials of one rank as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiercheck.format.container import Shard, ShardMetadata, TensorEntry, payload
from tiercheck.keys import ShardKey
from tiercheck.types import Buffer

__all__ = ["ShardContents", "as_stored", "merge"]


@dataclass(frozen=True)
class ShardContents:
    """What a shard holds, on its way into another: the arguments of :func:`tiercheck.format.container.payload`."""

    metadata: ShardMetadata
    tensors: Sequence[TensorEntry]
    objects: Mapping[str, object]


def as_stored(shard: Shard) -> ShardContents:
    """Everything as it lies in the shard: its memory is handed through, and checksums go along, so that nothing is
    hashed again and what was damaged before stays detectable."""
    return ShardContents(shard.metadata, tuple(shard.raw_entries()), shard.raw_objects())


def merge(differentials: Sequence[ShardContents], target: ShardKey) -> list[Buffer]:
    """The payload of the batch ``target``, made of shards that hold its versions, in order and without a gap.

    Names in a differential carry their version, so that nothing is renamed. Errors: ``HeaderTooLarge`` if they do not
    fit into one shard; ``ValueError`` if they are not exactly the batch.
    """
    keys = [each.metadata.key for each in differentials]
    versions = [version for key in keys for version in key.versions]
    if versions != list(target.versions) or {(k.generation, k.stream, k.rank) for k in keys} != {
        (target.generation, target.stream, target.rank)
    }:
        raise ValueError(f"{', '.join(map(str, keys))} are not the batch {target}")
    tensors: list[TensorEntry] = []
    held: dict[str, object] = {}
    for each in differentials:
        tensors += each.tensors
        held |= each.objects
    return payload(replace(differentials[0].metadata, first=target.first, last=target.last), tensors, held)
