"""Who visits a driver from another thread: closing it waits for them, and lets nobody in any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.shared_memory import root_of
from tiercheck.errors import Closed, Transient
from tiercheck.tiers import in_flight_calls
from tiercheck.tiers.in_flight_calls import InFlightCalls
from tiercheck.tiers.shm.driver import ShmDriver, remove_namespace
from tiercheck.tiers.shm.mapping import MappedSegment

DEADLINE_S = 30.0


def test_nobody_is_admitted_before_it_is_open_and_after_it_is_closed() -> None:
    found = InFlightCalls()
    with pytest.raises(Closed), found:
        raise AssertionError
    found.admit()
    with found, found:
        pass
    found.refuse()
    with pytest.raises(Closed), found:
        raise AssertionError


def test_closing_waits_for_who_is_here() -> None:
    found = InFlightCalls()
    found.admit()
    inside, leave, gone = threading.Event(), threading.Event(), threading.Event()

    def visit() -> None:
        with found:
            inside.set()
            assert leave.wait(DEADLINE_S)
            gone.set()

    visitor = threading.Thread(target=visit)
    visitor.start()
    assert inside.wait(DEADLINE_S)
    refusing = threading.Thread(target=found.refuse)
    refusing.start()
    refused = False
    while not refused:
        try:
            with found:
                pass
        except Closed:
            refused = True
    assert refusing.is_alive(), "somebody is still there"
    leave.set()
    refusing.join(DEADLINE_S)
    assert gone.is_set()
    visitor.join(DEADLINE_S)


def test_who_does_not_leave_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_calls, "STAY_S_MAX", 0.0)
    found = InFlightCalls()
    found.admit()
    with found, pytest.raises(Transient, match="1 calls of other threads"):
        found.refuse()


async def test_what_an_interrupted_thread_has_left_goes_when_the_tier_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    name = "test-visits"
    try:
        async with ShmDriver(name, size=64 << 20) as driver:
            reservation = driver.reserve_nowait("a", 1 << 20)
            for method in (lambda: driver.reserve_nowait("b", 1 << 20), reservation.publish_nowait):
                with monkeypatch.context() as patch:
                    patch.setattr(ShmDriver, "_reservation", interrupted)
                    patch.setattr(MappedSegment, "publish", interrupted)
                    patch.setattr(MappedSegment, "give_back", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        method()
            assert (await driver.usage()).used_bytes == 2 << 20
        assert list((root_of(name) / ".tiercheck" / "tmp").iterdir()) == []
        async with ShmDriver(name, size=64 << 20) as driver:
            assert (await driver.usage()).used_bytes == 0
    finally:
        remove_namespace(name)


def write(driver: ShmDriver, published: threading.Event, ends: list[type[BaseException]]) -> None:
    """Until something is raised."""
    try:
        while True:
            reservation = driver.reserve_nowait("a", 1 << 20)
            reservation.buffer[:4] = b"full"
            reservation.publish_nowait(4)
            published.set()
    except BaseException as error:
        ends.append(type(error))


async def test_a_tier_that_is_closed_under_a_thread_that_reserves_and_publishes_keeps_nothing() -> None:
    name = "test-visits"
    try:
        for _ in range(10):
            driver = ShmDriver(name, size=64 << 20)
            await driver.open()
            ends: list[type[BaseException]] = []
            published = threading.Event()
            writers = [threading.Thread(target=write, args=(driver, published, ends)) for _ in range(2)]
            for writer in writers:
                writer.start()
            assert await asyncio.to_thread(published.wait, DEADLINE_S)
            await driver.close()
            for writer in writers:
                await asyncio.to_thread(writer.join, DEADLINE_S)
            assert ends == [Closed, Closed]
            assert list((root_of(name) / ".tiercheck" / "tmp").iterdir()) == []
            async with ShmDriver(name) as again:
                assert (await again.usage()).used_bytes == 4
                assert bytes(await again.get("a")) == b"full"
    finally:
        remove_namespace(name)
