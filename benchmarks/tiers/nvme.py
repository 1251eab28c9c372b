"""A disk through the nvme driver against plain O_DIRECT."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from xxhash import xxh3_64_intdigest as xxh3_64

from benchmarks.ceilings.buffers import empty_buffer, filled_buffer
from benchmarks.ceilings.direct import DirectFile, Shape
from benchmarks.figures import Figure, Measured, Settings
from benchmarks.machine import file_system_text
from benchmarks.pairs import Pair, interleave, summarise, timed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

__all__ = ["FIGURES"]

KEY = "object"
CALIBRATIONS = 2


@asynccontextmanager
async def prepared(settings: Settings, buffer: memoryview) -> AsyncIterator[tuple[TierDriver, DirectFile, Path]]:
    """The driver, the ceiling with its best shapes found, and the driver's directory; all on one disk."""
    raw = DirectFile(settings.directory, buffer)
    raw.check()
    settings.progress("nvme: looking for the best depth and block of plain O_DIRECT")
    await raw.calibrate(CALIBRATIONS)
    root = settings.directory / "nvme"
    async with make_driver(f"nvme://{quote(str(root))}") as driver:
        yield driver, raw, root


def measured(settings: Settings, driver: TierDriver, pairs: Sequence[Pair], shape: Shape, nbytes: int) -> Measured:
    details = {"ceiling_shape": asdict(shape), "facts": dict(driver.facts())}
    return Measured(summarise(pairs, nbytes), "bytes/s", file_system_text(settings.directory), nbytes, details)


async def measure_put(settings: Settings) -> Measured:
    """Each put makes a new file; the one before it is removed outside of the time taken, as the ceiling's is."""
    source = filled_buffer(whole_pages(settings.size_bytes))
    async with prepared(settings, source) as (driver, raw, _):

        async def put() -> float:
            await driver.delete([KEY])
            return await timed(lambda: driver.put(KEY, [source]))

        pairs = await interleave(put, raw.write, pairs=settings.pairs, warmups=2)
        return measured(settings, driver, pairs, raw.write_shape, source.nbytes)


async def measure_get(settings: Settings) -> Measured:
    """From the disk into the caller's aligned buffer, one file and one buffer on both sides; what the page cache has of
    it is dropped before."""
    source = filled_buffer(whole_pages(settings.size_bytes))
    into = empty_buffer(source.nbytes)
    async with prepared(settings, source) as (driver, raw, root):
        await driver.put(KEY, [source])
        await raw.read_as(root / KEY, into, CALIBRATIONS)

        async def get() -> float:
            drop_from_cache(root / KEY)
            return await timed(lambda: driver.get(KEY, into=into))

        pairs = await interleave(get, raw.read, pairs=settings.pairs, warmups=2)
        if xxh3_64(into) != xxh3_64(source):
            raise RuntimeError("the nvme driver returned other bytes than were put")
        return measured(settings, driver, pairs, raw.read_shape, source.nbytes)


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def whole_pages(nbytes: int) -> int:
    """Plain O_DIRECT needs whole blocks."""
    return -(-nbytes // 4096) * 4096


FIGURES = (
    Figure("nvme.put/raw_direct", "an object written, synced and published on the disk", measure_put, 0.9),
    Figure("nvme.get/raw_direct", "an object read from the disk, not from the page cache", measure_get, 0.9),
)
