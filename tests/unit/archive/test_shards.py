"""Looking into a shard where it lies: parts of long tensors are read, and verified, without the rest."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import torch

from tiercheck.archive.shards import read_digests, read_extent, read_header, read_part
from tiercheck.errors import Corruption
from tiercheck.format.checksums import BLOCK_NBYTES
from tiercheck.format.container import ShardHeader, ShardMetadata, TensorEntry, parse, payload
from tiercheck.format.header import Extent
from tiercheck.hierarchy import Hierarchy, OpenTier
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.keys import ShardKey
from tiercheck.streams.records.base import BaseCapture
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange, Capabilities

KEY = ShardKey.base(1, 0, 0)
LONG, SHORT = "master/weight", "master/bias"


@pytest_asyncio.fixture
async def tier() -> AsyncIterator[OpenTier]:
    async with Hierarchy.of(f"memory://shards-{uuid.uuid4().hex}").open() as hierarchy:
        yield hierarchy.first


@pytest.fixture(scope="module")
def base() -> bytes:
    """Of one tensor of more than two blocks, and a short one."""
    torch.manual_seed(1)
    model = torch.nn.Linear(1500, 1500)
    capture = BaseCapture(ModuleProvider(model, torch.optim.SGD(model.parameters())), KEY, 1)
    memory = memoryview(bytearray(capture.nbytes_max))
    capture.copy(memory)
    return bytes(memory[: capture.finish()])


def extent_of(header: ShardHeader, name: str) -> Extent:
    return next(extent for extent in header.extents if extent.spec.name == name)


async def test_a_part_is_read_by_the_blocks_around_it(tier: OpenTier, base: bytes) -> None:
    parse(base).verify()
    await tier.driver.put(str(KEY), [base])
    header = await read_header(tier, KEY, len(base))
    digests = await read_digests(tier, KEY, header)
    assert digests.keys() == {LONG}
    for name, start, stop in (
        (LONG, 0, 1),
        (LONG, BLOCK_NBYTES - 1, BLOCK_NBYTES + 1),
        (LONG, 2 * BLOCK_NBYTES + 5, 9_000_000),
        (LONG, 7, 7),
        (SHORT, 4, 6),
    ):
        extent = extent_of(header, name)
        whole = await read_extent(tier, KEY, header, extent)
        part = await read_part(tier, KEY, header, extent, ByteRange(start, stop), digests)
        assert part == whole[start:stop]


async def test_damage_elsewhere_does_not_matter_and_damage_in_it_is_found(tier: OpenTier, base: bytes) -> None:
    content = bytearray(base)
    header = parse(base)._header
    extent = extent_of(header, LONG)
    content[header.nbytes + extent.start + BLOCK_NBYTES + 9] ^= 1
    await tier.driver.put(str(KEY), [content])
    digests = await read_digests(tier, KEY, header)
    first = ByteRange(0, BLOCK_NBYTES)
    assert await read_part(tier, KEY, header, extent, first, digests) == parse(base).entry(LONG).data[:BLOCK_NBYTES]
    with pytest.raises(Corruption, match=f"of '{LONG}' the block that begins at byte {BLOCK_NBYTES} does not match"):
        await read_part(tier, KEY, header, extent, ByteRange(BLOCK_NBYTES, BLOCK_NBYTES + 1), digests)
    with pytest.raises(Corruption, match=f"the checksum of '{LONG}' does not match"):
        await read_extent(tier, KEY, header, extent)


@pytest.mark.parametrize("blocks", [{"master/a": bytes(16)}, {"master/b": bytes(16)}, {"master/a": 3}, 3])
async def test_digests_of_another_tensor_are_refused(tier: OpenTier, blocks: object) -> None:
    entry = TensorEntry("master/a", "U8", (BLOCK_NBYTES + 1,), bytes(BLOCK_NBYTES + 1))
    content = b"".join(payload(ShardMetadata.of(KEY, 1, ""), [entry], {"blocks": blocks}))
    await tier.driver.put(str(KEY), [content])
    header = await read_header(tier, KEY, len(content))
    with pytest.raises(Corruption, match=re.escape("blocks are none") + "|are those of another tensor"):
        await read_digests(tier, KEY, header)


class OnlyWhole(MemoryDriver):
    """A store that knows no ranges."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, ranged_get=False)


async def test_a_part_of_what_was_cut_off_is_no_part(base: bytes) -> None:
    header = parse(base)._header
    extent = extent_of(header, LONG)
    async with OnlyWhole(f"shards-{uuid.uuid4().hex}") as driver:
        tier = OpenTier(0, "whole", driver)
        await driver.put(str(KEY), [base])
        digests = await read_digests(tier, KEY, header)
        await driver.put(str(KEY), [base[: header.nbytes + extent.start + BLOCK_NBYTES]])
        with pytest.raises(Corruption, match=f"not the {len(base)} bytes any more"):
            await read_part(tier, KEY, header, extent, ByteRange(0, BLOCK_NBYTES + 1), digests)
