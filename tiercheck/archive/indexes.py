"""What every rank of a version stores, by the logical index that each base carries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.archive.shards import from_any, read_object, read_references
from tiercheck.format.container import ShardHeader, TensorSpec
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.index.message import INDEX, read_index
from tiercheck.format.references import References
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ShardKey

__all__ = ["StoredIndex", "read_indexes"]

RANKS_AT_ONCE = 16


@dataclass(frozen=True)
class StoredIndex:
    """What one rank's base stores, or refers to."""

    index: LogicalIndex
    specs: Mapping[str, TensorSpec]
    """By the name in the shard."""


async def read_indexes(hierarchy: OpenHierarchy, inventory: Inventory, chosen: Recoverable) -> dict[int, StoredIndex]:
    """By rank. Errors: ``RecoveryError`` if no copy of a rank's base can be read."""
    slots = asyncio.Semaphore(RANKS_AT_ONCE)

    async def read(tier: OpenTier, key: ShardKey, header: ShardHeader) -> tuple[LogicalIndex, References | None]:
        index = read_index(await read_object(tier, key, header, INDEX))
        return index, await read_references(tier, key, header)

    async def index_of(rank: int) -> StoredIndex:
        async with slots:
            header, (index, references) = await from_any(hierarchy, inventory, chosen.plans[rank].anchor, read)
            specs = [extent.spec for extent in header.extents]
            specs += references.specs if references is not None else ()
            return StoredIndex(index, {spec.name: spec for spec in specs})

    found = await asyncio.gather(*(index_of(rank) for rank in range(chosen.world_size)))
    return dict(enumerate(found))
