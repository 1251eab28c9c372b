"""Trouble belongs to an action; a tier has it only when several actions fail for no reason of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tiercheck.errors import CapacityExceeded, Corruption, JobConflict, NotFound, TierError, Transient, Unauthorized
from tiercheck.hierarchy import OpenTier
from tiercheck.replication.backoff import RETRY, TROUBLES_MAX, Action, SourceError, TierBackoff
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.memory import MemoryDriver


class Clock:
    """The event loop's time, ahead of itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        loop = asyncio.get_running_loop()
        real = loop.time
        began = real()
        monkeypatch.setattr(loop, "time", lambda: began + self.ahead_s)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Store:
    """Actions on it fail as ``errors`` says, by key."""

    def __init__(self) -> None:
        self.attempts = TierBackoff()
        self.tier = OpenTier(1, "store", MemoryDriver())
        self.errors: dict[str, BaseException] = {}
        self.tried: list[str] = []

    def action(self, key: str, *, kind: str = "copying") -> Action:
        async def do() -> None:
            self.tried.append(key)
            if key in self.errors:
                raise self.errors[key]

        return Action(kind, key, do, into_tier=kind != "deleting")

    async def look(self, *keys: str, kind: str = "copying") -> list[str]:
        """The keys that were tried when these were wanted."""
        self.tried = []
        actions = [self.action(key, kind=kind) for key in keys]
        self.attempts.keep(self.tier, [kind], actions)
        for action in self.attempts.ordered(self.tier, actions):
            await self.attempts.run(self.tier, action)
        return self.tried


@pytest.fixture
def store() -> Iterator[Store]:
    yield Store()


async def test_what_fails_pauses_alone_and_longer_each_time(store: Store, clock: Clock) -> None:
    store.errors["base"] = Corruption("its marker says otherwise")
    assert await store.look("base", "next") == ["base", "next"]
    pauses_s: list[float] = []
    for _ in range(8):
        began_s = clock.ahead_s
        while "base" not in await store.look("base", "next"):
            assert store.tried == ["next"]
            clock.ahead_s += 0.25
        pauses_s.append(clock.ahead_s - began_s)
    assert pauses_s == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30], abs=0.3)
    assert Backoff(0.5, 30.0) == RETRY


async def test_pauses_are_short_while_somebody_waits(store: Store, clock: Clock) -> None:
    """A store that comes back is used before their deadline."""

    async def pause_s() -> float:
        began_s = clock.ahead_s
        while "base" not in await store.look("base"):
            clock.ahead_s += 0.25
        return clock.ahead_s - began_s

    store.errors["base"] = Transient("no answer")
    for _ in range(8):
        clock.ahead_s += 40.0
        assert await store.look("base") == ["base"]
    async with store.attempts.waited_for(16.0):
        assert [await pause_s() for _ in range(3)] == pytest.approx([2, 2, 2], abs=0.3), "the pause that had begun, too"
        async with store.attempts.waited_for(1000.0), store.attempts.waited_for(1.0):
            assert await pause_s() == pytest.approx(0.5, abs=0.3)
    await pause_s()
    async with store.attempts.waited_for(0.0):
        assert await pause_s() == pytest.approx(30, abs=0.3), "who only asks does not wait"
    store.attempts.hurry(8.0)
    assert [await pause_s() for _ in range(7)] == pytest.approx([1] * 7, abs=0.3), (
        "who says again and again that he waits"
    )
    clock.ahead_s += 2.0
    assert await store.look("base") == ["base"]
    assert await pause_s() == pytest.approx(30, abs=0.3)


async def test_what_has_failed_is_tried_after_what_has_not(store: Store, clock: Clock) -> None:
    store.errors["a"] = store.errors["b"] = CapacityExceeded("no room")
    assert await store.look("a") == ["a"]
    clock.ahead_s += 0.1
    assert await store.look("a", "b", "c") == ["b", "c"]
    clock.ahead_s += 40
    assert await store.look("a", "b", "c", "d") == ["c", "d", "a", "b"], "the longest pause is over first"


async def test_a_failure_that_takes_long_is_repeated_half_of_the_time_at_most(store: Store, clock: Clock) -> None:
    async def slow() -> None:
        clock.ahead_s += 600.0
        raise Transient("no answer")

    action = Action("copying", "base", slow)
    assert not await store.attempts.run(store.tier, action)
    clock.ahead_s += 599.0
    before_s = clock.ahead_s
    assert not await store.attempts.run(store.tier, action)
    assert clock.ahead_s == before_s, "it was not tried"
    clock.ahead_s += 2.0
    assert not await store.attempts.run(store.tier, action)
    assert clock.ahead_s > before_s + 600


@pytest.mark.parametrize("error", [Transient("no answer"), Unauthorized("not you")], ids=repr)
async def test_a_tier_that_fails_whatever_is_put_is_asked_once_a_pause(
    store: Store, clock: Clock, error: TierError
) -> None:
    names = [f"object-{number}" for number in range(9)]
    store.errors = dict.fromkeys(names, error)
    assert await store.look(*names) == names[:3]
    clock.ahead_s += 0.1
    assert await store.look(*names) == []
    probed = set[str]()
    for _ in range(6):
        clock.ahead_s += 40.0
        probes = await store.look(*names)
        assert len(probes) == 1
        probed.update(probes)
    assert probed == set(names[3:]), "another one each time"
    assert await store.look("record", kind="deleting") == ["record"], "room can be made all the same"
    store.errors = {}
    clock.ahead_s += 40.0
    assert await store.look(*names) == names
    assert store.attempts.errors == {}


async def test_one_object_that_fails_for_the_tiers_reasons_is_not_the_tier(store: Store, clock: Clock) -> None:
    store.errors["bad"] = Transient("no answer")
    for _ in range(10):
        clock.ahead_s += 40.0
        assert sorted(await store.look("bad", "good")) == ["bad", "good"]


@pytest.mark.parametrize("error", [CapacityExceeded("no room"), SourceError("it cannot be read")], ids=repr)
async def test_objects_that_fail_for_reasons_of_their_own_are_not_the_tier(
    store: Store, clock: Clock, error: TierError
) -> None:
    names = [f"object-{number}" for number in range(9)]
    store.errors = dict.fromkeys(names, error)
    assert await store.look(*names, "good") == [*names, "good"]
    clock.ahead_s += 0.1
    assert await store.look(*names, "good") == ["good"]


async def test_what_is_remembered_of_a_tier_has_a_limit(store: Store, clock: Clock) -> None:
    names = [f"object-{number}" for number in range(2 * TROUBLES_MAX)]
    store.errors = dict.fromkeys(names, CapacityExceeded("no room" * 1000))
    assert len(await store.look(*names)) == TROUBLES_MAX
    clock.ahead_s += 40.0
    assert len(await store.look(*names)) == 1
    assert len(store.attempts.errors["store"]) < 1100
    await store.look()
    assert store.attempts.errors == {}, "what is wanted no more is forgotten"
    store.errors = {}
    assert len(await store.look(*names)) == 2 * TROUBLES_MAX


async def test_the_trouble_that_lasts_longest_is_shown_with_its_object(store: Store, clock: Clock) -> None:
    store.errors = {"base": Corruption("its marker says otherwise"), "later": CapacityExceeded("no room")}
    await store.look("base")
    clock.ahead_s += 10.0
    await store.look("base", "later")
    assert store.attempts.errors == {"store": "copying base: its marker says otherwise (and 1 more in trouble)"}
    await store.look("later")
    assert store.attempts.errors == {"store": "copying later: no room"}


async def test_that_an_object_is_not_there_is_shown_only_if_nothing_else_fails(store: Store, clock: Clock) -> None:
    """The tier's directory was removed: what says so comes later than what lacks its object."""
    store.errors = {"base": NotFound("there is no object"), "later": TierError("the directory was removed")}
    await store.look("base")
    clock.ahead_s += 10.0
    await store.look("base", "later")
    assert store.attempts.errors == {"store": "copying later: the directory was removed (and 1 more in trouble)"}
    await store.look("base")
    assert store.attempts.errors == {"store": "copying base: there is no object"}


async def test_an_error_that_nobody_foresaw_is_the_actions_own_and_told_with_its_traceback(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.errors["odd"] = ValueError("a header of 80 MB")
    assert await store.look("odd", "good") == ["odd", "good"]
    assert store.attempts.errors == {"store": "copying odd: ValueError: a header of 80 MB"}
    assert next(each.exc_info for each in caplog.records if each.levelno == logging.ERROR)


async def test_an_error_that_nobody_foresaw_is_told_with_its_traceback_once_however_often_it_comes(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of each base that is due: each of them is an action of its own. It is one cause."""
    for number in range(5):
        store.errors[f"odd{number}"] = ValueError(f"a header of {number} MB")
        await store.look(f"odd{number}")
        clock.ahead_s += 40.0
    assert [each.exc_info is not None for each in caplog.records] == [True, False]


async def test_what_is_wanted_now_and_then_is_told_once_for_each_error(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """As an incomplete batch is, which is wanted only while a job closes."""
    for error in ("full", "full", "read-only", "read-only"):
        store.errors["batch"] = CapacityExceeded(error)
        assert await store.look("batch") == ["batch"]
        await store.look()
    del store.errors["batch"]
    await store.look("batch")
    store.errors["batch"] = CapacityExceeded("read-only")
    await store.look("batch")
    assert [each.split(": ", 1)[1].partition(";")[0] for each in told(caplog)] == [
        "copying batch: full",
        "copying batch: read-only",
        "over after 2 failures in 0 s: full",
        "over after 2 failures in 0 s: read-only",
        "copying batch: read-only",
    ]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


async def test_a_cause_that_holds_up_many_objects_is_told_at_growing_counts_and_when_it_is_over(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for number in range(40):
        store.errors[f"{number}"] = CapacityExceeded("no room", tier="store", key=f"{number}")
        await store.look(f"{number}")
    assert len(caplog.records) == 40, "each failure is logged"
    assert [each.rpartition(" (")[2] for each in told(caplog)[1:]] == [
        "8 failures of this cause)",
        "16 failures of this cause)",
        "32 failures of this cause)",
    ]
    caplog.clear()
    clock.ahead_s += 100.0
    assert await store.look("39") == ["39"]
    store.errors["40"] = TierError("read-only")
    await store.look("40")
    assert [each.partition(";")[0] for each in told(caplog)] == ["tier store: copying 40: read-only"], "another cause"
    caplog.clear()
    await store.look("41", kind="deleting")
    assert told(caplog) == [], "of what has succeeded, nothing had failed"
    await store.look("41")
    assert [each.partition(": ")[2] for each in told(caplog)] == [
        "over after 41 failures in 100 s: no room",
        "over after one failure in 0 s: read-only",
    ]
    caplog.clear()
    await store.look("42")
    assert told(caplog) == [], "it is told once"


async def test_while_one_object_fails_of_a_cause_it_is_not_over(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.errors = dict.fromkeys(["base 10", "base 20"], CapacityExceeded("no room"))
    await store.look("base 10", "base 20", "good")
    assert len(told(caplog)) == 1
    del store.errors["base 20"]
    clock.ahead_s += 40.0
    await store.look("base 10", "base 20")
    assert len(told(caplog)) == 1
    await store.look("good")  # base 10 is wanted no more
    assert told(caplog)[1].endswith("over after 3 failures in 40 s: no room")


async def test_a_tier_that_was_full_once_is_known_for_it(store: Store, clock: Clock) -> None:
    store.errors = {"a": TierError("no answer"), "b": SourceError("it cannot be read")}
    await store.look("a", "b")
    assert not store.attempts.was_full(store.tier)
    store.errors = {"c": CapacityExceeded("no room")}
    await store.look("c")
    store.errors = {}
    clock.ahead_s += 40.0
    await store.look("c")
    assert store.attempts.was_full(store.tier)


async def test_a_newer_generation_is_no_trouble_but_the_end(store: Store, clock: Clock) -> None:
    store.errors["record"] = JobConflict("generation 2 has opened")
    with pytest.raises(JobConflict):
        await store.look("record")
    assert store.attempts.errors == {}
