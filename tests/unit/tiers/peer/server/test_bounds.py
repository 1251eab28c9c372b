"""What either side of a peer connection holds at most, whatever the other one sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.property.peer_network import Network
from tests.unit.tiers.peer.test_driver import serving, small
from tiercheck.errors import CapacityExceeded, NotFound
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerLimits, PeerServer
from tiercheck.tiers.peer.client.get import Getting
from tiercheck.tiers.peer.driver import new_transfer
from tiercheck.tiers.peer.messages import BeginGet, BeginPut, GetState, Hello, checksum, decode, encode
from tiercheck.tiers.peer.server import server, store
from tiercheck.tiers.peer.server.effects import (
    OpenObject,
    ReadableObject,
    ReadChunk,
    Reply,
    ReserveMemory,
    StoreWhole,
    Work,
)
from tiercheck.tiers.peer.server.protocol import ServerProtocol
from tiercheck.tiers.peer.server.store import NamespaceStore
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, PutMode, Survives

CHUNK = 1 << 16


class CopyingDriver(MemoryDriver):
    """Not mappable. ``before_get`` is run between the server's look at an object and its read of it."""

    before_get: Callable[[], None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, conditional_put=True)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        hook, self.before_get = self.before_get, None
        if hook is not None:
            hook()
        return await super().get(key, range=range, into=into)

    def replace(self, key: str, content: bytes) -> None:
        self.store.publish(key, memoryview(content), PutMode.OVERWRITE, tier=self.url)


async def opened(driver: CopyingDriver, limits: PeerLimits | None = None) -> NamespaceStore:
    async def open_namespace(name: str) -> CopyingDriver:
        await driver.open()
        return driver

    return NamespaceStore(open_namespace, limits or PeerLimits())


# An object that is replaced while it is read from a namespace that cannot be mapped.


async def test_a_get_begins_again_where_a_shorter_object_came_between() -> None:
    driver = CopyingDriver()
    async with serving(lambda _: driver) as server, small(server) as client:
        for shorter in (bytes(2 * CHUNK), bytes(CHUNK), b"x", b""):
            await client.put("a", [bytes(9 * CHUNK)])
            driver.before_get = lambda shorter=shorter: driver.replace("a", shorter)  # type: ignore[misc]
            assert await client.get("a") == shorter


async def test_a_chunk_past_the_end_of_what_is_there_now_was_replaced() -> None:
    driver = CopyingDriver()
    server_side = await opened(driver)
    await server_side.do(StoreWhole("n", "a", bytes(100), PutMode.OVERWRITE))
    source = ReadableObject("n", "a", ByteRange(0, 100), (await driver.stat("a")).etag, None)
    with pytest.raises(ValueError, match="past the end"):
        await server_side.do(ReadChunk(source, ByteRange(90, 110)))
    driver.replace("a", bytes(10))
    with pytest.raises(NotFound, match="replaced"):
        await server_side.do(ReadChunk(source, ByteRange(50, 100)))


@pytest.mark.parametrize("wanted", [None, ByteRange(0, 100), ByteRange(10, 20)])
@pytest.mark.parametrize("nbytes", [15, 40, 3 * CHUNK])
async def test_an_object_opened_while_it_is_replaced_is_one_or_the_other(wanted: ByteRange | None, nbytes: int) -> None:
    driver = CopyingDriver()
    server_side = await opened(driver)
    await server_side.do(StoreWhole("n", "a", b"o" * 100, PutMode.OVERWRITE))
    driver.before_get = lambda: driver.replace("a", b"n" * nbytes)
    task = OpenObject("n", "a", wanted, CHUNK)
    if wanted is not None and wanted.stop > nbytes:
        with pytest.raises(ValueError, match="past the end"):
            await server_side.do(task)
        return
    source = await server_side.do(task)
    assert isinstance(source, ReadableObject)
    length = nbytes if wanted is None else len(wanted)
    assert len(source.wanted) == length
    if source.content is None:
        assert length > CHUNK, "it is read chunk by chunk"
    else:
        assert source.content == b"n" * length
        assert source.copied


# Bytes that nobody gave credit for.


def answers(protocol: ServerProtocol, frames: list[bytes]) -> list[Reply | Work]:
    return protocol.receive(b"1", list(frames), 0.0)


def whole_put(n: int) -> list[bytes]:
    begin = BeginPut(bytes([n]) * 16, "n", "a", CHUNK, "overwrite", "", CHUNK, 1, 7, 0, checksum(bytes(CHUNK)))
    return [encode(n, begin), bytes(CHUNK)]


def test_objects_of_one_chunk_are_bounded_while_they_are_stored() -> None:
    limits = PeerLimits(chunk_bytes=CHUNK, in_flight_bytes=3 * CHUNK)
    protocol = ServerProtocol(limits, 7)
    under_way: list[Work] = []
    while not protocol.saturated:
        under_way += [effect for effect in answers(protocol, whole_put(len(under_way))) if isinstance(effect, Work)]
        assert len(under_way) <= 3
    assert len(under_way) == 3
    for outcome in (ObjectInfo("a", CHUNK, "1"), CapacityExceeded("full"), RuntimeError("broken")):
        protocol.done(under_way.pop().number, outcome, 0.0)
        assert not protocol.saturated
    assert protocol.puts.whole_bytes == 0


def test_copies_that_are_replies_in_one_piece_are_counted() -> None:
    limits = PeerLimits(chunk_bytes=CHUNK, in_flight_bytes=CHUNK, buffer_bytes=4 * CHUNK)
    protocol = ServerProtocol(limits, 7)

    def ask(n: int) -> list[Reply]:
        begin = [encode(n, BeginGet(bytes([n]) * 16, "n", "a", True, 0, 0, CHUNK))]
        (work,) = protocol.receive(bytes([n]), begin, 0.0)
        assert isinstance(work, Work)
        source = ReadableObject("n", "a", ByteRange(0, CHUNK), "1", memoryview(bytes(CHUNK)), copied=True)
        return [effect for effect in protocol.done(work.number, source, 0.0) if isinstance(effect, Reply)]

    sent = [reply for n in range(7) for reply in ask(n)]
    assert [reply.copied_bytes for reply in sent] == [CHUNK] * 4
    assert protocol.statistics(0).bytes_in_flight == 4 * CHUNK
    assert protocol.desk.dropped == {"no buffer": 3}
    protocol.gets.copies.give_back(sent[0].peer, CHUNK)  # one was sent
    assert len(ask(9)) == 1


async def test_memory_that_there_is_not_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    server_side = await opened(CopyingDriver())
    monkeypatch.setattr(store.mmap, "mmap", no_memory)
    with pytest.raises(CapacityExceeded, match="no memory"):
        await server_side.do(ReserveMemory("n", "a", 100))
    assert server_side.buffered_bytes == 0


# Memory that only a peer's word asks for.


def private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def test_a_size_that_a_peer_tells_takes_no_memory_before_bytes_come() -> None:
    network = Network(1, {})
    operation = Getting("n", "a", None, None, new_transfer)
    number = network.begin(operation)
    before = private_bytes()
    state = GetState(operation.transfer or b"", 1 << 30, "1", 0, 1)
    network.act_client(network.client.receive(1, [encode(1, state)], network.now))
    assert number not in network.results
    assert private_bytes() - before < 64 << 20


# Messages of many frames.


@pytest.mark.parametrize("frames", [server.FRAMES_MAX, 20_000])
async def test_a_message_of_many_frames_is_let_go_of_frame_by_frame(
    frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    receive = ServerProtocol.receive

    def counting(
        self: ServerProtocol, peer: bytes, frames: list[memoryview], now: float, owner: str
    ) -> list[Reply | Work]:
        seen.append(len(frames))
        return receive(self, peer, frames, now, owner)

    monkeypatch.setattr(ServerProtocol, "receive", counting)
    async with serving() as running:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://{running.endpoint}")
            dealer.send_multipart([b""] * frames)
            # One of far too many ends its connection, and is never looked at.
            await until_dropped(running, "malformed" if frames == server.FRAMES_MAX else "flood")
            until = time.monotonic() + 20
            while not dealer.poll(0):
                assert time.monotonic() < until, "nobody answers any more"
                dealer.send(encode(1, Hello("n")))
                await asyncio.to_thread(dealer.poll, 500)
            decode(dealer.recv())
    assert seen[:2] == [3, 1] if frames == server.FRAMES_MAX else set(seen) == {1}


async def until_dropped(server: PeerServer, reason: str) -> None:
    deadline = time.monotonic() + 10
    while not server.statistics.dropped.get(reason):
        assert time.monotonic() < deadline, f"nothing was dropped as {reason}"
        await asyncio.sleep(0.01)
