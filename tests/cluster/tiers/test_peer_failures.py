"""The peer tier against real failures: a server killed or stopped, connections cut, a network taken down."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.peer import PeerProcess
from tiercheck.errors import AlreadyExists, NotFound, TierError, Transient
from tiercheck.tiers.peer import PeerDriver, PeerKeys
from tiercheck.tiers.shm.driver import remove_namespace
from tiercheck.types import PutMode

pytestmark = pytest.mark.cluster

CHUNK = 1 << 20


@pytest.fixture
def server() -> Iterator[PeerProcess]:
    with PeerProcess(f"test-{secrets.token_hex(6)}") as process:
        yield process
    remove_namespace(f"{process.prefix}-n")


def client(server: PeerProcess, *, deadline_s: float = 20.0, at: str | None = None) -> PeerDriver:
    return PeerDriver("n", at or server.endpoint, chunk_bytes=CHUNK, credit_bytes=8 * CHUNK, deadline_s=deadline_s)


def content(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(1 << 16) * (nbytes >> 16) + b"%d" % seed


async def test_puts_and_gets_outlive_a_killed_server(server: PeerProcess) -> None:
    chance = random.Random(11)
    objects = {f"k{n}": content(n, 40 << 20) for n in range(2)}
    async with client(server) as driver:
        await driver.put("k0", [objects["k0"]])
        for round_number in range(3):
            into = memoryview(bytearray(len(objects["k0"])))
            work = [
                asyncio.create_task(driver.put("k1", [objects["k1"]])),
                asyncio.create_task(driver.get("k0", into=into)),
            ]
            await asyncio.sleep(chance.random() * 0.05)
            await asyncio.to_thread(server.restart)
            info, found = await asyncio.gather(*work)
            assert info == await driver.stat("k1")  # type: ignore[comparison-overlap]
            assert found == objects["k0"], round_number
            assert await driver.get("k1") == objects["k1"]
            await driver.delete(["k1"])
        assert [item.key async for item in driver.list()] == ["k0"]
        assert (await driver.usage()).used_bytes == len(objects["k0"])


def test_a_server_that_has_all_that_it_takes_outlives_a_killed_client() -> None:
    """What the client has sent waits to be read, on a connection that is gone."""
    command = [sys.executable, "-m", "tests.cluster.tiers.saturated_peer"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            endpoint = server.stdout.readline().strip()
            with subprocess.Popen([*command, endpoint], **pipes) as client:
                assert client.stdout is not None
                assert client.stdout.readline() == "asked\n"
                client.kill()
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(7.0)  # longer than its store takes
            server.stdin.write("\n")
            server.stdin.close()
            assert server.wait(30) == 0
        finally:
            server.kill()


async def test_a_killed_server_never_makes_a_creation_lie(server: PeerProcess) -> None:
    chance = random.Random(12)
    unknown = 0
    async with client(server) as driver:
        for n in range(6):
            key, data = f"c{n}", content(n, chance.choice([0, 3 * CHUNK]))
            creating = asyncio.create_task(driver.put(key, [data], mode=PutMode.CREATE))
            await asyncio.sleep(chance.random() * 0.004)
            await asyncio.to_thread(server.restart)
            try:
                info = await creating
            except Transient as error:
                assert "may have been stored or not" in str(error)
                unknown += 1
            else:
                assert await driver.stat(key) == info
                assert await driver.get(key) == data
                with pytest.raises(AlreadyExists):
                    await driver.put(key, [data], mode=PutMode.CREATE)
    assert unknown < 6


async def test_a_stopped_server_costs_the_deadline_and_no_more(server: PeerProcess) -> None:
    async with client(server, deadline_s=1.5) as driver:
        await driver.put("a", [b"before"])
        server.stop()
        started = time.monotonic()
        buffer = bytearray(32 << 20)
        with pytest.raises(Transient, match=server.endpoint):
            await driver.put("b", [buffer])
        buffer.append(0)  # BufferError, were it still in use
        with pytest.raises(Transient, match=server.endpoint):
            await driver.stat("a")
        assert time.monotonic() - started < 10
        server.resume()
        assert await driver.get("a") == b"before"


async def test_a_stopped_server_with_keys_goes_on_when_its_clients_have_gone(tmp_path: Path) -> None:
    """ZeroMQ's own heartbeats would wait for it then, on connections that are closed, and have it abort."""
    keys = PeerKeys.generate(tmp_path / "keys")
    name = f"test-{secrets.token_hex(6)}"
    with PeerProcess(name, keys=tmp_path / "keys") as server:
        async with PeerDriver("n", server.endpoint, keys=keys, deadline_s=4.5) as driver:
            await driver.put("a", [b"before"])
            server.stop()
            with pytest.raises(Transient):
                await driver.stat("a")
        server.resume()
        async with PeerDriver("n", server.endpoint, keys=keys) as driver:
            assert await driver.get("a") == b"before"
    remove_namespace(f"{name}-n")


async def test_a_put_cancelled_while_the_server_hangs_lets_its_buffers_go(server: PeerProcess) -> None:
    async with client(server) as driver:
        await driver.put("a", [b"old"])
        server.stop()
        buffer = bytearray(32 << 20)
        putting = asyncio.create_task(driver.put("a", [buffer]))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert time.monotonic() - started < 8
        buffer.append(0)
        server.resume()
        await driver.put("a", [b"new"])
        await asyncio.sleep(0.3)
        assert await driver.get("a") == b"new"


class Proxy:
    """Between client and server: breaks every connection, with a reset, after so many bytes."""

    def __init__(self, target: str, bytes_each: int) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.bytes_each = bytes_each
        self.nbytes = 0
        self.cuts = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self.handle, "127.0.0.1", 0) as listener:
            yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            self.bytes_each = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        left = [self.bytes_each]
        pumps = [
            asyncio.create_task(self.pump(reader, up_writer, left)),
            asyncio.create_task(self.pump(up_reader, writer, left)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self.cuts += 1
        for end in (writer, up_writer):
            end.transport.abort()

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: list[int]) -> None:
        with contextlib.suppress(ConnectionError):
            while left[0] > 0 and (data := await source.read(1 << 16)):
                left[0] -= len(data)
                self.nbytes += len(data)
                sink.write(data)
                await sink.drain()


async def test_a_broken_transfer_goes_on_where_it_was(server: PeerProcess) -> None:
    """Every connection breaks after 13 MiB of an object of 64, on the way there and on the way back."""
    data = content(5, 64 << 20)
    proxy = Proxy(server.endpoint, 13 << 20)
    async with proxy.running() as at, client(server, at=at) as driver:
        await driver.put("a", [data])
        put_nbytes = proxy.nbytes
        assert proxy.cuts >= 4
        into = memoryview(bytearray(len(data)))
        assert await driver.get("a", into=into) == data
        # A chunk in eight can be lost at each cut, not what came before it.
        for nbytes in (put_nbytes, proxy.nbytes - put_nbytes):
            assert nbytes < 1.7 * len(data)
    async with client(server) as driver:
        assert await driver.get("a") == data


@pytest.fixture
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace behind a slow cable that can be pulled: its name, and its address."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"tcpeer{secrets.token_hex(2)}"
    subnet = f"10.{random.randrange(100, 200)}.{random.randrange(256)}"
    commands = [
        f"netns add {name}",
        f"link add {name}a type veth peer name {name}b",
        f"link set {name}b netns {name}",
        f"addr add {subnet}.1/24 dev {name}a",
        f"link set {name}a up",
        f"-n {name} addr add {subnet}.2/24 dev {name}b",
        f"-n {name} link set {name}b up",
        f"-n {name} link set lo up",
    ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        # 100 MB/s from here to there: long enough to be in the middle of it, on any machine.
        shape = f"qdisc add dev {name}a root tbf rate 800mbit burst 1mb latency 50ms"
        subprocess.run(["tc", *shape.split()], check=True, capture_output=True)
        yield name, f"{subnet}.2"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True)


async def test_a_pulled_cable_is_a_pause(namespace: tuple[str, str], tmp_path: Path) -> None:
    name, host = namespace
    keys = PeerKeys.generate(tmp_path / "keys")
    data = content(6, 96 << 20)

    async def set_cable(state: str) -> None:
        await asyncio.to_thread(subprocess.run, ["ip", "link", "set", f"{name}a", state], check=True)

    with PeerProcess(f"test-{secrets.token_hex(6)}", keys=tmp_path / "keys", host=host, netns=name) as server:
        try:
            async with PeerDriver("n", server.endpoint, keys=keys, chunk_bytes=CHUNK, deadline_s=30) as driver:
                putting = asyncio.create_task(driver.put("a", [data]))
                await asyncio.sleep(0.1)
                await set_cable("down")
                await asyncio.sleep(1.0)
                assert not putting.done()
                await set_cable("up")
                assert (await putting).nbytes == len(data)
                assert await driver.get("a") == data
                await set_cable("down")
            with pytest.raises(Transient, match=server.endpoint):
                await PeerDriver("n", server.endpoint, keys=keys, deadline_s=0.5).open()
        finally:
            server.kill()
            with contextlib.suppress(NotFound, TierError):
                remove_namespace(f"{server.prefix}-n")
