"""Looking into a shard where it lies: parts of its tensors, or all of its bytes, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from tiercheck.archive.inventory import Inventory
from tiercheck.errors import Corruption, RecoveryError, TierError
from tiercheck.format import container
from tiercheck.format.checksums import (
    BLOCKS,
    RunningChecksum,
    blocks_around,
    check_blocks,
    checksum_of_blocks,
)
from tiercheck.format.container import ShardHeader
from tiercheck.format.header import Extent
from tiercheck.format.references import REFERENCES, References
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.replication.objects.asking import asked_twice
from tiercheck.replication.objects.shards import damaged, read, read_extent, read_header, read_object
from tiercheck.types import ByteRange

__all__ = [
    "CHUNK_NBYTES",
    "from_any",
    "read_digests",
    "read_extent",
    "read_header",
    "read_object",
    "read_part",
    "read_references",
    "verify_shard",
]

T = TypeVar("T")

CHUNK_NBYTES = 16 << 20
"""Of a shard that is longer, so much is in memory at a time."""


async def read_digests(tier: OpenTier, key: ShardKey, header: ShardHeader) -> dict[str, bytes]:
    """By name, the digests of the blocks of a base's long tensors, each verified by the tensor's checksum: for
    :func:`read_part`. Errors: as of :func:`read_object`."""
    found = await read_object(tier, key, header, BLOCKS)
    extents = {extent.spec.name: extent for extent in header.extents}
    if not isinstance(found, dict):
        raise Corruption(f"its {BLOCKS} are none", tier=tier.name, key=str(key))
    for name, digests in found.items():
        known = name in extents and isinstance(digests, bytes)
        if not known or checksum_of_blocks(digests) != extents[name].checksum:
            raise Corruption(f"the digests of {name!r} are those of another tensor", tier=tier.name, key=str(key))
    return found


async def read_references(tier: OpenTier, key: ShardKey, header: ShardHeader) -> References | None:
    """What a base says of the tensors that lie in its constants; ``None`` if it has all of its own. Errors: as of
    :func:`read_object`."""
    if not key.refers_to:
        return None
    try:
        return References.read(await read_object(tier, key, header, REFERENCES))
    except ValueError as error:
        raise Corruption(f"what it refers to cannot be read: {error}", tier=tier.name, key=str(key)) from error


async def read_part(
    tier: OpenTier, key: ShardKey, header: ShardHeader, extent: Extent, part: ByteRange, digests: Mapping[str, bytes]
) -> memoryview:
    """Some bytes of a tensor, verified. Of a tensor in ``digests`` the blocks around them are read, and of any other
    all of it. Errors: as of :func:`read_extent`."""
    of_blocks = digests.get(extent.spec.name)
    if of_blocks is None:
        return (await read_extent(tier, key, header, extent))[part.start : part.stop]
    blocks = blocks_around(part, extent.spec.nbytes)
    start = header.nbytes + extent.start
    where = ByteRange(start + blocks.start, start + blocks.stop)
    content = await read(tier, key, where, header.file_nbytes)
    try:
        await asyncio.to_thread(check_blocks, content, blocks.start, of_blocks)
    except ValueError as error:
        raise Corruption(f"of {extent.spec.name!r} {error}", tier=tier.name, key=str(key)) from error
    return content[part.start - blocks.start : part.stop - blocks.start]


async def verify_shard(tier: OpenTier, key: ShardKey, nbytes: int) -> ShardHeader:
    """Read every byte, a chunk at a time, and compare it with its checksum. Returns the header.

    Errors: ``Corruption`` naming the first part that fails; ``NotFound``; ``TierError``.
    """
    header = await read_header(tier, key, nbytes)
    if nbytes <= CHUNK_NBYTES or not tier.capabilities.ranged_get:
        content = await asked_twice(lambda: tier.driver.get(str(key)))
        shard = container.parse(content, key=str(key), tier=tier.name)
        await asyncio.to_thread(shard.verify)
        return header
    for extent in header.extents:
        checksum = RunningChecksum()
        async for chunk in chunks(tier, key, header, extent):
            if extent.is_padding:
                if any(chunk):
                    raise Corruption(f"the padding {extent.spec.name!r} is not zeros", tier=tier.name, key=str(key))
            else:
                await asyncio.to_thread(checksum.update, chunk)
        if not extent.is_padding and checksum.text != extent.checksum:
            raise damaged(extent, tier, key)
    return header


async def from_any(
    hierarchy: OpenHierarchy,
    inventory: Inventory,
    copy: Copy,
    read: Callable[[OpenTier, ShardKey, ShardHeader], Awaitable[T]],
) -> tuple[ShardHeader, T]:
    """A shard's header, and what ``read`` finds in it: of this copy, or of another tier's if it cannot be read. Errors:
    ``RecoveryError`` if none can."""
    others = [each for each in inventory.copies[copy.key.rank] if each.key == copy.key and each != copy]
    failures: list[str] = []
    for each in (copy, *sorted(others)):
        tier = hierarchy.tiers[each.tier]
        try:
            header = await read_header(tier, each.key, inventory.nbytes(each))
            return header, await read(tier, each.key, header)
        except (TierError, ValueError) as error:
            reason = error.message if isinstance(error, Corruption) else str(error)
            failures.append(f"in {tier.name}: {reason}")
    raise RecoveryError(f"{copy.key} cannot be read ({'; '.join(failures)})")


async def chunks(tier: OpenTier, key: ShardKey, header: ShardHeader, extent: Extent) -> AsyncIterator[memoryview]:
    start, stop = header.nbytes + extent.start, header.nbytes + extent.stop
    for at in range(start, stop, CHUNK_NBYTES):
        yield await read(tier, key, ByteRange(at, min(at + CHUNK_NBYTES, stop)), header.file_nbytes)
