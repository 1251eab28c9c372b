"""The conformance kit on bounds: objects of many parts, memory beside the payload, and a tier that is full."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiercheck.errors import CapacityExceeded, Unsupported
from tiercheck.testing.contents import difference
from tiercheck.testing.driver_kit.base import TierKit
from tiercheck.testing.plugin import FILLED, UNJOINED
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, Payload, Survives

__all__ = ["LimitTests"]

PART_BYTES_TRIED_MAX = 16 << 20
PAYLOAD_BYTES_TRIED_MAX = 128 << 20
PARTS_BESIDE = 3
"""Parts that a driver may hold beside those in flight: one that is being cut, one being sealed, one being freed."""
BLOCK = bytes(range(256)) * 4096


class LimitTests(TierKit):
    """What only objects show that are larger than the driver's parts, or than the tier."""

    async def test_readers_see_whole_objects_of_several_parts_while_one_writes(self, driver: TierDriver) -> None:
        """Such an object is often put by other means than a small one, and read by several requests."""
        nbytes = 2 * min(driver.capabilities.part_bytes, PART_BYTES_TRIED_MAX) + 1
        contents = [bytes([n]) * nbytes for n in range(3)]
        await driver.put("a", [contents[0]])
        into = memoryview(bytearray(nbytes))
        async with await self.second_client(driver) as second:
            for content in contents[1:]:
                writing = asyncio.create_task(driver.put("a", [content]))
                while not writing.done():
                    found = await second.get("a", into=into)
                    assert not difference(found, bytes([found[0]]) * nbytes)
                    await asyncio.sleep(0)  # a driver that never waits would not let the writer go on
                await writing
            assert not difference(await second.get("a", into=into), contents[-1])

    @pytest.mark.certifies("ranged_get")
    async def test_ranges_across_the_boundaries_of_parts(self, driver: TierDriver) -> None:
        part = min(driver.capabilities.part_bytes, PART_BYTES_TRIED_MAX)
        end = 2 * part + part // 2 + 1
        content = random.Random(5).randbytes(end)
        await driver.put("large", [content[:part], content[part:]])
        wanted = list(ranges_around(part, end))
        if not driver.capabilities.ranged_get:
            for each in wanted:
                with pytest.raises(Unsupported):
                    await driver.get("large", range=each)
            return
        into = memoryview(bytearray(end))
        for each in wanted:
            expected = content[each.start : each.stop]
            off = difference(await driver.get("large", range=each, into=into), expected)
            assert not off, f"{each}: {off}"
            with await driver.get("large", range=each) as found:
                off = difference(found, expected)
                assert not off, f"{each}: {off}"

    async def test_a_payload_is_not_joined(self, driver: TierDriver) -> None:
        """While it is put, the memory that Python hands out must not grow by the payload, beside the tier's own copies
        (``copies_here``). What a library allocates by itself is not seen."""
        capabilities = driver.capabilities
        nbytes = 5 * capabilities.part_bytes * (capabilities.parts_in_flight + PARTS_BESIDE) // 4 + (4 << 20)
        free_bytes = (await driver.usage()).free_bytes
        if nbytes > PAYLOAD_BYTES_TRIED_MAX or (free_bytes is not None and nbytes > free_bytes):
            return  # the report says that it was not tried
        payload: Payload = [BLOCK] * (-(-nbytes // len(BLOCK)))
        nbytes = len(payload) * len(BLOCK)
        copies = max(self.copies_here, int(capabilities.survives is Survives.NOTHING)) + 1
        with peak_of_memory() as peak:
            await driver.put("unjoined", payload)
        assert peak[0] < copies * nbytes, f"a put of {nbytes} bytes took {peak[0]} bytes beside it: they were joined"
        assert (await driver.stat("unjoined")).nbytes == nbytes
        await driver.delete(["unjoined"])
        self.note(UNJOINED, f"{nbytes} bytes")

    async def test_a_full_tier_says_so_and_keeps_what_it_has(self) -> None:
        small = await self.make_small_driver()
        if small is None:
            return  # the report says that it was not tried
        blocks = self.small_nbytes // len(BLOCK) + 1
        async with small as driver:
            info = await driver.put("kept", [b"kept"])
            for key in ("kept", "large"):
                with pytest.raises(CapacityExceeded) as caught:
                    await driver.put(key, [BLOCK] * blocks)
                assert (caught.value.tier, caught.value.key) == (driver.url, key)
            if driver.capabilities.mappable:
                with pytest.raises(CapacityExceeded):
                    await driver.reserve("large", blocks * len(BLOCK))
            assert await driver.stat("kept") == info
            assert await self.content(driver, "kept") == b"kept"
            assert await self.keys(driver) == ["kept"]
            with pytest.raises(CapacityExceeded):  # object by object, too
                for n in range(blocks):
                    await driver.put(f"fill/{n}", [BLOCK])
            filled = await self.keys(driver, "fill/")
            for key in filled:
                assert not difference(await self.content(driver, key), BLOCK)
            await driver.delete(filled)
            await driver.put("fill/0", [BLOCK])
        self.note(FILLED, f"{self.small_nbytes} bytes")


def ranges_around(part: int, end: int) -> Iterator[ByteRange]:
    """Ranges that begin, end and cross where parts of an object meet; some are as long as parts, begun elsewhere."""
    for boundary in (part, 2 * part):
        for start, stop in ((boundary - 1, boundary + 1), (boundary, boundary + 7), (boundary - 7, boundary)):
            yield ByteRange(start, stop)
        yield ByteRange(1, boundary + 1)
        yield ByteRange(boundary - 1, end)
    yield ByteRange(1, 1 + part)
    yield ByteRange(part // 2, part // 2 + 2 * part)
    yield ByteRange(0, end)
    yield ByteRange(part, part)


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """The most bytes, once it is left, that Python's allocators held at once beyond those at its beginning."""
    peak = [0]
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
