"""The peer driver and its server together: addresses, keys, limits, errors, statistics."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tiercheck.errors import (
    AlreadyExists,
    CapacityExceeded,
    Closed,
    ConfigurationError,
    NotFound,
    PreconditionFailed,
    TierError,
    Transient,
    Unauthorized,
    Unsupported,
)
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerDriver, PeerKeys, PeerLimits, PeerServer
from tiercheck.tiers.peer.client.link import Link
from tiercheck.tiers.peer.client.protocol import Call, Caller, ClientSettings, Operation
from tiercheck.tiers.peer.messages import HEAD_BYTES_MAX, Hello, Stat
from tiercheck.tiers.peer.server.effects import DeleteObjects, StoreWhole
from tiercheck.tiers.peer.server.store import NamespaceStore
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.wrappers import ReadOnlyDriver
from tiercheck.types import ByteRange, ObjectInfo, Payload, PutMode, Survives

Serve = Callable[..., AbstractAsyncContextManager[PeerServer]]
CHUNK = 1 << 16


@asynccontextmanager
async def serving(
    factory: Callable[[str], TierDriver] | None = None,
    *,
    keys: PeerKeys | None = None,
    limits: PeerLimits | None = None,
    bind: str = "tcp://127.0.0.1:0",
) -> AsyncIterator[PeerServer]:
    async def open_namespace(name: str) -> TierDriver:
        driver = factory(name) if factory else MemoryDriver()
        await driver.open()
        return driver

    async with PeerServer(open_namespace, keys=keys, limits=limits, bind=bind) as server:
        yield server


def small(server: PeerServer, name: str = "n", **options: object) -> PeerDriver:
    return PeerDriver(name, server.endpoint, chunk_bytes=CHUNK, credit_bytes=4 * CHUNK, **options)  # type: ignore[arg-type]


# URLs and addresses.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("peer://run", "Checkpointer"),
        ("peer://?at=a:1", "namespace"),
        ("peer://a/b?at=a:1", "slash"),
        ("peer://..?at=a:1", "plain"),
        ("peer://run?at=nowhere", "no address"),
        ("peer://run?at=host:0", "no address"),
        ("peer://run?at=host:70000", "no address"),
        ("peer://run?at=a:1&connections=0", "1 to 16"),
        ("peer://run?at=a:1&deadline=0", "seconds"),
        ("peer://run?at=a:1&deadline=nan", "seconds"),
        ("peer://run?at=a:1&credit=many", "size"),
        ("peer://run?at=a:1&survives=war", "failure class"),
        ("peer://run?at=a:1&servr_key=1", "did you mean 'server_key'"),
        ("peer://run?at=a:1&server_key=" + "ab" * 32, "no keys of its own"),
        ("peer://run?at=a:1&keys=/does/not/exist", "tiercheck keys"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERCHECK_KEYS", raising=False)
    with pytest.raises(ConfigurationError, match=expected):
        make_driver(url)


def test_options_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    PeerKeys.generate(tmp_path / "keys")
    monkeypatch.setenv("TIERCHECK_KEYS", str(tmp_path / "keys"))
    driver = make_driver(f"peer://run?at=[::1]:7&credit=8MiB&survives=rack&server_key={'ab' * 32}&connections=2")
    assert driver.url == "peer://run?at=%5B::1%5D:7"
    assert driver.capabilities.survives is Survives.RACK
    assert make_driver("peer://run?at=h:1").capabilities.survives is Survives.NODE


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:0", "tcp://eth0:0", "tcp://[::]:0"])
def test_without_keys_only_loopback_is_bound(bind: str) -> None:
    with pytest.raises(ConfigurationError, match="tiercheck keys DIRECTORY"):
        PeerServer(opened, bind=bind)


NO_ADDRESSES = ["ipc://tmp/x", "ipc://@x", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://:1", "udp://a:1"]


@pytest.mark.parametrize("bind", NO_ADDRESSES)
def test_other_addresses_are_refused(bind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"HOST:PORT|no address"):
        PeerServer(opened, bind=bind)


async def opened(name: str) -> TierDriver:
    driver = MemoryDriver()
    await driver.open()
    return driver


async def test_starting_without_keys_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(bind="tcp://localhost:0") as server:
            assert server.server_key is None
            with pytest.raises(RuntimeError, match="running already"):
                await server.start()
    assert "without keys: every user of this machine gets in" in caplog.text
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.endpoint
    await server.close()


async def test_a_port_in_use_is_a_configuration_error() -> None:
    async with serving() as server:
        with pytest.raises(ConfigurationError, match=r"cannot bind .* in use.*; give another port, or 0 "):
            await PeerServer(opened, bind=f"tcp://{server.endpoint}").start()


async def test_ipv6() -> None:
    async with serving(bind="tcp://[::1]:0") as server:
        assert server.endpoint.startswith("[::1]:")
        async with small(server) as driver:
            await driver.put("a", [b"six"])
            assert await driver.get("a") == b"six"


# Keys.


async def test_listed_clients_get_in_and_nobody_else(tmp_path: Path) -> None:
    keys, strangers = PeerKeys.generate(tmp_path / "keys"), PeerKeys.generate(tmp_path / "strangers")
    async with serving(keys=keys, bind="tcp://0.0.0.0:0") as server:
        assert server.server_key == keys.server_public
        at = server.endpoint.replace("0.0.0.0", "127.0.0.1")
        data = bytes(range(256)) * 5000
        async with PeerDriver("n", at, keys=keys, chunk_bytes=CHUNK) as driver:
            await driver.put("a", [data])
            assert await driver.get("a") == data
        refused = {
            "clients.allowed": PeerDriver("n", at, keys=strangers, server_key=keys.server_public),
            "server_key": PeerDriver("n", at, keys=keys, server_key=strangers.server_public),
            "TIERCHECK_KEYS": PeerDriver("n", at),
        }
        for hint, driver in refused.items():
            with pytest.raises(Unauthorized, match=hint) as caught:
                await driver.open()
            assert at in str(caught.value)
        assert server.statistics.dropped["not listed"] >= 1
        assert server.statistics.objects_got == 1
        async with PeerDriver("n", at, keys=keys) as driver:
            assert await driver.get("a") == data


async def test_chunks_as_large_as_the_server_takes_go_through_encrypted(tmp_path: Path) -> None:
    keys = PeerKeys.generate(tmp_path / "keys")
    chunk_bytes = HEAD_BYTES_MAX  # no head is longer either
    data = bytes(range(256)) * (5 * chunk_bytes // 256)
    async with (
        serving(keys=keys, limits=PeerLimits(chunk_bytes=chunk_bytes)) as server,
        PeerDriver("n", server.endpoint, keys=keys, deadline_s=5) as driver,
    ):
        await driver.put("several", [data])
        await driver.put("one", [data[:chunk_bytes]])
        assert await driver.get("several") == data
        assert await driver.get("one") == data[:chunk_bytes]


async def test_a_client_with_keys_learns_that_the_server_has_none(tmp_path: Path) -> None:
    keys = PeerKeys.generate(tmp_path / "keys")
    async with serving() as server:
        with pytest.raises(Unauthorized, match="has no keys"):
            await PeerDriver("n", server.endpoint, keys=keys).open()


async def test_who_was_not_listed_gets_in_once_it_is(tmp_path: Path) -> None:
    keys, strangers = PeerKeys.generate(tmp_path / "keys"), PeerKeys.generate(tmp_path / "strangers")
    async with serving(keys=keys) as server:
        bind = f"tcp://{server.endpoint}"
        link = Link(settings_of(server), connections=1, keys=strangers, server_key=keys.server_public)
        with pytest.raises(Unauthorized, match="does not let this client in"):
            await link.run(hello())
    listed = replace(keys, allowed={**keys.allowed, **strangers.allowed})
    async with serving(keys=listed, bind=bind):
        deadline = time.monotonic() + 20
        while True:
            try:
                assert await link.run(hello()) == "let in"
                break
            except Unauthorized:
                assert time.monotonic() < deadline, "it did not come back"
                await asyncio.sleep(0.05)
    await link.close()


# Peers that are busy.


def settings_of(server: PeerServer) -> ClientSettings:
    return ClientSettings(server.endpoint, CHUNK, 4 * CHUNK, 10.0)


def hello() -> Call:
    return Call(Hello("n"), lambda answer: "let in")


async def test_a_client_too_many_waits_until_another_goes() -> None:
    async with serving(limits=PeerLimits(connections=1)) as server:
        async with small(server, connections=1) as driver:
            with pytest.raises(Transient, match="has as many connections as it takes"):
                await small(server, connections=1, deadline_s=0.5).open()
            link = Link(settings_of(server), connections=1, keys=None, server_key=None)
            waiting = asyncio.create_task(link.run(hello()))
            await driver.put("a", [b"busy"])
            assert server.statistics.dropped["too many connections"] >= 1
            assert not waiting.done()
        assert await waiting == "let in"
        await link.close()


# Peers that are away.


async def test_a_peer_that_is_away_is_transient_and_named() -> None:
    async with serving() as server:
        endpoint = server.endpoint
    started = time.monotonic()
    with pytest.raises(Transient, match=endpoint):
        await PeerDriver("n", endpoint, deadline_s=0.5).open()
    assert time.monotonic() - started < 5


async def test_a_call_outlives_a_restart_of_the_server() -> None:
    store = MemoryDriver()

    async def open_namespace(name: str) -> TierDriver:
        await store.open()
        return store

    server = PeerServer(open_namespace)
    await server.start()
    endpoint = server.endpoint
    driver = small(server)
    await driver.open()
    await driver.put("a", [b"1"])
    await server.close()
    getting = asyncio.create_task(driver.get("a"))
    putting = asyncio.create_task(driver.put("b", [bytes(10 * CHUNK)]))
    server = PeerServer(open_namespace, bind=f"tcp://{endpoint}")
    await server.start()
    assert await getting == b"1"
    assert (await putting).nbytes == 10 * CHUNK
    with pytest.raises(AlreadyExists):
        await driver.put("a", [b"2"], mode=PutMode.CREATE)
    await server.close()
    pending = asyncio.create_task(driver.stat("a"))
    await asyncio.sleep(0)
    await driver.close()
    with pytest.raises(Closed):
        await pending


# Limits.


async def test_memory_bytes_bounds_all_namespaces_together() -> None:
    limits = PeerLimits(memory_bytes=10 * CHUNK, chunk_bytes=CHUNK, in_flight_bytes=2 * CHUNK)
    async with serving(limits=limits) as server, small(server, "one") as one, small(server, "two") as two:
        await one.put("a", [bytes(6 * CHUNK)])
        for nbytes in (5 * CHUNK, 11 * CHUNK):
            with pytest.raises(CapacityExceeded, match=r"PeerLimits\.memory_bytes"):
                await two.put("b", [bytes(nbytes)])
        await two.put("b", [bytes(4 * CHUNK)])
        with pytest.raises(CapacityExceeded, match=r"PeerLimits\.memory_bytes"):
            await two.put("c", [b"x"])
        usage = await two.usage()
        assert (usage.used_bytes, usage.free_bytes) == (4 * CHUNK, 0)
        await one.delete(["a"])
        await two.put("c", [bytes(6 * CHUNK)])
        assert server.statistics.bytes_in_flight == 0


async def test_namespaces_are_opened_once_and_bounded() -> None:
    names: list[str] = []

    def factory(name: str) -> TierDriver:
        names.append(name)
        return MemoryDriver()

    async with serving(factory, limits=PeerLimits(namespaces=2)) as server:
        for name in ("a", "b", "a"):
            async with small(server, name) as driver:
                await driver.put(name, [b"x"])
        with pytest.raises(CapacityExceeded, match=r"PeerLimits\.namespaces"):
            await small(server, "c").open()
    assert names == ["a", "b"]


async def test_an_empty_namespace_makes_room_for_another_one() -> None:
    names: list[str] = []

    def factory(name: str) -> TierDriver:
        names.append(name)
        return MemoryDriver()

    async with serving(factory, limits=PeerLimits(namespaces=2)) as server, small(server, "kept") as kept:
        await kept.put("a", [b""])
        for n in range(5):
            async with small(server, f"empty{n}") as driver:
                assert [info async for info in driver.list()] == []
        assert [info.key async for info in kept.list()] == ["a"]
    assert names == ["kept", *(f"empty{n}" for n in range(5))]


async def test_objects_are_bounded_however_small() -> None:
    async with serving(limits=PeerLimits(objects=3)) as server, small(server) as one, small(server, "m") as two:
        for key in ("a", "b", "a", "a", "b"):  # an object that is replaced is one
            await one.put(key, [b""])
        await two.put("c", [bytes(2 * CHUNK)])
        for driver in (one, two):
            for nbytes in (0, 2 * CHUNK):
                with pytest.raises(CapacityExceeded, match=r"PeerLimits\.objects"):
                    await driver.put("d", [bytes(nbytes)])
        await one.delete(["a"])
        await two.put("d", [b""])
        with pytest.raises(CapacityExceeded, match=r"PeerLimits\.objects"):
            await one.put("e", [b""])


async def test_near_a_limit_not_all_objects_are_counted_for_each_put(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    ahead_s = [0.0]
    monkeypatch.setattr(loop, "time", lambda: ahead_s[0])

    class Slow(MemoryDriver):
        counts = 0

        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            Slow.counts += 1
            ahead_s[0] += 1.0
            async for info in super().list(prefix):
                yield info

    async def opened(name: str) -> TierDriver:
        driver = Slow()
        await driver.open()
        return driver

    async def refused(key: str) -> bool:
        try:
            await store.do(StoreWhole("n", key, b"", PutMode.OVERWRITE))
        except CapacityExceeded:
            return True
        return False

    store = NamespaceStore(opened, PeerLimits(objects=256))
    assert not any([await refused(f"k{n}") for n in range(256)])
    Slow.counts = 0
    assert all([await refused(f"more{n}") for n in range(20)])
    assert Slow.counts == 1, "nothing has changed"
    await store.do(DeleteObjects("n", ("k1",)))
    assert await refused("more")
    assert Slow.counts == 1, "hardly anything has changed"
    ahead_s[0] += 9.0
    assert not await refused("more")
    assert await refused("more still")
    assert Slow.counts == 2, "counting takes a tenth of the time"
    await store.do(DeleteObjects("n", tuple(f"k{n}" for n in range(2, 7))))
    assert not any([await refused(f"new{n}") for n in range(5)])
    assert Slow.counts == 3
    await store.close()


async def test_objects_that_were_there_before_count(tmp_path: Path) -> None:
    driver = MemoryDriver()
    async with driver:
        for key in ("a", "b"):
            await driver.put(key, [b""])
        store = driver.store
    again = MemoryDriver()
    again.store = store
    async with serving(lambda _: again, limits=PeerLimits(objects=3)) as server, small(server) as client:
        await client.put("c", [b""])
        with pytest.raises(CapacityExceeded, match=r"PeerLimits\.objects"):
            await client.put("d", [b""])


@pytest.mark.parametrize(
    "wrong", [{"memory_bytes": 0}, {"chunk_bytes": 1}, {"in_flight_bytes": 1}, {"idle_s": 0}, {"transfers": 0}]
)
def test_impossible_limits(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=f"PeerLimits.{next(iter(wrong))}"):
        PeerLimits(**wrong)  # type: ignore[arg-type]


# Errors.


class FailingDriver(MemoryDriver):
    error: Exception = RuntimeError("secret detail")

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RuntimeError("secret detail"), TierError, "RuntimeError"),
        (NotFound("its words", tier="inner://x", key="k"), NotFound, "its words"),
        (CapacityExceeded("full " * 1000), CapacityExceeded, "full"),
        (Transient("later\ud800"), Transient, "later"),
    ],
)
async def test_errors_of_the_servers_driver_travel(error: Exception, kind: type[TierError], text: str) -> None:
    driver = FailingDriver()
    driver.error = error
    async with serving(lambda _: driver) as server, small(server) as client:
        with pytest.raises(kind, match=text) as caught:
            await client.put("a", [b"x"])
        assert type(caught.value) is kind
        assert (caught.value.tier, caught.value.key) == (client.url, "a")
        assert "secret" not in str(caught.value)
        assert "inner" not in str(caught.value)
        await client.usage()


async def test_one_callers_mistake_is_nobody_elses() -> None:
    """Whatever a caller gets wrong ends that call; others under way, and later ones, know nothing of it."""
    data = bytes(range(256)) * 2000
    async with serving() as server, small(server) as driver:
        await driver.put("a", [data])
        others = [asyncio.create_task(driver.get("a")) for _ in range(3)]
        for into in (
            memoryview(bytes(len(data))),
            memoryview(array("d", bytes(len(data) + 8))),
            memoryview(bytearray(2 * len(data)))[::2],
        ):
            with pytest.raises(ValueError, match="into must be"):
                await driver.get("a", into=into)
        with pytest.raises(ValueError, match="past the end"):
            await driver.get("a", range=ByteRange(0, 1 << 70))
        with pytest.raises(PreconditionFailed):
            await driver.put("a", [b"x"], mode=PutMode.UPDATE("\ud800"))
        assert await asyncio.gather(*others) == [data] * 3
        assert await driver.get("a") == data


async def test_an_operation_that_fails_within_the_links_thread_fails_alone() -> None:
    class Faulty(Operation):
        def __init__(self, at_once: bool) -> None:
            super().__init__()
            self.at_once = at_once

        def start(self, caller: Caller, now: float) -> None:
            if self.at_once:
                raise RuntimeError("at the start")
            caller.requests[caller.send(self, caller.links[0], Stat("n", "a"))] = self

        def receive(self, caller: Caller, link: int, request_id: int, *_: object) -> None:
            raise RuntimeError("at the answer")

    async with serving() as server, small(server) as driver:
        await driver.put("a", [bytes(3 * CHUNK)])
        link = driver._opened()
        for at_once, text in ((True, "at the start"), (False, "at the answer")):
            other = asyncio.create_task(driver.get("a"))
            with pytest.raises(RuntimeError, match=text):
                await link.run(Faulty(at_once))
            assert await other == bytes(3 * CHUNK)


async def test_a_result_that_closing_has_reported_already_is_passed_over() -> None:
    async with serving() as server, small(server) as driver:
        await driver.put("a", [b"1"])
        link = driver._opened()
        future = asyncio.get_running_loop().create_future()
        link._futures[0] = future
        link._deliver(0, "result")
        link._deliver(0, Closed("the driver was closed"))
        assert future.result() == "result"


async def test_buffers_of_another_format_are_stored_byte_for_byte() -> None:
    numbers = array("d", range(3 * CHUNK // 8))
    async with serving() as server, small(server) as driver:
        await driver.put("a", [memoryview(numbers)])
        assert await driver.get("a") == numbers.tobytes()


async def test_statistics_count() -> None:
    async with serving() as server:
        async with small(server) as one, small(server) as two:
            await one.put("a", [bytes(3 * CHUNK)])
            await two.get("a")
            seen = server.statistics
        assert (seen.objects_put, seen.bytes_put) == (1, 3 * CHUNK)
        assert (seen.objects_got, seen.bytes_got) == (1, 3 * CHUNK)
        assert seen.clients == 2
        assert dict(seen.dropped) == {}


async def test_gathered_and_whole_buffers_give_the_same_object() -> None:
    async with serving() as server, small(server) as driver:
        data = bytes(range(251)) * 600
        for cut in (11, 77, 1000, CHUNK - 1, CHUNK, CHUNK + 1, len(data)):
            await driver.put("a", [data[at : at + cut] for at in range(0, len(data), cut)])
            assert await driver.get("a") == data


async def test_a_neighbours_memory_is_read_without_a_change() -> None:
    store = MemoryDriver()
    async with serving(lambda name: store) as server:
        async with small(server) as writer:
            await writer.put("a", [b"x" * 200_000])
        async with ReadOnlyDriver(small(server)) as reader:
            assert [info.key async for info in reader.list()] == ["a"]
            assert bytes(await reader.get("a", range=ByteRange(0, 3))) == b"xxx"
            with pytest.raises(Unsupported, match="opened to read"):
                await reader.put("b", [b"y"])
