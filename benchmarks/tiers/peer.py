"""A neighbour's memory through the peer driver against one plain TCP stream, and against plain libzmq with CURVE."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest as xxh3_64

from benchmarks.ceilings.buffers import empty_buffer, filled_buffer
from benchmarks.ceilings.child import Child
from benchmarks.ceilings.tcp import TcpStream
from benchmarks.figures import Figure, Measured, Settings
from benchmarks.machine import cpu_text
from benchmarks.pairs import interleave, summarise, timed
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.driver import remove_namespace

if TYPE_CHECKING:
    from benchmarks.ceilings.curve import CurveStream

__all__ = ["FIGURES", "peer_url"]

KEY = "object"
NAMESPACE = "measured"


@asynccontextmanager
async def peer_url(size_bytes: int, keys: Path | None = None) -> AsyncIterator[tuple[str, Child]]:
    """The URL of a peer tier over shared memory, and its server's process; with CURVE where ``keys`` names a directory.

    The keys are made there.
    """
    name = f"benchmark-{secrets.token_hex(6)}"
    arguments = [f"shm://{name}?size={size_bytes}"]
    if keys is not None:
        from tiercheck.tiers.peer import PeerKeys

        PeerKeys.generate(keys)
        arguments += ["--keys", str(keys)]
    child = Child("benchmarks.peer_server", *arguments)
    try:
        await asyncio.to_thread(child.start)
        try:
            endpoint, key = child.ready.split()
            options = "" if keys is None else f"&server_key={key}&keys={keys}"
            yield f"peer://{NAMESPACE}?at={endpoint}{options}", child
        finally:
            await asyncio.to_thread(child.stop)
    finally:
        remove_namespace(f"{name}-{NAMESPACE}")


def stream_of(source: memoryview, into: memoryview, curve: bool) -> TcpStream | CurveStream:
    if not curve:
        return TcpStream(source, into)
    from benchmarks.ceilings.curve import CurveStream

    return CurveStream(source, into)


async def measure(settings: Settings, *, get: bool, curve: bool) -> Measured:
    source = filled_buffer(settings.size_bytes)
    into = empty_buffer(settings.size_bytes)
    keys = settings.directory / f"keys-{secrets.token_hex(4)}" if curve else None
    async with (
        peer_url(settings.size_bytes * 4, keys) as (url, _),
        make_driver(url) as driver,
        stream_of(source, into, curve) as raw,
    ):
        settings.progress(f"peer: looking for the best shape of {'plain CURVE' if curve else 'plain TCP'}")
        await raw.calibrate()
        await driver.put(KEY, [source])

        async def driver_put() -> float:
            return await timed(lambda: driver.put(KEY, [source]))

        async def driver_get() -> float:
            return await timed(lambda: driver.get(KEY, into=into))

        subject, ceiling = (driver_get, raw.get) if get else (driver_put, raw.put)
        pairs = await interleave(subject, ceiling, pairs=settings.pairs, warmups=3)
        into[:] = bytes(into.nbytes)
        if xxh3_64(await driver.get(KEY, into=into)) != xxh3_64(source):
            raise RuntimeError("the peer driver returned other bytes than were put")
        details = {"ceiling_shape": raw.shape(), "facts": dict(driver.facts())}
        return Measured(summarise(pairs, source.nbytes), "bytes/s", cpu_text(), source.nbytes, details)


FIGURES = (
    Figure(
        "peer.put/raw_tcp",
        "an object sent into another process's shared memory over loopback",
        partial(measure, get=False, curve=False),
        0.85,
    ),
    Figure(
        "peer.get/raw_tcp",
        "an object fetched from there into the caller's buffer",
        partial(measure, get=True, curve=False),
        0.85,
    ),
    Figure("peer.put/raw_curve", "the put, encrypted", partial(measure, get=False, curve=True), 0.8),
    Figure("peer.get/raw_curve", "the get, encrypted", partial(measure, get=True, curve=True), 0.8),
)
