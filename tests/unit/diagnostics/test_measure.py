"""Measuring a tier: what is timed, what it may cost, and that nothing is left."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator

import pytest

from tests.unit.testing.test_checks import here
from tiercheck.diagnostics.measure import Point, curves, measure, measure_in_room, percentile, usage_in_time
from tiercheck.errors import ConfigurationError, Transient
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.testing.scratch import emptied, opened
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import Usage


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    yield name
    MemoryDriver.forget(name)


def ticking(step_s: float = 0.001) -> Callable[[], float]:
    """A clock that goes on by ``step_s`` with each look at it."""
    now = [0.0]

    def clock() -> float:
        now[0] += step_s
        return now[0]

    return clock


async def test_each_size_and_concurrency_has_its_points(name: str) -> None:
    found = await curves(f"memory://{name}", [0, 4096], [2, 1], 3, 1000, clock=ticking())
    assert [(point.operation, point.nbytes, point.concurrency) for point in found] == [
        ("put", 0, 1),
        ("get", 0, 1),
        ("stat", 0, 1),
        ("list", 0, 1),
        ("put", 0, 2),
        ("get", 0, 2),
        ("stat", 0, 2),
        ("list", 0, 2),
        ("put", 4096, 1),
        ("get", 4096, 1),
        ("put", 4096, 2),
        ("get", 4096, 2),
    ]
    assert all(point.calls == 3 * point.concurrency for point in found)
    assert [point.objects for point in found if point.operation == "list"] == [1, 2]


async def test_figures_follow_from_the_clock(name: str) -> None:
    (put, get, stat, listing) = await curves(f"memory://{name}", [1000], [1], 5, 1000, clock=ticking(0.5))
    # A call is one tick; a round has one tick before and one after it, and so takes three.
    assert (put.latency_s_median, put.latency_s_p95) == (0.5, 0.5)
    assert put.bytes_per_s == pytest.approx(1000 / 1.5)
    assert get.bytes_per_s == pytest.approx(1000 / 1.5)
    assert stat.bytes_per_s == listing.bytes_per_s == 0
    assert put.to_object()["operation"] == "put"


async def test_nothing_is_left_and_nothing_is_touched(name: str) -> None:
    async with MemoryDriver(name) as driver:
        info = await driver.put("precious", [b"x"])
        await curves(f"memory://{name}", [10, 1000], [3], 2, 1000, clock=ticking())
        assert [item async for item in driver.list()] == [info]


async def test_no_round_begins_after_the_budget(name: str) -> None:
    assert await curves(f"memory://{name}", [10], [1], 5, 0.0005, clock=ticking()) == []
    some = await curves(f"memory://{name}", [10], [1], 50, 0.05, clock=ticking())
    assert some[0].operation == "put"
    assert 0 < some[0].calls < 50


async def test_bytes_written_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    put = MemoryDriver.put

    async def counting(self: MemoryDriver, key: str, payload: list[bytes], **options: object) -> object:
        written.append(sum(map(len, payload)))
        return await put(self, key, payload, **options)

    monkeypatch.setattr(MemoryDriver, "put", counting)
    found = await curves(f"memory://{name}", [1000, 5000], [2], 9, 1000, bytes_max=30_000, clock=ticking())
    assert 0 < sum(written) <= 30_000
    assert {point.nbytes for point in found if point.operation == "put"} == {1000}, "5000 had no counted round left"


async def test_a_small_tier_is_not_filled(name: str) -> None:
    found = await curves(f"memory://{name}?size=10kB", [1000, 4000], [1, 4], 2, 1000, clock=ticking())
    assert {(point.nbytes, point.concurrency) for point in found if point.operation == "put"} == {(1000, 1)}


async def test_a_tier_that_does_not_say_what_it_has_free_is_not_filled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercheck.diagnostics.measure.ROOM_UNKNOWN_BYTES", 10_000)
    async with opened(MemoryDriver(name)) as driver, emptied(here(driver)) as place:
        found = await measure_in_room(place, [1000, 4000], [1, 4], 2, 1000, None, clock=ticking())
    assert {(point.nbytes, point.concurrency) for point in found if point.operation == "put"} == {(1000, 1)}


async def test_usage_is_given_up_in_time_and_a_driver_s_own_time_out_is_not() -> None:
    class SilentDriver(MemoryDriver):
        async def usage(self) -> Usage:
            await asyncio.Event().wait()
            raise AssertionError("it was set")

    class FailingDriver(MemoryDriver):
        async def usage(self) -> Usage:
            raise TimeoutError("mine")

    async with SilentDriver() as silent, FailingDriver() as failing, MemoryDriver() as quick:
        assert await usage_in_time(silent, 0.01) is None
        assert await usage_in_time(quick) == await quick.usage()
        with pytest.raises(TimeoutError, match="mine"):
            await usage_in_time(failing)


async def test_what_the_tier_raises_ends_the_measurement_and_leaves_nothing(name: str) -> None:
    plan = FaultPlan.fail_call("get", lambda: Transient("injected"), nth=2)
    with pytest.raises(ExceptionGroup) as caught:
        async with opened(FaultyDriver(MemoryDriver(name), plan)) as driver, emptied(here(driver)) as place:
            await measure(place, [10], [2], 3, 1000, clock=ticking())
    assert isinstance(caught.value.exceptions[0], Transient)
    async with MemoryDriver(name) as driver:
        assert [item async for item in driver.list()] == []


@pytest.mark.parametrize(
    ("sizes", "concurrency", "repeats", "budget_s"),
    [([], [1], 1, 1), ([-1], [1], 1, 1), ([1], [0], 1, 1), ([1], [], 1, 1), ([1], [1], 0, 1), ([1], [1], 1, 0)],
)
async def test_what_makes_no_measurement(
    sizes: list[int], concurrency: list[int], repeats: int, budget_s: float
) -> None:
    with pytest.raises(ConfigurationError, match="a measurement needs"):
        await curves("memory://", sizes, concurrency, repeats, budget_s)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.95, 3.0), ([1.0, 2.0], 0.5, 1.0), (list(range(1, 101)), 0.95, 95), (list(range(1, 21)), 0.95, 19)],
)
def test_percentiles(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_points_are_values() -> None:
    point = Point("put", 1, 1, 1, 0.1, 0.1, 10.0)
    with pytest.raises(AttributeError):
        point.nbytes = 2  # type: ignore[misc]
