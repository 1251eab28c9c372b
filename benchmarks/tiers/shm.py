"""Shared memory against memcpy."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from benchmarks.ceilings.buffers import empty_buffer, filled_buffer
from benchmarks.ceilings.memcpy import Memcpy
from benchmarks.figures import Figure, Measured, Settings
from benchmarks.machine import cpu_text
from benchmarks.pairs import Repetition, interleave, summarise, timed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import open_driver
from tiercheck.tiers.shm.driver import remove_namespace

__all__ = ["FIGURES"]

GETS = 32
"""A mapped get takes microseconds: this many are timed as one."""


@asynccontextmanager
async def open_namespace(size_bytes: int, threads: int = 1) -> AsyncIterator[TierDriver]:
    """A shm tier of the benchmark's own, which copies with so many threads."""
    name = f"benchmark-{secrets.token_hex(6)}"
    try:
        driver = await open_driver(f"shm://{name}?size={size_bytes}&threads={threads}")
        try:
            yield driver
        finally:
            await driver.close()
    finally:
        remove_namespace(name)


async def compare(
    settings: Settings, driver: TierDriver, source: memoryview, subject: Repetition, threads: int = 1
) -> Measured:
    """``subject``, which moves ``source``'s size, against memcpy with as many threads as the driver has."""
    targets = [empty_buffer(source.nbytes) for _ in range(2)]
    with Memcpy(source, targets, threads) as ceiling:
        pairs = await interleave(subject, ceiling, pairs=settings.pairs, warmups=3)
    details = {"threads": threads, "facts": dict(driver.facts())}
    return Measured(summarise(pairs, source.nbytes), "bytes/s", cpu_text(), source.nbytes, details)


async def measure_put(settings: Settings, *, threads: int = 1) -> Measured:
    """Overwrites of one key: after the warm-up they go into memory that earlier ones gave back."""
    source = filled_buffer(settings.size_bytes)
    async with open_namespace(settings.size_bytes * 4, threads) as driver:
        return await compare(settings, driver, source, lambda: timed(lambda: driver.put("object", [source])), threads)


async def measure_get(settings: Settings) -> Measured:
    source = filled_buffer(settings.size_bytes)
    async with open_namespace(settings.size_bytes * 4) as driver:
        await driver.put("object", [source])

        async def gets() -> float:
            begun = time.perf_counter()
            for _ in range(GETS):
                (await driver.get("object")).release()
            return (time.perf_counter() - begun) / GETS

        return await compare(settings, driver, source, gets)


async def measure_get_touched(settings: Settings) -> Measured:
    source = filled_buffer(settings.size_bytes)
    async with open_namespace(settings.size_bytes * 4) as driver:
        await driver.put("object", [source])

        async def get_and_touch() -> float:
            begun = time.perf_counter()
            with await driver.get("object") as found:
                sum(found[::4096])
            return time.perf_counter() - begun

        return await compare(settings, driver, source, get_and_touch)


async def measure_get_into(settings: Settings) -> Measured:
    source = filled_buffer(settings.size_bytes)
    into = empty_buffer(settings.size_bytes)
    async with open_namespace(settings.size_bytes * 4) as driver:
        await driver.put("object", [source])
        return await compare(settings, driver, source, lambda: timed(lambda: driver.get("object", into=into)))


FIGURES = (
    Figure("shm.put/memcpy", "an object copied into recycled shared memory and published", measure_put, 0.9),
    Figure("shm.put_2_threads/memcpy", "the same with two threads on both sides", partial(measure_put, threads=2)),
    Figure("shm.get/memcpy", "an object mapped, none of its pages looked at", measure_get, 5),
    Figure("shm.get_touched/memcpy", "an object mapped, one byte of every page read", measure_get_touched),
    Figure("shm.get_into/memcpy", "an object copied into a buffer of the caller's", measure_get_into),
)
