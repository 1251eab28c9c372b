"""What each wrapper adds: pacing, counting, another try, a part of a tier."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tiercheck.errors import (
    AlreadyExists,
    CapacityExceeded,
    ConfigurationError,
    NotFound,
    PreconditionFailed,
    Transient,
)
from tiercheck.testing.faults import FaultPlan, FaultyDriver, Moment
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.wrappers import (
    MeteredDriver,
    Operation,
    PrefixedDriver,
    RetryingDriver,
    RetryPolicy,
    Throttle,
    ThrottledDriver,
    WrappingDriver,
)
from tiercheck.types import ByteRange, ObjectInfo, PutMode

MIB = 1 << 20


class VirtualTime:
    """A clock that only sleepers move, to the earliest of their times, once nobody else has anything to do."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        until_s, woken = self.now_s + seconds, asyncio.Event()
        self._sleepers.append((until_s, woken))
        try:
            while not woken.is_set():
                for _ in range(30):  # let everybody else go as far as they can
                    await asyncio.sleep(0)
                if not woken.is_set():
                    first = min(self._sleepers, key=lambda sleeper: sleeper[0])
                    self.now_s = max(self.now_s, first[0])
                    first[1].set()
        finally:
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[1] is not woken]


@pytest.fixture
def virtual() -> VirtualTime:
    return VirtualTime()


def test_a_wrapper_passes_on_every_method_of_the_protocol() -> None:
    """So that a method that is added to the protocol is not forgotten here."""
    inherited = {"__aenter__", "__aexit__", "__init__"}
    of_protocol = {name for name, value in vars(TierDriver).items() if inspect.isfunction(value)} - inherited
    of_protocol |= {name for name, value in vars(TierDriver).items() if isinstance(value, property)}
    assert of_protocol <= set(vars(WrappingDriver)), of_protocol - set(vars(WrappingDriver))


async def test_facts_and_preparation_reach_the_wrapped_driver() -> None:
    class Talking(MemoryDriver):
        prepared: Any = None

        def facts(self) -> dict[str, str]:
            return {"io": "a dictionary"}

        async def prepare_reservations(self, sizes: Any) -> None:
            self.prepared = sizes

    inner = Talking()
    wrapped = MeteredDriver(RetryingDriver(ThrottledDriver(PrefixedDriver(inner, "p"))))
    async with wrapped:
        assert wrapped.facts() == {"io": "a dictionary"}
        await wrapped.prepare_reservations([(4096, 2)])
        assert inner.prepared == [(4096, 2)]


# Throttled.


def throttled(virtual: VirtualTime, **rates: Any) -> ThrottledDriver:
    return ThrottledDriver(MemoryDriver(), Throttle(**rates), clock=virtual.clock, sleep=virtual.sleep)


async def test_bytes_take_their_time_in_each_direction(virtual: VirtualTime) -> None:
    async with throttled(virtual, bytes_per_s=10 * MIB, burst_s=0) as driver:
        await driver.put("a", [bytes(20 * MIB), bytes(10 * MIB)])
        assert virtual.now_s == pytest.approx(3.0)
        await driver.get("a", range=ByteRange(0, 5 * MIB))
        assert virtual.now_s == pytest.approx(3.5)
        await driver.get("a", into=memoryview(bytearray(40 * MIB)))
        assert virtual.now_s == pytest.approx(6.5)
        reservation = await driver.reserve("b", 8 * MIB)
        assert virtual.now_s == pytest.approx(6.5), "memory is free"
        await reservation.publish(5 * MIB)
        assert virtual.now_s == pytest.approx(7.0)


async def test_the_directions_do_not_share_a_budget(virtual: VirtualTime) -> None:
    async with throttled(virtual, bytes_per_s=10 * MIB, burst_s=0) as driver:
        await driver.put("a", [bytes(10 * MIB)])
        await asyncio.gather(driver.put("b", [bytes(10 * MIB)]), driver.get("a"))
        assert virtual.now_s == pytest.approx(2.0)


async def test_what_was_saved_up_is_spent_first(virtual: VirtualTime) -> None:
    async with throttled(virtual, bytes_per_s=10 * MIB, burst_s=0.5) as driver:
        await driver.put("a", [bytes(5 * MIB)])
        assert virtual.now_s == 0
        await driver.put("a", [bytes(5 * MIB)])
        assert virtual.now_s == pytest.approx(0.5)
        virtual.now_s += 100
        before_s = virtual.now_s
        await driver.put("a", [bytes(15 * MIB)])
        assert virtual.now_s - before_s == pytest.approx(1.0), "no more is saved up than the burst"


async def test_requests_take_their_time(virtual: VirtualTime) -> None:
    async with throttled(virtual, requests_per_s=4, burst_s=0) as driver:
        for n in range(4):
            await driver.put(f"{n}", [b""])
        await driver.stat("0")
        await driver.delete(["0", "1", "2"])
        assert [info.key async for info in driver.list()] == ["3"]
        await driver.usage()
        assert virtual.now_s == pytest.approx(2.0)


async def test_a_listing_costs_a_request_for_a_thousand_objects(virtual: VirtualTime) -> None:
    driver = throttled(virtual, requests_per_s=1, burst_s=0)
    async with driver:
        for n in range(2001):
            await driver.inner.put(f"{n:04d}", [b""])
        assert len([info async for info in driver.list()]) == 2001
    assert virtual.now_s == pytest.approx(3.0)


async def test_a_small_put_is_not_kept_waiting_by_a_whole_large_one(virtual: VirtualTime) -> None:
    async with throttled(virtual, bytes_per_s=8 * MIB, burst_s=0) as driver:
        large = asyncio.create_task(driver.put("large", [bytes(80 * MIB)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await driver.put("small", [b"x"])
        assert virtual.now_s == pytest.approx(1.0), "after the slice that was under way"
        await large
        assert virtual.now_s == pytest.approx(10.0)


async def test_who_is_cancelled_takes_nothing(virtual: VirtualTime) -> None:
    async with throttled(virtual, bytes_per_s=8 * MIB, burst_s=0) as driver:
        first = asyncio.create_task(driver.put("first", [bytes(8 * MIB)]))
        for _ in range(5):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        await driver.put("second", [bytes(8 * MIB)])
        assert virtual.now_s == pytest.approx(1.0)
        assert [info.key async for info in driver.list()] == ["second"]


@pytest.mark.parametrize("rates", [{"bytes_per_s": 0}, {"requests_per_s": -1}, {"bytes_per_s": float("inf")}])
def test_a_rate_that_is_none_is_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be a positive"):
        Throttle(**rates)
    with pytest.raises(ValueError, match="must be a positive"):
        ThrottledDriver(MemoryDriver(), **rates)


# Metered.


async def test_calls_bytes_errors_and_times_are_counted(virtual: VirtualTime) -> None:
    slow = throttled(virtual, bytes_per_s=10 * MIB, burst_s=0)
    async with MeteredDriver(slow, clock=virtual.clock) as driver:
        for n in range(3):
            await driver.put(f"k/{n}", [bytes(10 * MIB)])
        await driver.get("k/0", range=ByteRange(0, MIB))
        for _ in range(2):
            with pytest.raises(NotFound):
                await driver.get("absent")
        assert len([info async for info in driver.list("k/")]) == 3
        reservation = await driver.reserve("r", MIB)
        await reservation.publish()
        found = driver.snapshot()
    assert found.tier == driver.url
    put, get = found.operations[Operation.PUT], found.operations[Operation.GET]
    assert (put.calls, put.sent_bytes, put.in_flight, dict(put.errors)) == (3, 30 * MIB, 0, {})
    assert put.latency.sum_s == pytest.approx(3.0)
    assert put.latency.max_s == pytest.approx(1.0)
    assert put.latency.count == 3
    assert (get.calls, get.received_bytes, dict(get.errors)) == (3, MIB, {"NotFound": 2})
    assert found.operations[Operation.LIST].objects_listed == 3
    assert found.operations[Operation.PUBLISH].sent_bytes == MIB
    assert (found.sent_bytes, found.received_bytes, dict(found.errors)) == (31 * MIB, MIB, {"NotFound": 2})
    assert found.operations[Operation.DELETE].calls == 0
    # What was handed out is not touched by what comes later.
    await driver.close()
    assert found.operations[Operation.CLOSE].calls == 0
    assert driver.snapshot().operations[Operation.CLOSE].calls == 2


async def test_calls_under_way_and_cancelled_ones_are_seen(virtual: VirtualTime) -> None:
    driver = MeteredDriver(throttled(virtual, bytes_per_s=1, burst_s=0), clock=virtual.clock)
    async with driver:
        putting = asyncio.create_task(driver.put("a", [b"xx"]))
        await asyncio.sleep(0)
        assert driver.snapshot().operations[Operation.PUT].in_flight == 1
        putting.cancel()
        await asyncio.wait({putting})
        put = driver.snapshot().operations[Operation.PUT]
        assert (put.in_flight, put.calls, put.sent_bytes, dict(put.errors)) == (0, 1, 0, {"Cancelled": 1})


async def test_a_histogram_counts_each_call_once() -> None:
    times = iter([0.0, 0.00005, 1.0, 1.0004, 2.0, 2.3, 3.0, 103.0])
    driver = MeteredDriver(MemoryDriver(), clock=lambda: next(times))
    await driver.inner.open()
    for _ in range(4):
        await driver.usage()
    latency = driver.snapshot().operations[Operation.USAGE].latency
    assert latency.count == 4
    assert latency.counts[0] == latency.counts[1] == latency.counts[-1] == 1
    assert latency.cumulative[-1] == (float("inf"), 4)
    assert latency.max_s == pytest.approx(100.0)


# Retrying.


def fails(call: str, *, times: int = 1, moment: Moment = Moment.BEFORE, nth: int = 0) -> FaultPlan:
    return FaultPlan.fail_call(call, lambda: Transient("try again"), times=times, moment=moment, nth=nth)


def retrying(virtual: VirtualTime, plan: FaultPlan, inner: TierDriver | None = None, **policy: Any) -> RetryingDriver:
    return RetryingDriver(
        FaultyDriver(inner or MemoryDriver(), plan),
        RetryPolicy(**policy),
        uniform=lambda: 0.5,
        clock=virtual.clock,
        sleep=virtual.sleep,
    )


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("put", lambda driver: driver.put("a", [b"new"])),
        ("get", lambda driver: driver.get("a")),
        ("stat", lambda driver: driver.stat("a")),
        ("delete", lambda driver: driver.delete(["b"])),
        ("usage", lambda driver: driver.usage()),
        ("reserve", lambda driver: driver.reserve("c", 1)),
    ],
)
async def test_what_may_pass_is_tried_again(
    virtual: VirtualTime, name: str, call: Callable[[TierDriver], Any], moment: Moment
) -> None:
    driver = retrying(virtual, fails(name, times=3, moment=moment, nth=name == "put"))
    async with driver:
        await driver.put("a", [b"old"])
        await call(driver)
        assert virtual.now_s == pytest.approx(0.5 * (0.1 + 0.2 + 0.4)), "half of 0.1 s, 0.2 s, 0.4 s"


async def test_opening_is_tried_again(virtual: VirtualTime) -> None:
    async with retrying(virtual, fails("open", times=2)) as driver:
        await driver.put("a", [b""])


async def test_the_tries_end(virtual: VirtualTime) -> None:
    async with retrying(virtual, fails("stat", times=99), attempts=4) as driver:
        with pytest.raises(Transient) as caught:
            await driver.stat("a")
        assert caught.value.__notes__[0].startswith("stat was tried 4 times in 0.")
    async with retrying(virtual, fails("stat", times=99), attempts=99, wait_s=4, deadline_s=5) as driver:
        start_s = virtual.now_s
        with pytest.raises(Transient):
            await driver.stat("a")
        assert virtual.now_s - start_s <= 5


async def test_no_wait_is_longer_than_the_longest(virtual: VirtualTime) -> None:
    async with retrying(virtual, fails("stat", times=20), attempts=30, wait_s_max=1, deadline_s=100) as driver:
        with pytest.raises(NotFound):
            await driver.stat("a")
        assert virtual.now_s <= 20 * 0.5


@pytest.mark.parametrize("error", [CapacityExceeded, NotFound, OSError])
async def test_what_will_not_pass_is_not_tried_again(virtual: VirtualTime, error: type[Exception]) -> None:
    plan = FaultPlan.fail_call("put", lambda: error("no"))
    async with retrying(virtual, plan) as driver:
        with pytest.raises(error):
            await driver.put("a", [b"x"])
    assert virtual.now_s == 0


async def test_a_listing_goes_on_where_it_broke(virtual: VirtualTime) -> None:
    plan = fails("list", nth=4, times=2)
    async with retrying(virtual, plan) as driver:
        for n in range(8):
            await driver.put(f"k/{n}", [b"x"])
        assert [info.key async for info in driver.list("k/")] == [f"k/{n}" for n in range(8)]
    assert virtual.now_s > 0


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
async def test_a_create_whose_answer_was_lost_is_looked_up(virtual: VirtualTime, moment: Moment) -> None:
    async with retrying(virtual, fails("put", moment=moment)) as driver:
        info = await driver.put("a", [b"mi", b"ne"], mode=PutMode.CREATE)
        assert await driver.stat("a") == info
        assert await driver.get("a") == b"mine"


async def test_a_create_that_another_may_have_won_says_that_it_does_not_know(virtual: VirtualTime) -> None:
    name = f"race-{id(virtual)}"
    other = MemoryDriver(name)
    try:
        for content in (b"theirs", b"m!ne"):  # of another length, and of the same
            async with retrying(virtual, fails("put"), MemoryDriver(name)) as driver, other:
                await other.put("a", [content])
                with pytest.raises(Transient):
                    await driver.put("a", [b"mine"], mode=PutMode.CREATE)
                assert await driver.get("a") == content
                with pytest.raises(AlreadyExists):  # no answer was lost this time
                    await driver.put("a", [b"mine"], mode=PutMode.CREATE)
    finally:
        MemoryDriver.forget(name)


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
async def test_an_update_whose_answer_was_lost_happens_once(virtual: VirtualTime, moment: Moment) -> None:
    async with retrying(virtual, fails("put", moment=moment, nth=1)) as driver:
        first = await driver.put("a", [b"1"])
        second = await driver.put("a", [b"2"], mode=PutMode.UPDATE(first.etag))
        assert await driver.stat("a") == second
        assert int(second.etag) == int(first.etag) + 1, "the store gave out one more etag, not two"


async def test_an_update_that_another_may_have_won_says_that_it_does_not_know(virtual: VirtualTime) -> None:
    name = f"race-{id(virtual)}"
    try:
        async with retrying(virtual, fails("put", nth=1), MemoryDriver(name)) as driver, MemoryDriver(name) as other:
            first = await driver.put("a", [b"1"])
            await other.put("a", [b"3"])
            with pytest.raises(Transient):
                await driver.put("a", [b"2"], mode=PutMode.UPDATE(first.etag))
            assert await other.get("a") == b"3"
            with pytest.raises(PreconditionFailed):  # no answer was lost this time
                await driver.put("a", [b"2"], mode=PutMode.UPDATE(first.etag))
            await other.delete(["a"])
            driver.inner.plan = fails("put")
            with pytest.raises(Transient):
                await driver.put("a", [b"2"], mode=PutMode.UPDATE(first.etag))
    finally:
        MemoryDriver.forget(name)


async def test_no_increment_is_lost_when_answers_are(virtual: VirtualTime) -> None:
    """Compare-and-swap by several, while every third answer is lost."""
    name = f"counter-{id(virtual)}"
    plans = [FaultPlan() for _ in range(3)]
    for plan in plans:
        plan.faults = fails("put", times=10**9, moment=Moment.AFTER).faults
        inner_where = plan.faults[0].where
        object.__setattr__(plan.faults[0], "where", lambda at, where=inner_where: where(at) and at.nth % 3 == 2)
    clients = [retrying(virtual, plan, MemoryDriver(name), attempts=20, deadline_s=1e6) for plan in plans]

    async def worker(n: int) -> None:
        for turn in range(8):
            while True:
                info = await clients[n].stat("counter")
                value = bytes(await clients[n].get("counter")).split(b" ")[0]
                content = b"%d by %d in turn %d" % (int(value) + 1, n, turn)
                try:
                    await clients[n].put("counter", [content], mode=PutMode.UPDATE(info.etag))
                except (PreconditionFailed, Transient):
                    continue
                break

    try:
        async with clients[0], clients[1], clients[2]:
            await clients[0].inner.inner.put("counter", [b"0 by nobody"])
            await asyncio.gather(*(worker(n) for n in range(3)))
            value = int(bytes(await clients[0].get("counter")).split(b" ")[0])
    finally:
        MemoryDriver.forget(name)
    # An update whose answer is lost, and that another has already built upon, is repeated: it counts, and once more.
    assert value >= 24


async def test_an_error_for_good_does_not_speak_for_a_try_that_may_have_stored_it(virtual: VirtualTime) -> None:
    answers = iter([Transient("no answer"), CapacityExceeded("full")])
    plan = FaultPlan.fail_call("put", lambda: next(answers), times=2)
    async with retrying(virtual, plan) as driver:
        with pytest.raises(Transient, match=r"may have stored it \(no answer\), the last one failed: full"):
            await driver.put("a", [b"mine"])
    async with retrying(virtual, FaultPlan.fail_call("put", lambda: CapacityExceeded("full"))) as driver:
        with pytest.raises(CapacityExceeded):
            await driver.put("a", [b"mine"])


async def test_a_publish_is_repeated_only_while_there_is_memory(virtual: VirtualTime) -> None:
    async with retrying(virtual, fails("publish", times=2)) as driver:
        reservation = await driver.reserve("a", 4)
        reservation.buffer[:] = b"mine"
        await reservation.publish(mode=PutMode.CREATE)
        assert await driver.get("a") == b"mine"
    async with retrying(virtual, fails("publish", moment=Moment.AFTER)) as driver:
        reservation = await driver.reserve("a", 4)
        with pytest.raises(Transient):
            await reservation.publish()


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"wait_s": -1}, {"deadline_s": float("inf")}])
def test_a_policy_without_bounds_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        RetryPolicy(**wrong)


# Prefixed.


async def test_a_part_of_a_tier_is_a_tier() -> None:
    inner = MemoryDriver()
    async with PrefixedDriver(inner, "jobs/7") as driver:
        info = await driver.put("a/b", [b"x"])
        assert info.key == "a/b"
        assert [found.key async for found in inner.list()] == ["jobs/7/a/b"]
        assert driver.capabilities.key_bytes_max == inner.capabilities.key_bytes_max - len("jobs/7/")
        await driver.put("/".join(["k" * 100] * 5), [b""])
        with pytest.raises(ValueError, match="at most 505"):
            await driver.put("/".join(["k" * 101] * 5), [b""])
        with pytest.raises(NotFound) as caught:
            await driver.get("absent")
        assert (caught.value.key, caught.value.tier) == ("absent", driver.url)
        await inner.put("beside", [bytes(1000)])
        assert (await driver.usage()).used_bytes == 1


@pytest.mark.parametrize("prefix", ["", "/a", "a/", "a//b", "..", "a/../b", "k" * 256, "/".join(["k" * 250] * 3)])
def test_a_prefix_is_a_key(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="prefix"):
        PrefixedDriver(MemoryDriver(), prefix)


def test_the_url_of_a_part_keeps_the_options_apart() -> None:
    class Optioned(MemoryDriver):
        url = "s3://bucket/run?endpoint_url=http://x"  # type: ignore[assignment]

    assert PrefixedDriver(Optioned(), "p").url == "s3://bucket/run/p?endpoint_url=http://x"


async def test_the_end_of_a_listing_is_no_error() -> None:
    class Empty(MemoryDriver):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            for info in ():
                yield info

    async with MeteredDriver(RetryingDriver(ThrottledDriver(PrefixedDriver(Empty(), "p")))) as driver:
        assert [info async for info in driver.list()] == []
        assert dict(driver.snapshot().errors) == {}
