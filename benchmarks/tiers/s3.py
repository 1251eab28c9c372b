"""S3 through the driver against aiobotocore used directly, both against one SeaweedFS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest as xxh3_64

from benchmarks.ceilings.buffers import empty_buffer, filled_buffer
from benchmarks.figures import Figure, Measured, Settings
from benchmarks.machine import cpu_text
from benchmarks.pairs import interleave, summarise, timed
from benchmarks.stores import running_seaweed
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

if TYPE_CHECKING:
    from benchmarks.ceilings.s3_client import RawClient

__all__ = ["FIGURES"]

KEY = "object"


@asynccontextmanager
async def both(source: memoryview, into: memoryview) -> AsyncIterator[tuple[TierDriver, RawClient]]:
    """The driver and the raw client, in one bucket of one server."""
    from benchmarks.ceilings.s3_client import RawClient

    async with running_seaweed() as server:
        bucket = server.new_bucket()
        async with (
            make_driver(server.url(bucket)) as driver,
            RawClient(server.endpoint_url, bucket, source, into) as raw,
        ):
            yield driver, raw


async def measure_put(settings: Settings) -> Measured:
    source, into = filled_buffer(settings.size_bytes), empty_buffer(settings.size_bytes)
    async with both(source, into) as (driver, raw):
        settings.progress("s3: looking for the best part size and concurrency of a plain put")
        await raw.calibrate_put()
        pairs = await interleave(
            lambda: timed(lambda: driver.put(KEY, [source])), raw.put, pairs=settings.pairs, warmups=1
        )
        details = {"ceiling_shape": asdict(raw.put_shape), "facts": dict(driver.facts())}
        return Measured(summarise(pairs, source.nbytes), "bytes/s", cpu_text(), source.nbytes, details)


async def measure_get(settings: Settings) -> Measured:
    source, into = filled_buffer(settings.size_bytes), empty_buffer(settings.size_bytes)
    async with both(source, into) as (driver, raw):
        settings.progress("s3: looking for the best part size and concurrency of a plain get")
        await raw.calibrate_get()
        await driver.put(KEY, [source])
        pairs = await interleave(
            lambda: timed(lambda: driver.get(KEY, into=into)), raw.get, pairs=settings.pairs, warmups=1
        )
        into[:] = bytes(into.nbytes)
        if xxh3_64(await driver.get(KEY, into=into)) != xxh3_64(source):
            raise RuntimeError("the s3 driver returned other bytes than were put")
        details = {"ceiling_shape": asdict(raw.get_shape), "facts": dict(driver.facts())}
        return Measured(summarise(pairs, source.nbytes), "bytes/s", cpu_text(), source.nbytes, details)


FIGURES = (
    Figure("s3.put/raw_client", "an object stored in SeaweedFS", measure_put, 0.95),
    Figure("s3.get/raw_client", "an object fetched from SeaweedFS into the caller's buffer", measure_get, 0.95),
)
