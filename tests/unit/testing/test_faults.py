"""The faulty driver: points are counted the same each time, and what the plan says happens, and only there."""

from __future__ import annotations

import asyncio

import pytest

from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Killed, Moment, count_points
from tiercheck.tiers.memory import MemoryDriver


def driver(plan: FaultPlan, name: str = "") -> FaultyDriver:
    return FaultyDriver(MemoryDriver(name), plan)


async def save(plan: FaultPlan) -> None:
    """Two tiers share the plan: their points are counted in one row."""
    async with driver(plan) as first, driver(plan) as second:
        await first.put("a", [b"x"])
        reservation = await first.reserve("b", 4)
        await reservation.publish()
        await second.put("a", [await first.get("a")])
        assert [info.key async for info in first.list()] == ["a", "b"]
        await first.delete(["a"])
        await first.usage()
        await first.stat("b")


async def test_points_are_counted_the_same_each_time() -> None:
    first, second = FaultPlan(), FaultPlan()
    await save(first)
    await save(second)
    assert first.points == second.points
    assert [point.index for point in first.points] == list(range(len(first.points)))
    assert {point.call for point in first.points} == {
        "open", "close", "put", "reserve", "publish", "get", "list", "delete", "usage", "stat",
    }  # fmt: skip
    assert {point.moment for point in first.points} == set(Moment)


async def test_a_kill_at_every_point() -> None:
    for n in range(await count_points(save)):
        plan = FaultPlan.kill_at(n)
        with pytest.raises(Killed):
            await save(plan)
        assert plan.dead
        assert len(plan.points) == n + 1, "nothing happens after death"


async def test_the_dead_stay_dead_and_take_their_plan_along() -> None:
    plan = FaultPlan.fail_call("put", Killed)
    first, second = driver(plan), driver(plan)
    await first.open()
    await second.open()
    reservation = await first.reserve("b", 1)
    with pytest.raises(Killed):
        await first.put("a", [b"x"])
    for one in (first, second):
        for call in (one.stat("a"), one.usage(), one.put("a", []), one.get("a"), one.delete([]), one.reserve("a", 1)):
            with pytest.raises(Killed):
                await call
        with pytest.raises(Killed):
            await anext(aiter(one.list()))
    with pytest.raises(Killed):
        await reservation.publish()
    await first.close()
    await second.close()


async def test_killed_before_and_after_differ_in_what_is_there() -> None:
    for moment, there in ((Moment.BEFORE, False), (Moment.SUSPENDED, False), (Moment.AFTER, True)):
        plan = FaultPlan((Fault(lambda at, m=moment: at.call == "put" and at.moment is m, Killed),))  # type: ignore[misc]
        faulty = driver(plan)
        with pytest.raises(Killed):
            async with faulty:
                await faulty.put("a", [b"x"])
        inner = faulty.inner
        assert isinstance(inner, MemoryDriver)
        assert ("a" in inner.store.objects) is there


async def test_a_cancellation_at_every_point_leaves_the_task_usable() -> None:
    for n in range(await count_points(save)):
        with pytest.raises(asyncio.CancelledError):
            await save(FaultPlan.cancel_at(n))
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)


async def test_a_real_cancellation_is_passed_on() -> None:
    async with driver(FaultPlan()) as faulty:
        putting = asyncio.create_task(faulty.put("a", [b"x"]))
        await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        await faulty.put("a", [b"y"])


async def test_a_call_fails_as_often_as_it_should() -> None:
    async with driver(FaultPlan.fail_call("put", lambda: Transient("injected"), nth=1, times=2)) as faulty:
        await faulty.put("a", [b"0"])
        for _ in range(2):
            with pytest.raises(Transient, match="injected"):
                await faulty.put("a", [b"1"])
        assert bytes(await faulty.get("a")) == b"0"
        await faulty.put("a", [b"2"])


async def test_a_lost_answer() -> None:
    plan = FaultPlan.fail_call("put", lambda: Transient("the answer was lost"), moment=Moment.AFTER)
    async with driver(plan) as faulty:
        with pytest.raises(Transient):
            await faulty.put("a", [b"x"])
        assert bytes(await faulty.get("a")) == b"x"


async def test_a_reservation_whose_answer_is_lost_is_given_back() -> None:
    plan = FaultPlan.fail_call("reserve", lambda: Transient("the answer was lost"), moment=Moment.AFTER)
    async with driver(plan) as faulty:
        with pytest.raises(Transient):
            await faulty.reserve("a", 100)
        assert (await faulty.usage()).used_bytes == 0


async def test_a_full_tier() -> None:
    async with driver(FaultPlan.full(after_puts=2)) as faulty:
        await faulty.put("a", [b"0"])
        await (await faulty.reserve("b", 1)).publish()
        for _ in range(3):
            with pytest.raises(CapacityExceeded):
                await faulty.put("c", [b"1"])
            with pytest.raises(CapacityExceeded):
                await faulty.reserve("c", 1)
        assert bytes(await faulty.get("a")) == b"0"


@pytest.mark.parametrize("offset", [0, 3, 7, -1])
async def test_flipped_bytes(offset: int) -> None:
    content = b"01234567"
    expected = bytearray(content)
    expected[offset] ^= 1
    async with driver(FaultPlan.flip("put", offset=offset)) as faulty:
        await faulty.put("a", [content[:3], content[3:]])
        assert await faulty.get("a") == expected
    async with driver(FaultPlan.flip("get", nth=1, offset=offset)) as faulty:
        await faulty.put("a", [content])
        assert await faulty.get("a") == content
        assert await faulty.get("a", into=memoryview(bytearray(8))) == expected
        assert await faulty.get("a") == content
    with pytest.raises(ValueError, match="stat"):
        FaultPlan.flip("stat")
