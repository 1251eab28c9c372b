"""Room in the first tier: whoever waits for it waits for one deletion there, and not for the tiers to be done."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from tests.moving import base, capture, held, mover_of, record
from tiercheck.errors import SaveError
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.replication.room import Room, RoomMakingEnded
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ObjectInfo, Payload, PutMode

BOUND_S = 20.0


class Slow(FaultyDriver):
    """A store in which the copy of one base takes until it is let go."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner, FaultPlan())
        self.begun, self.go_on, self.puts = asyncio.Event(), asyncio.Event(), 0

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if key == str(base(20)):
            self.puts += 1
            self.begun.set()
            await self.go_on.wait()
        return await super().put(key, payload, mode=mode)


def one_slow_store(tmp_path: Path) -> Hierarchy:
    slow = Tier(f"nvme://{tmp_path}/slow", wrap=Slow)
    return Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", slow, f"nvme://{tmp_path}/durable?survives=rack")


def slow_store(hierarchy: OpenHierarchy) -> Slow:
    store = hierarchy.tiers[1].driver
    assert isinstance(store, Slow)
    return store


async def test_room_is_there_while_a_copy_goes_on(tmp_path: Path) -> None:
    async with one_slow_store(tmp_path).open() as hierarchy, asyncio.timeout(BOUND_S):
        store, mover = slow_store(hierarchy), mover_of(hierarchy)
        await capture(hierarchy, base(10))
        await mover.cycle()
        await capture(hierarchy, base(20))
        life = asyncio.create_task(mover.run())
        assert await mover.make_room(), "once the other store has the newer base, the older one may go"
        assert await held(hierarchy, 0) == [str(base(20))]
        assert str(base(20)) not in await held(hierarchy, 1)
        again = asyncio.create_task(mover.make_room())
        await store.begun.wait()
        again.cancel()
        again = asyncio.create_task(mover.make_room())
        store.go_on.set()
        assert not await again, "nothing more may go"
        assert store.puts == 1, "nobody who waited has broken the copy off"
        assert str(base(20)) in await held(hierarchy, 1)
        life.cancel()
        await asyncio.wait([life])


async def test_whoever_waits_for_room_learns_that_the_mover_ends(tmp_path: Path) -> None:
    async with one_slow_store(tmp_path).open() as hierarchy, asyncio.timeout(BOUND_S):
        store, mover = slow_store(hierarchy), mover_of(hierarchy)
        await capture(hierarchy, base(20), record(21))
        life = asyncio.create_task(mover.run())
        await store.begun.wait()
        waiting = asyncio.create_task(mover.make_room())
        await asyncio.wait([waiting], timeout=0.2)
        life.cancel()
        with pytest.raises(SaveError, match="the mover ended while it made room"):
            await waiting


async def nothing() -> None:
    pass


class Cycles:
    """Cycles that end when they are told to."""

    def __init__(self) -> None:
        self.ends: list[asyncio.Future[bool]] = []

    def start(self) -> asyncio.Task[bool]:
        ends: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ends.append(ends)

        async def cycle() -> bool:
            return await ends

        return asyncio.create_task(cycle())


async def waits(making: asyncio.Task[bool]) -> bool:
    for _ in range(20):
        await asyncio.sleep(0)
    return not making.done()


async def test_what_is_deleted_at_once_needs_no_cycle() -> None:
    room, cycles = Room(), Cycles()

    async def delete() -> None:
        room.freed()

    assert await room.make(delete, cycles.start)
    assert cycles.ends == []


async def test_one_cycle_serves_all_who_wait_and_none_takes_the_end_of_an_older_one_for_its_own() -> None:
    room, cycles = Room(), Cycles()
    one = asyncio.create_task(room.make(nothing, cycles.start))
    assert await waits(one)
    other = asyncio.create_task(room.make(nothing, cycles.start))
    assert await waits(other)
    assert len(cycles.ends) == 1
    cycles.ends[0].set_result(True)
    assert not await one
    assert await waits(other)
    assert len(cycles.ends) == 2
    room.freed()
    assert await other
    cycles.ends[1].set_result(True)


async def test_what_was_deleted_before_is_no_room() -> None:
    room, cycles = Room(), Cycles()
    room.freed()
    making = asyncio.create_task(room.make(nothing, cycles.start))
    assert await waits(making)
    cycles.ends[0].set_result(False)
    assert not await making


async def test_errors_of_a_cycle_are_its_waiters() -> None:
    room, cycles = Room(), Cycles()
    making = asyncio.create_task(room.make(nothing, cycles.start))
    assert await waits(making)
    cycles.ends[0].set_exception(ValueError("a fault"))
    with pytest.raises(ValueError, match="a fault"):
        await making
    making = asyncio.create_task(room.make(nothing, cycles.start))
    assert await waits(making)
    cycles.ends[1].cancel()
    with pytest.raises(RoomMakingEnded):
        await making
