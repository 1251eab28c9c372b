"""A live server and raw sockets: nothing that comes over the wire stops it, or makes it hold more than it may."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerDriver, PeerLimits, PeerServer
from tiercheck.tiers.peer.messages import BeginGet, BeginPut, GetChunk, Hello, PutChunk, checksum, decode, encode
from tiercheck.tiers.peer.server.flood import FloodWatch
from tiercheck.types import Capabilities, Survives

CHUNK = 1 << 18
LIMITS = PeerLimits(chunk_bytes=CHUNK, in_flight_bytes=8 * CHUNK, buffer_bytes=16 * CHUNK, connections=20)


class CopyingDriver(MemoryDriver):
    """Not mappable: the server makes copies for its replies, which it has to bound."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, conditional_put=True)


async def open_namespace(name: str) -> TierDriver:
    driver = CopyingDriver() if name == "copying" else MemoryDriver()
    await driver.open()
    return driver


@pytest.fixture
def limits() -> PeerLimits:
    return LIMITS


@pytest_asyncio.fixture
async def server(limits: PeerLimits) -> AsyncIterator[PeerServer]:
    async with PeerServer(open_namespace, limits=limits) as server:
        yield server


async def check_alive(server: PeerServer, data: bytes = bytes(3 * CHUNK + 1)) -> None:
    async with PeerDriver("honest", server.endpoint, chunk_bytes=CHUNK, deadline_s=10) as driver:
        await driver.put("a", [data])
        assert await driver.get("a") == data


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what} in vain"
        await asyncio.sleep(0.01)


def raw_connection(server: PeerServer) -> socket.socket:
    host, _, port = server.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


@pytest.fixture
def dealer(server: PeerServer) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        # It holds few messages that nobody has read: then the server's copies stay with the server.
        dealer.rcvhwm = 2
        dealer.rcvbuf = CHUNK
        dealer.connect(f"tcp://{server.endpoint}")
        yield dealer


GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def greeted(server: PeerServer) -> socket.socket:
    """A connection after ZMTP's handshake: a peer that speaks it well, so far."""
    connection = raw_connection(server)
    connection.sendall(GREETING)
    seen = b""
    while len(seen) < 64:
        seen += connection.recv(64 - len(seen))
    connection.sendall(READY[:1] + bytes([len(READY) - 2]) + READY[2:])
    assert connection.recv(1) == b"\x04"
    return connection


async def test_garbage_instead_of_a_handshake(server: PeerServer) -> None:
    chance = random.Random(5)
    connections = []
    for nbytes in (0, 1, 10, 64, 100, 5000):
        for lead in (b"", b"\xff" + bytes(8) + b"\x7f", GREETING, b"GET / HTTP/1.1\r\n\r\n"):
            connection = raw_connection(server)
            with contextlib.suppress(OSError):  # the server may hang up first
                connection.sendall(lead + chance.randbytes(nbytes))
            connections.append(connection)
            if len(connections) > 10:
                connections.pop(0).close()
    for connection in connections:
        connection.close()
    await check_alive(server)
    await until(lambda: server.statistics.clients == 0, "the connections to be gone")


async def test_garbage_after_the_handshake(server: PeerServer) -> None:
    chance = random.Random(6)
    for _ in range(30):
        connection = greeted(server)
        with contextlib.suppress(OSError):
            connection.sendall(chance.randbytes(chance.randrange(2000)))
        connection.close()
    await check_alive(server)


async def test_random_messages_are_counted_and_dropped(server: PeerServer, dealer: zmq.Socket[bytes]) -> None:
    chance = random.Random(7)
    good = encode(1, Hello("n"))
    for _ in range(300):
        frames = [chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 5))]
        if chance.random() < 0.3:
            flipped = bytearray(good)
            flipped[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
            frames = [bytes(flipped)]
        dealer.send_multipart(frames)
    await until(lambda: sum(server.statistics.dropped.values()) >= 300, "the frames to be counted")
    dealer.send(good)
    assert await asyncio.to_thread(dealer.poll, 5000)
    await check_alive(server)


async def test_an_oversized_frame_ends_its_connection(server: PeerServer) -> None:
    connection = greeted(server)
    connection.settimeout(5)
    connection.sendall(b"\x02" + (1 << 40).to_bytes(8, "big"))
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    connection.close()
    await check_alive(server)


def private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


async def test_a_message_without_an_end_is_cut_off(server: PeerServer) -> None:
    """Frames that say there is more, for ever: ZeroMQ itself would collect them all."""
    connection = greeted(server)
    gc.collect()
    before = private_bytes()
    frame = b"\x03" + CHUNK.to_bytes(8, "big") + bytes(CHUNK)
    sent = 0

    def flood() -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            while sent < 2 << 30:
                connection.sendall(frame)
                sent += len(frame)

    await asyncio.to_thread(flood)
    connection.close()
    assert sent < 2 << 30, "nobody stopped it"
    await until(lambda: server.statistics.dropped.get("flood") == 1, "the flood to be counted")
    await until(lambda: server.statistics.clients == 0, "the connection to be gone")
    assert private_bytes() - before < 512 << 20
    await check_alive(server)


async def test_a_large_transfer_is_no_flood(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    sweep = FloodWatch.sweep

    def counted(watch: FloodWatch) -> int:
        sweeps.append(sweep(watch))
        return sweeps[-1]

    monkeypatch.setattr(FloodWatch, "sweep", counted)
    data = os.urandom(1 << 20) * 48
    async with PeerDriver("honest", server.endpoint, chunk_bytes=CHUNK) as driver:
        for _ in range(3):
            await driver.put("a", [data])
            sweeps.clear()
            await until(lambda: sweeps, "a look at the connections")
        assert await driver.get("a") == data
    assert "flood" not in server.statistics.dropped


@pytest.mark.parametrize("namespace", ["mapped", "copying"])
async def test_a_reader_that_stops_holds_nobody_up(
    server: PeerServer, dealer: zmq.Socket[bytes], namespace: str
) -> None:
    data = bytes(12 * CHUNK)
    async with PeerDriver(namespace, server.endpoint, chunk_bytes=CHUNK) as driver:
        await driver.put("a", [data])
        dealer.send(encode(1, BeginGet(b"r" * 16, namespace, "a", True, 0, 0, CHUNK)))
        assert await asyncio.to_thread(dealer.poll, 5000)
        _, state = decode(dealer.recv_multipart()[0])
        opening = state.opening  # type: ignore[union-attr]
        # More than the server lets wait; and nothing is read from now on.
        for n in range(2000):
            with contextlib.suppress(zmq.Again):
                dealer.send(encode(n, GetChunk(b"r" * 16, n % 12, opening)), zmq.NOBLOCK)
        peak = 0
        for _ in range(3):
            assert await driver.get("a") == data
            peak = max(peak, server.statistics.bytes_in_flight)
        assert peak <= LIMITS.buffer_bytes + LIMITS.in_flight_bytes


@pytest.mark.parametrize("limits", [dataclasses.replace(LIMITS, idle_s=0.3)], ids=["impatient"])
async def test_an_abandoned_put_is_dropped(server: PeerServer, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(encode(1, Hello("n")))
    assert await asyncio.to_thread(dealer.poll, 5000)
    _, welcome = decode(dealer.recv())
    incarnation = welcome.incarnation  # type: ignore[union-attr]
    begin = BeginPut(b"p" * 16, "n", "a", 4 * CHUNK, "overwrite", "", CHUNK, 4, incarnation, 0, 0)
    dealer.send(encode(2, begin))
    dealer.send_multipart([encode(3, PutChunk(b"p" * 16, 0, checksum(bytes(CHUNK)))), bytes(CHUNK)])
    async with PeerDriver("n", server.endpoint) as driver:
        await until(lambda: server.statistics.transfers == 1, "the put to begin")
        assert (await driver.usage()).used_bytes == 4 * CHUNK
        await until(lambda: server.statistics.transfers == 0, "the put to be dropped")
        assert (await driver.usage()).used_bytes == 0
        assert [item async for item in driver.list()] == []
    assert server.statistics.dropped["abandoned"] == 1
    assert server.statistics.bytes_in_flight == 0


async def test_too_many_connections_are_refused_and_others_served(server: PeerServer) -> None:
    async with PeerDriver("honest", server.endpoint, chunk_bytes=CHUNK) as driver:
        crowd = [raw_connection(server) for _ in range(2 * LIMITS.connections)]
        await driver.put("a", [b"still here"])
        assert await driver.get("a") == b"still here"
        for connection in crowd:
            connection.close()
        await until(lambda: server.statistics.clients == 1, "the crowd to be gone")
    await check_alive(server)
