"""What a version holds: tensors, host state, and who wrote it. Read from headers and small objects; no tensor is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck import schema
from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.archive.shards import from_any, read_object, read_references
from tiercheck.format.container import ShardHeader, TensorSpec
from tiercheck.format.header import OBJECT_PREFIX
from tiercheck.format.references import References
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.streams.rebuilding.carry_over import options_at_end
from tiercheck.streams.records.record_names import host_name, record_name
from tiercheck.streams.tensors.provider import Identity

__all__ = ["Contents", "read_contents"]


@dataclass(frozen=True)
class Contents:
    """What one rank has of a version."""

    version: int
    rank: int
    world_size: int
    point: RecoveryPoint
    identity: Identity
    """Framework, model, and the optimizer: its class, implementation, torch version, instruction set."""
    token: str
    """Of the generation."""
    tensors: tuple[TensorSpec, ...]
    """The base's, by their names in the shard: ``master/NAME``, ``state/NAME/KEY``, ``extra/NAME``,
    ``residual/NAME``; those that it refers to among them."""
    hyperparameters: list[dict[str, Any]]
    """Per parameter group, as of the version."""
    host_state: Mapping[str, Any]
    """As of the version."""


async def read_contents(hierarchy: OpenHierarchy, inventory: Inventory, chosen: Recoverable, rank: int) -> Contents:
    """Errors: ``RecoveryError`` for a rank that the version does not have, or where no copy can be read."""
    chosen.check_rank(rank)
    plan = chosen.plans[rank]

    async def of_base(
        tier: OpenTier, key: ShardKey, header: ShardHeader
    ) -> tuple[Identity, Any, Any, References | None]:
        identity, optimizer, host = await asyncio.gather(
            *(read_object(tier, key, header, name) for name in ("identity", "optimizer", "host"))
        )
        return schema.read(Identity, identity), optimizer, host, await read_references(tier, key, header)

    async def of_version(tier: OpenTier, key: ShardKey, header: ShardHeader) -> tuple[Any, Any]:
        """Its host state, and what its step ran with."""
        if key.stream is Stream.SNAPSHOT:
            return await read_object(tier, key, header, "host"), {}
        names = host_name(chosen.version), record_name(chosen.version)
        host, record = await asyncio.gather(*(read_object(tier, key, header, name) for name in names))
        return host, record

    header, (identity, optimizer, host, references) = await from_any(hierarchy, inventory, plan.anchor, of_base)
    options = optimizer["hyperparameters"]
    if plan.batches:
        _, (host, record) = await from_any(hierarchy, inventory, plan.batches[-1], of_version)
        options = record.get("hyperparameters", options)
    specs = [each.spec for each in header.extents if not each.is_padding]
    specs += references.specs if references is not None else ()
    return Contents(
        chosen.version,
        rank,
        chosen.world_size,
        plan.point,
        identity,
        header.metadata.token,
        tuple(spec for spec in specs if not spec.name.startswith(OBJECT_PREFIX)),
        options_at_end(options, host),
        host,
    )
