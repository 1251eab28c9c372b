"""Bodies received straight to where they are wanted, from a server that writes what a test tells it."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import aiohttp
import pytest
import trustme

from tiercheck.tiers.s3.incoming import PIECE_BYTES_MAX, Incoming, _Connection, _Receiver

WAIT_S_MAX = 30.0
LARGE = random.Random(7).randbytes(3 * PIECE_BYTES_MAX + 12345)
"""More than the client holds back, and more than a connection takes at once."""

Writing = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """Answers each request over a connection with what ``answer`` writes."""

    answer: Writing
    url: str = ""
    connections: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await self.answer(writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed.set()
            writer.close()


@asynccontextmanager
async def serving(
    answer: Writing, *, tls: bool = False, auto_decompress: bool = False
) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    """A server, and a client that keeps one connection to it at most."""
    ours = theirs = None
    if tls:
        authority = trustme.CA()
        theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(theirs)
        ours = ssl.create_default_context()
        authority.configure_trust(ours)
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=theirs)
    host, port = listening.sockets[0].getsockname()
    server.url = f"{'https' if tls else 'http'}://{host}:{port}/"
    connector = aiohttp.TCPConnector(limit=1, ssl=ours if ours is not None else True)
    async with (
        asyncio.timeout(WAIT_S_MAX),
        listening,
        aiohttp.ClientSession(connector=connector, auto_decompress=auto_decompress) as client,
    ):
        yield server, client


def head(nbytes: int, *lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {nbytes}", *lines, "", ""]).encode()


def whole(body: bytes) -> Writing:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(body)) + body)

    return write


class Arrivals:
    """The counts that were told, and the bytes that were there when they were."""

    def __init__(self, target: memoryview) -> None:
        self.target = target
        self.seen = bytearray()

    def __call__(self, nbytes: int) -> None:
        assert nbytes > 0
        self.seen += self.target[len(self.seen) : len(self.seen) + nbytes]


async def received(response: aiohttp.ClientResponse, *sizes: int) -> bytes:
    """The body, in fills of so many bytes each."""
    incoming = Incoming(response)
    body = b""
    for nbytes in sizes:
        target = memoryview(bytearray(nbytes))
        arrivals = Arrivals(target)
        await incoming.fill(target, arrivals)
        assert arrivals.seen == target
        body += bytes(target)
    return body


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 16, PIECE_BYTES_MAX, len(LARGE)])
async def test_the_connection_serves_one_body_after_the_other(nbytes: int, tls: bool) -> None:
    body = LARGE[:nbytes]
    async with serving(whole(body), tls=tls) as (server, client):
        for _ in range(4):
            async with client.get(server.url) as response:
                assert await received(response, nbytes) == body
        # And one that is read as always, on the same connection.
        async with client.get(server.url) as response:
            assert await response.read() == body
        assert server.connections == 1


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_body_in_several_fills(tls: bool) -> None:
    sizes = [1, 70_000, 2 * PIECE_BYTES_MAX, 5]
    sizes.append(len(LARGE) - sum(sizes))
    async with serving(whole(LARGE), tls=tls) as (server, client):
        for _ in range(2):
            async with client.get(server.url) as response:
                assert await received(response, *sizes) == LARGE
        assert server.connections == 1


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_what_comes_between_two_fills_is_the_clients(tls: bool) -> None:
    """And so the connection's end of the body is told, whoever received the last of it."""
    last = 1000
    go_on = asyncio.Event()

    async def pausing(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(LARGE)) + LARGE[:-last])
        await go_on.wait()
        writer.write(LARGE[-last:])

    async with serving(pausing, tls=tls) as (server, client):
        for _ in range(2):
            go_on.clear()
            async with client.get(server.url) as response:
                incoming = Incoming(response)
                first, second = memoryview(bytearray(len(LARGE) - last)), memoryview(bytearray(last))
                await incoming.fill(first, Arrivals(first))
                go_on.set()
                await response.content._wait("test")  # until the client has got it
                await incoming.fill(second, Arrivals(second))
                assert bytes(first) + bytes(second) == LARGE
        assert server.connections == 1


async def test_what_the_client_holds_back_comes_first() -> None:
    """It has read more than it was told to, and has stopped reading."""
    async with serving(whole(LARGE)) as (server, client):
        for _ in range(2):
            async with client.get(server.url, read_bufsize=1024) as response:
                assert response.connection is not None
                assert response.connection.transport is not None
                assert not response.connection.transport.is_reading()
                assert await received(response, len(LARGE)) == LARGE
        assert server.connections == 1


async def test_a_body_byte_by_byte() -> None:
    body = LARGE[:300]

    async def trickle(writer: asyncio.StreamWriter) -> None:
        for byte in head(len(body)) + body:
            writer.write(bytes([byte]))
            await writer.drain()

    async with serving(trickle) as (server, client):
        for _ in range(2):
            async with client.get(server.url) as response:
                assert await received(response, 100, 200) == body
        assert server.connections == 1


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("nbytes", [0, 1, 1 << 16, PIECE_BYTES_MAX + 1, len(LARGE) - 1])
@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_body_that_is_cut_off(nbytes: int, how: str, tls: bool) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(LARGE)) + LARGE[:nbytes])
        await writer.drain()
        if how == "reset":
            never_linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, never_linger)
            writer.transport.abort()
        else:
            writer.close()

    async with serving(cut, tls=tls) as (server, client):
        for _ in range(2):
            async with client.get(server.url) as response:
                room = bytearray(len(LARGE))
                with memoryview(room) as target:
                    arrivals = Arrivals(target)
                    # Whoever keeps the error keeps nothing of the memory with it.
                    with pytest.raises((ConnectionError, aiohttp.ClientError)) as failed:
                        await Incoming(response).fill(target, arrivals)
                assert_nobody_looks_at(room)
                assert response.connection is None or response.connection.transport is None, "the client was told"
                assert arrivals.seen == LARGE[: len(arrivals.seen)]
                assert len(arrivals.seen) == nbytes or how == "reset"
                del failed
        assert server.connections == 2


def assert_nobody_looks_at(room: bytearray) -> None:
    room.append(0)  # BufferError, were there still a view of it
    del room[-1]


@pytest.mark.parametrize("later", range(6))
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_connection_that_is_lost_before_it_is_borrowed(how: str, tls: bool, later: int) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(head(1000))
        await writer.drain()
        writer.close() if how == "closed" else writer.transport.abort()

    async with serving(cut, tls=tls) as (server, client), client.get(server.url) as response:
        for _ in range(later):
            await asyncio.sleep(0)  # a step of the loop each, somewhere in which the loss is told
        with pytest.raises((ConnectionError, aiohttp.ClientError)):
            await received(response, 1000)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_an_error_of_whom_is_told_is_theirs(tls: bool) -> None:
    async with serving(whole(LARGE), tls=tls) as (server, client):
        for nbytes_before in (0, 1, len(LARGE) - 1):
            async with client.get(server.url) as response:
                room = bytearray(len(LARGE))
                seen = 0

                def arrived(nbytes: int, nbytes_before: int = nbytes_before) -> None:
                    nonlocal seen
                    seen += nbytes
                    if seen > nbytes_before:
                        raise ZeroDivisionError

                with memoryview(room) as target, pytest.raises(ZeroDivisionError) as failed:
                    await Incoming(response).fill(target, arrived)
                assert_nobody_looks_at(room)
                del failed


async def test_a_body_that_is_shorter_than_wanted() -> None:
    async with serving(whole(LARGE)) as (server, client):
        async with client.get(server.url) as response:
            with pytest.raises(ConnectionError, match="ended 3 bytes early"):
                await received(response, len(LARGE) + 3)
        assert server.connections == 1


async def test_what_a_server_sends_too_much_goes_nowhere() -> None:
    async with serving(whole(LARGE)) as (server, client):
        async with client.get(server.url) as response:
            room = memoryview(bytearray(len(LARGE)))
            await Incoming(response).fill(room[: len(LARGE) - 5], Arrivals(room))
        assert room[:-5] == LARGE[:-5]
        assert not any(room[-5:])

    async def too_much(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(LARGE) - 5) + LARGE)

    async with serving(too_much) as (server, client):
        async with client.get(server.url) as response:
            room = memoryview(bytearray(len(LARGE)))
            with pytest.raises(ConnectionError, match="ended 5 bytes early"):
                await Incoming(response).fill(room, Arrivals(room))
        assert room[:-5] == LARGE[:-5]
        assert not any(room[-5:])


async def test_a_body_in_chunks_is_left_to_the_client() -> None:
    """Its bytes on the wire are not the body's, and nobody says how many they are."""

    async def chunked(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(LARGE), 99_991):
            chunk = LARGE[at : at + 99_991]
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with serving(chunked) as (server, client):
        for _ in range(2):
            async with client.get(server.url) as response:
                assert await received(response, len(LARGE)) == LARGE
                assert await response.content.read() == b""
        assert server.connections == 1


@pytest.mark.parametrize("auto_decompress", [False, True])
async def test_a_compressed_body_is_left_to_the_client(auto_decompress: bool) -> None:
    """Whether what is wanted is the bytes on the wire, only the client knows."""
    packed = gzip.compress(LARGE, 1)
    wanted = LARGE if auto_decompress else packed

    async def compressed(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(packed), "Content-Encoding: gzip") + packed)

    async with serving(compressed, auto_decompress=auto_decompress) as (server, client):
        for _ in range(2):
            async with client.get(server.url) as response:
                assert await received(response, len(wanted)) == wanted
                assert await response.content.read() == b""
        assert server.connections == 1


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_after_a_cancellation_nothing_is_written(tls: bool) -> None:
    half = len(LARGE) // 2
    go_on, gone_on = asyncio.Event(), asyncio.Event()

    async def pausing(writer: asyncio.StreamWriter) -> None:
        writer.write(head(len(LARGE)) + LARGE[:half])
        await go_on.wait()
        writer.write(LARGE[half:])
        await writer.drain()
        gone_on.set()

    async with serving(pausing, tls=tls) as (server, client):
        room = bytearray(len(LARGE))
        target = memoryview(room)
        arrivals = Arrivals(target)
        half_is_there = asyncio.Event()

        def arrived(nbytes: int) -> None:
            arrivals(nbytes)
            if len(arrivals.seen) == half:
                half_is_there.set()

        async with client.get(server.url) as response:
            filling = asyncio.create_task(Incoming(response).fill(target, arrived))
            await half_is_there.wait()
            filling.cancel()
            await asyncio.wait({filling})
            assert filling.cancelled()
            target.release()
            assert_nobody_looks_at(room)
            # The other half comes all the same, and to the client.
            go_on.set()
            assert await response.content.readany()
            response.close()
        assert room[:half] == LARGE[:half]
        assert not any(room[half:])

        async with client.get(server.url) as response:
            assert await received(response, len(LARGE)) == LARGE
        assert server.connections == 2


async def test_the_last_bytes_may_come_with_the_cancellation() -> None:
    """The transport reads once more before the task that is cancelled gives its connection back."""
    room = bytearray(10)
    transport = Lent()
    with memoryview(room) as place:
        connection = _Connection(cast(asyncio.Transport, transport), asyncio.Protocol())
        receiver = _Receiver(connection, place, lambda nbytes: None)
        running = asyncio.create_task(receiver.run())
        await asyncio.sleep(0)
        assert transport.protocols == [receiver]
        running.cancel()
        receiver.get_buffer(-1)[:] = b"0123456789"
        receiver.buffer_updated(10)
        await asyncio.wait({running})
        assert running.cancelled()
        assert transport.protocols == [receiver, connection.owner]
    assert_nobody_looks_at(room)


class Lent:
    """A transport, as far as a receiver knows it."""

    def __init__(self) -> None:
        self.protocols: list[asyncio.BaseProtocol] = []

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocols.append(protocol)
