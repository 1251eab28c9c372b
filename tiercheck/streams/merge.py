"""Consecutive differentials of one rank as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiercheck.container import PackedObject, Shard, TensorEntry, payload
from tiercheck.keys import ShardKey
from tiercheck.types import Buffer

__all__ = ["merge"]


def merge(shards: Sequence[Shard], target: ShardKey) -> list[Buffer]:
    """The payload of the batch ``target``, made of shards that hold its versions, in order and without a gap.

    Names in a differential carry their version, so that nothing is renamed; checksums go along, so that nothing
    is hashed again and what was damaged before stays detectable. The shards' memory is handed through.
    Errors: ``ValueError`` where the shards are not exactly the batch.
    """
    keys = [shard.metadata.key for shard in shards]
    versions = [version for key in keys for version in key.versions]
    if versions != list(target.versions) or {(k.generation, k.stream, k.rank) for k in keys} != {
        (target.generation, target.stream, target.rank)
    }:
        raise ValueError(f"{', '.join(map(str, keys))} are not the batch {target}")
    tensors: list[TensorEntry] = []
    held: dict[str, PackedObject] = {}
    for shard in shards:
        tensors += shard.raw_entries()
        held |= shard.raw_objects()
    return payload(replace(shards[0].metadata, first=target.first, last=target.last), tensors, held)
