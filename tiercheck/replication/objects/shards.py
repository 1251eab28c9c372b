"""Parts of a shard, read where it lies and verified: its header, its objects, its tensors."""

from __future__ import annotations

import asyncio
from typing import Any

from tiercheck.errors import Corruption
from tiercheck.format import container
from tiercheck.format.checksums import checksum_of
from tiercheck.format.container import ShardHeader
from tiercheck.format.header import HEADER_NBYTES_MAX, OBJECT_PREFIX, Extent
from tiercheck.format.host_state import unpack
from tiercheck.format.index.message import INDEX
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import MarkerKey, ShardKey
from tiercheck.replication.objects.asking import asked_twice
from tiercheck.types import ByteRange

__all__ = ["damaged", "look_at", "read", "read_extent", "read_header", "read_object"]

BEGINNING_NBYTES = 64 << 10
"""Read at first: as a rule it holds the whole header."""


async def look_at(tier: OpenTier, shard: ShardKey, header_nbytes: int = 0) -> tuple[MarkerKey, str]:
    """What a marker says of a shard as it lies in the tier, and the checksum of its index; only its header is fetched.
    ``header_nbytes``: how long that is said to be."""
    name = str(shard)
    nbytes = (await tier.driver.stat(name)).nbytes
    beginning = await _beginning(tier, name, min(nbytes, header_nbytes or BEGINNING_NBYTES, HEADER_NBYTES_MAX))
    header_nbytes = container.header_length(beginning, key=name, tier=tier.name)
    if header_nbytes > len(beginning):
        beginning = await _beginning(tier, name, min(nbytes, header_nbytes))
    header = container.parse_header(beginning, nbytes, key=name, tier=tier.name)
    digest = container.checksum_of(beginning[:header_nbytes])
    marker = MarkerKey.of(shard, nbytes, header_nbytes, digest, header.metadata.token)
    return marker, header.object_checksum(INDEX)


async def _beginning(tier: OpenTier, name: str, nbytes: int) -> memoryview:
    if tier.capabilities.ranged_get:
        return await tier.driver.get(name, range=ByteRange(0, nbytes))
    return await tier.driver.get(name)


async def read_header(tier: OpenTier, key: ShardKey, nbytes: int) -> ShardHeader:
    """The header of a shard of ``nbytes``, verified. Errors: ``Corruption``; ``NotFound``; ``TierError``."""
    beginning = await read(tier, key, ByteRange(0, min(BEGINNING_NBYTES, nbytes)), nbytes)
    length = container.header_length(beginning, key=str(key), tier=tier.name)
    if length > beginning.nbytes:
        if length > nbytes:
            raise Corruption("the file ends inside its header", tier=tier.name, key=str(key))
        beginning = await read(tier, key, ByteRange(0, length), nbytes)
    return container.parse_header(beginning, nbytes, key=str(key), tier=tier.name)


async def read_object(tier: OpenTier, key: ShardKey, header: ShardHeader, name: str) -> Any:
    """A host object of a shard, verified. Errors: ``Corruption``, also if the shard has none of that name."""
    extent = next((each for each in header.extents if each.spec.name == OBJECT_PREFIX + name), None)
    if extent is None:
        raise Corruption(f"the shard has no object {name!r}", tier=tier.name, key=str(key))
    content = await read_extent(tier, key, header, extent)
    try:
        return await asyncio.to_thread(unpack, content)
    except Corruption as error:
        message = f"the object {name!r} cannot be read: {error.message}"
        raise Corruption(message, tier=tier.name, key=str(key)) from error


async def read_extent(tier: OpenTier, key: ShardKey, header: ShardHeader, extent: Extent) -> memoryview:
    """The bytes of one tensor or object, verified. Errors: ``Corruption``; ``NotFound``; ``TierError``."""
    where = ByteRange(header.nbytes + extent.start, header.nbytes + extent.stop)
    content = await read(tier, key, where, header.file_nbytes)
    if await asyncio.to_thread(checksum_of, content) != extent.checksum:
        raise damaged(extent, tier, key)
    return content


async def read(tier: OpenTier, key: ShardKey, where: ByteRange, nbytes: int) -> memoryview:
    """A range of an object of ``nbytes``. Errors: ``Corruption`` if it is shorter by now; those of the driver."""
    try:
        if tier.capabilities.ranged_get:
            return await asked_twice(lambda: tier.driver.get(str(key), range=where))
        content = await asked_twice(lambda: tier.driver.get(str(key)))
        if len(content) < where.stop:
            raise ValueError(f"it has {len(content)}")
        return content[where.start : where.stop]
    except ValueError as error:
        raise Corruption(f"it is not the {nbytes} bytes any more that were listed: {error}", key=str(key)) from error


def damaged(extent: Extent, tier: OpenTier, key: ShardKey) -> Corruption:
    return Corruption(f"the checksum of {extent.spec.name!r} does not match", tier=tier.name, key=str(key))
