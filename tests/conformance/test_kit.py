"""The kit itself: a driver of few capabilities passes it, and one that breaks a promise does not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from naive_driver import NaiveDriver
from test_memory_conformance import TestMemory as MemoryTests

from tests.plain_driver import PlainDriver
from tiercheck.errors import CapacityExceeded, TierError, Unsupported
from tiercheck.testing.conformance import TierDriverTests
from tiercheck.testing.driver_kit.process_client import (
    InAnotherProcess,
    create_all,
    found,
    move_to,
    named,
    path_of,
    written,
)
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange, Capabilities, Leftover, ObjectInfo, Payload, PutMode, Survives


class TestPlain(MemoryTests):
    async def make_driver(self) -> TierDriver:
        return PlainDriver(self.store_name)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return PlainDriver(self.store_name)


class LyingDriver(MemoryDriver):
    """Can do everything, and denies it."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, mappable=False, conditional_put=False, ranged_get=False)


class BoastfulDriver(PlainDriver):
    """Can do nothing, and claims it."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, mappable=True, conditional_put=True, ranged_get=True)


class RacyDriver(MemoryDriver):
    """Looks, waits, then writes."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if mode.kind == "create" and key not in self.store.objects:
            await asyncio.sleep(0)
            mode = PutMode.OVERWRITE
        if mode.kind == "update" and key in self.store.objects and self.store.objects[key].etag == mode.etag:
            await asyncio.sleep(0)
            mode = PutMode.OVERWRITE
        return await super().put(key, payload, mode=mode)


class KeepingDriver(MemoryDriver):
    """Keeps a view of what it was given."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self.kept = [memoryview(buffer) for buffer in payload]
        return await super().put(key, payload, mode=mode)


class TearingDriver(MemoryDriver):
    """Publishes half of an object first."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await super().put(key, payload[:1], mode=mode)
        return await super().put(key, payload)


class UnsortedDriver(MemoryDriver):
    """Lists names as a file system does: a directory before what sorts before its slash."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = [item async for item in super().list(prefix)]
        for item in sorted(found, key=lambda item: item.key.split("/")):
            yield item


class TrustingDriver(MemoryDriver):
    """Deletes good keys before it sees a bad one."""

    async def delete(self, keys: object) -> None:
        for key in keys:  # type: ignore[attr-defined]
            await super().delete([key])


class BoastingDriver(MemoryDriver):
    """A put reports an etag that nobody else sees."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        info = await super().put(key, payload, mode=mode)
        return ObjectInfo(key, info.nbytes, f"{info.etag} of {id(self)}")


class NarrowDriver(MemoryDriver):
    """Takes no key of the length that it names."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if len(key) > 300:
            raise ValueError("too long for me")
        return await super().put(key, payload, mode=mode)


class HalfRangeDriver(MemoryDriver):
    """Ranges of large objects begin at a block."""

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        if range is not None and range.start > 4096:
            whole_blocks = ByteRange(range.start // 4096 * 4096, range.stop)
            return await super().get(key, range=whole_blocks, into=into)
        return await super().get(key, range=range, into=into)


class PartwiseDriver(MemoryDriver):
    """Fetches a range part by part, and where two parts meet one byte twice."""

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        meet = 0 if range is None else (range.start // self.capabilities.part_bytes + 1) * self.capabilities.part_bytes
        if range is None or range.stop <= meet:
            return await super().get(key, range=range, into=into)
        first = await super().get(key, range=ByteRange(range.start, meet))
        second = await super().get(key, range=ByteRange(meet - 1, range.stop - 1))
        found = memoryview(bytes(first) + bytes(second))
        if into is None:
            return found
        into[: len(found)] = found
        return into[: len(found)]


class JoiningDriver(MemoryDriver):
    """Joins what it is given."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        return await super().put(key, [b"".join(payload)], mode=mode)


class VagueDriver(MemoryDriver):
    """Says of a full tier only that something failed."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        try:
            return await super().put(key, payload, mode=mode)
        except CapacityExceeded as error:
            raise TierError(error.message, tier=self.url, key=key) from error


class HastyDriver(MemoryDriver):
    """Removes the old object before it knows that there is room for the new one."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await super().delete([key])
        return await super().put(key, payload, mode=mode)


class EmptyingDriver(MemoryDriver):
    """An object that is being deleted is an empty one for a moment."""

    async def delete(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        for key in set(kept) & set(self.store.objects):
            await super().put(key, [])
        await asyncio.sleep(0)
        await super().delete(kept)


class SweepingDriver(MemoryDriver):
    """Takes whatever it sees for something that was left, and removes it when it is asked."""

    async def leftovers(self) -> Sequence[Leftover]:
        found = [Leftover("object", info.key, info.nbytes, 0.0) async for info in self.list()]
        await self.delete([each.name for each in found])
        return found


class TalkativeDriver(MemoryDriver):
    """Its facts are no texts."""

    def facts(self) -> Mapping[str, str]:
        return {"open files": 3}  # type: ignore[dict-item]


FOUND = (AssertionError, Unsupported, BufferError, IndexError, ValueError, pytest.fail.Exception)


def kit_test(name: str) -> Callable[[MemoryTests, TierDriver], Awaitable[None]]:
    return lambda kit, driver: getattr(kit, name)(driver)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (LyingDriver, kit_test("test_ranges")),
        (LyingDriver, kit_test("test_create")),
        (LyingDriver, kit_test("test_update")),
        (LyingDriver, kit_test("test_reserve_and_publish")),
        (BoastfulDriver, kit_test("test_ranges")),
        (BoastfulDriver, kit_test("test_create")),
        (BoastfulDriver, kit_test("test_update")),
        (BoastfulDriver, kit_test("test_reserve_and_publish")),
        (RacyDriver, kit_test("test_one_of_many_creators_wins")),
        (RacyDriver, kit_test("test_no_increment_is_lost")),
        (KeepingDriver, kit_test("test_no_buffer_is_kept")),
        (TearingDriver, kit_test("test_readers_see_whole_objects_while_one_writes")),
        (TearingDriver, kit_test("test_a_kill_at_any_point_of_a_put_leaves_the_old_or_the_new")),
        (TearingDriver, kit_test("test_a_cancelled_put_leaves_the_old_or_the_new")),
        (UnsortedDriver, kit_test("test_list_is_in_byte_order_and_filtered_by_prefix")),
        (TrustingDriver, kit_test("test_unsafe_keys_are_refused")),
        (BoastingDriver, kit_test("test_of_two_writers_one_is_last")),
        (NarrowDriver, kit_test("test_keys_of_the_longest_length_are_taken_and_longer_ones_refused")),
        (HalfRangeDriver, kit_test("test_ranges_of_a_large_object")),
        (PartwiseDriver, kit_test("test_ranges_across_the_boundaries_of_parts")),
        (JoiningDriver, kit_test("test_a_payload_is_not_joined")),
        (SweepingDriver, kit_test("test_what_a_living_writer_has_begun_is_no_leftover")),
        (SweepingDriver, kit_test("test_whoever_asks_for_leftovers_changes_nothing")),
        (EmptyingDriver, kit_test("test_readers_see_whole_objects_or_none_while_they_are_deleted")),
    ],
)
async def test_a_broken_promise_is_found(
    broken: type[MemoryDriver], test: Callable[[MemoryTests, TierDriver], Awaitable[None]]
) -> None:
    kit = MemoryTests()
    kit.store_name = "broken"

    async def second_client(driver: TierDriver) -> TierDriver:
        return broken(kit.store_name)

    kit.second_client = second_client  # type: ignore[method-assign]
    try:
        async with broken(kit.store_name) as driver:
            with pytest.raises(
                (AssertionError, Unsupported, BufferError, IndexError, ValueError, pytest.fail.Exception)
            ):
                await test(kit, driver)
    finally:
        MemoryDriver.forget(kit.store_name)


@pytest.mark.parametrize(("kind", "is_found"), [(VagueDriver, True), (HastyDriver, True), (MemoryDriver, False)])
async def test_a_driver_that_does_not_know_when_it_is_full_is_found(kind: type[MemoryDriver], is_found: bool) -> None:
    class Kit(MemoryTests):
        async def make_small_driver(self) -> TierDriver:
            return kind(size=self.small_nbytes)

    found: tuple[type[BaseException], ...] = (AssertionError, TierError, pytest.fail.Exception)
    with pytest.raises(found) if is_found else contextlib.nullcontext():
        await Kit().test_a_full_tier_says_so_and_keeps_what_it_has()


async def test_facts_that_are_no_texts_are_found() -> None:
    class Kit(MemoryTests):
        async def make_driver(self) -> TierDriver:
            return TalkativeDriver()

    with pytest.raises(AssertionError):
        await Kit().test_facts_are_short_texts()


class SleepingDriver(MemoryDriver):
    """Tries again after a while."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        time.sleep(0.001)  # noqa: ASYNC251
        return await super().put(key, payload, mode=mode)


class ConnectingDriver(MemoryDriver):
    """Has a client library that is not asynchronous."""

    async def stat(self, key: str) -> ObjectInfo:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return await super().stat(key)


class ConnectingOnceDriver(MemoryDriver):
    async def open(self) -> None:
        await super().open()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            pass


class ImportingDriver(MemoryDriver):
    """Imports what it needs late, as all should, and waits as all should."""

    async def open(self) -> None:
        await super().open()
        await asyncio.to_thread(time.sleep, 0.001)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        sys.modules.pop("this", None)
        with contextlib.redirect_stdout(io.StringIO()):
            import this  # noqa: F401
        return await super().put(key, payload, mode=mode)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (SleepingDriver, r"time.sleep\(0.001\)\n.* in put\n.*time.sleep"),
        (ConnectingDriver, r"socket.connect\(.*\n.* in stat\n"),
        (ConnectingOnceDriver, r"socket.connect\(.*\n.* in open\n"),
        (ImportingDriver, None),
    ],
)
async def test_a_driver_that_waits_on_the_event_loop_is_found(kind: type[MemoryDriver], told: str | None) -> None:
    class Kit(MemoryTests):
        async def make_driver(self) -> TierDriver:
            return kind()

    with contextlib.nullcontext() if told is None else pytest.raises(AssertionError, match=told):
        await Kit().test_no_call_waits_on_the_event_loop()
    before = time.sleep
    time.sleep(0.001)  # noqa: ASYNC251  (nobody is told)
    assert before is time.sleep


@pytest.mark.parametrize(("survives", "is_found"), [(Survives.NODE, True), (Survives.PROCESS, False)])
async def test_files_are_waited_for_by_what_outlives_the_node(
    tmp_path: Path, survives: Survives, is_found: bool
) -> None:
    class Driver(NaiveDriver):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(survives=survives, conditional_put=True)

    class Kit(NaiveKit):
        async def make_driver(self) -> TierDriver:
            return Driver(tmp_path / "tier")

    with pytest.raises(AssertionError, match=r"open\(.*\n.* in put\n") if is_found else contextlib.nullcontext():
        await Kit().test_no_call_waits_on_the_event_loop()


class NaiveKit(TierDriverTests):
    """For a driver that writes in place and holds no lock."""

    kills = 8  # one of them may come between two puts
    race_s = 0.2
    root: Path
    other_process: bool

    async def make_driver(self) -> TierDriver:
        return NaiveDriver(self.root) if self.other_process else HomelyDriver(self.root)

    async def second_client(self, driver: TierDriver) -> TierDriver:
        return await self.make_driver()

    def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver] | None:
        return functools.partial(NaiveDriver, self.root) if self.other_process else None

    async def raw_get(self, driver: TierDriver, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    async def raw_put(self, driver: TierDriver, key: str, content: bytes) -> None:
        (self.root / key).write_bytes(content)

    def crash_before_publish(self, driver: TierDriver) -> None:
        return None


class HomelyDriver(NaiveDriver):
    """Says that no other process can open its tier, so that it is raced by another thread."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(survives=Survives.NOTHING, conditional_put=True)


RACES = (
    "test_of_creators_against_another_client_one_wins",
    "test_no_increment_of_another_client_is_lost",
    "test_readers_see_whole_objects_while_another_client_writes",
)
KILL = "test_kill_9_in_a_large_put_leaves_the_old_or_the_new"


@pytest.mark.parametrize(
    ("other_process", "name"),
    [*((True, name) for name in (*RACES, KILL)), *((False, name) for name in RACES)],
)
async def test_a_driver_without_atomicity_is_found_by_another_client(
    tmp_path: Path, other_process: bool, name: str
) -> None:
    """On a busy machine clients seldom run at the same moment: so they race until it is found, ten times at most."""
    for attempt in range(10):
        kit = NaiveKit()
        kit.root, kit.other_process = tmp_path / f"tier {attempt}", other_process
        async with await kit.make_driver() as driver:
            try:
                await getattr(kit, name)(driver)
            except (AssertionError, ValueError, FileNotFoundError):  # a file may go while the driver looks at it
                return
    pytest.fail("it was not found")


def test_a_client_that_moved_may_be_moved_again() -> None:
    processors = os.sched_getaffinity(0)
    for processor in (0, -1):
        move_to(processor)
        assert os.sched_getaffinity(0) == processors


async def test_clients_that_take_turns_do_not_find_it(tmp_path: Path) -> None:
    """Why the kit has clients in other processes."""
    kit = NaiveKit()
    kit.root, kit.other_process = tmp_path / "tier", True
    async with await kit.make_driver() as driver:
        await kit.test_one_of_many_creators_wins(driver)
        await kit.test_no_increment_is_lost(driver)
        await kit.test_readers_see_whole_objects_while_one_writes(driver)
        await kit.test_list_shows_what_stays_while_others_come_and_go(driver)


@pytest.mark.parametrize("name", [*RACES, KILL])
async def test_a_tier_that_outlives_its_process_needs_a_client_factory(tmp_path: Path, name: str) -> None:
    class Kit(NaiveKit):
        def client_factory(self, driver: TierDriver) -> None:
            return None

    kit = Kit()
    kit.root, kit.other_process = tmp_path / "tier", True
    async with await kit.make_driver() as driver:
        with pytest.raises(AssertionError, match=r"functools.partial\(make_driver, url\)"):
            await getattr(kit, name)(driver)


class UnreachableDriver(NaiveDriver):
    async def open(self) -> None:
        raise Unsupported("not from here", tier=self.url)


async def test_what_goes_wrong_in_another_client_is_told_here(tmp_path: Path) -> None:
    class Kit(NaiveKit):
        def client_factory(self, driver: TierDriver) -> Callable[[], TierDriver]:
            return functools.partial(UnreachableDriver, self.root)

    kit = Kit()
    kit.root, kit.other_process = tmp_path / "tier", True
    async with await kit.make_driver() as driver:
        with pytest.raises(AssertionError, match=r"in another process failed:(?s:.*)not from here"):
            await kit.test_no_increment_of_another_client_is_lost(driver)


def make_another(root: Path, *, times: int) -> TierDriver:
    return NaiveDriver(root / str(times))


@pytest.mark.parametrize(
    "make",
    [NaiveDriver, functools.partial(NaiveDriver, Path("/a")), functools.partial(make_another, Path("a"), times=2)],
)
def test_a_client_factory_goes_there_by_name(make: Callable[..., TierDriver]) -> None:
    line = written(named(make))
    there = found(json.loads(line, object_hook=path_of))
    here = functools.partial(make)
    assert (there.func, there.args, there.keywords) == (here.func, here.args, here.keywords)


@pytest.mark.parametrize(
    "make",
    [lambda: NaiveDriver(Path("/a")), functools.partial(NaiveDriver, object())],  # type: ignore[arg-type]
    ids=["lambda", "object"],
)
def test_what_cannot_go_there_by_name_is_refused(make: Callable[..., TierDriver]) -> None:
    with pytest.raises(TypeError, match=r"function or a class of a module|texts, numbers, paths or None"):
        InAnotherProcess(make, create_all)
