"""Memory for the next differential is taken while training goes on: no step waits for it, and none is left behind."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.training import Training, faulty, memory, recovered
from tiercheck.hierarchy import Hierarchy
from tiercheck.testing.faults import Point

VERSION_2 = "differential/000000000002"


class Calls:
    """Which calls a tier gets; those that ``fails`` tells find no room."""

    def __init__(self, fails: Callable[[Point], bool] = lambda point: False) -> None:
        self.seen: list[tuple[str, str]] = []
        self._fails = fails

    def __call__(self, point: Point) -> bool:
        self.seen.append((point.call, str(point.key)))
        return self._fails(point)

    def count(self, call: str, key: str) -> int:
        return sum(each == call and key in of for each, of in self.seen)


def test_the_next_version_finds_its_memory_reserved() -> None:
    url, calls, training = memory(), Calls(), Training()
    with training.attach(Hierarchy.of(faulty(url, calls))) as checkpointer:
        training.step(1)
        checkpointer.flush()  # behind the reservation
        assert calls.count("reserve", VERSION_2) == 1
        training.step(2)
        assert calls.count("reserve", VERSION_2) == 1
        assert calls.count("publish", VERSION_2) == 1
        assert checkpointer.stats.differentials == 2
    assert recovered(url) == (2, training.states[2])


def test_what_was_reserved_for_a_version_that_never_came_is_given_back() -> None:
    calls, training = Calls(), Training()
    with training.attach(Hierarchy.of(faulty(memory(), calls))) as checkpointer:
        training.step(1)
        checkpointer.flush()
    assert calls.count("drop", VERSION_2) == 1
    assert calls.count("publish", VERSION_2) == 0


def test_where_there_was_no_room_ahead_the_step_makes_some() -> None:
    tries: list[Point] = []

    def once(point: Point) -> bool:
        if point.call == "reserve" and VERSION_2 in str(point.key):
            tries.append(point)
        return len(tries) == 1 and point is tries[-1]

    url, training = memory(), Training()
    with training.attach(Hierarchy.of(faulty(url, Calls(once)))) as checkpointer:
        for version in (1, 2, 3):
            training.step(version)
        assert len(tries) == 2
        assert (checkpointer.stats.failed_saves, checkpointer.stats.differentials) == (0, 3)
    assert recovered(url) == (3, training.states[3])


def test_a_version_that_has_become_larger_is_reserved_anew() -> None:
    calls, training = Calls(), Training()
    with training.attach(Hierarchy.of(faulty(memory(), calls))) as checkpointer:
        training.step(1)
        checkpointer.flush()
        training.model.register_buffer("late", torch.ones(1 << 20))
        training.step(2)
        checkpointer.flush()  # the drop was begun before
        assert calls.count("reserve", VERSION_2) == 2
        assert calls.count("drop", VERSION_2) == 1
        assert (checkpointer.stats.failed_saves, checkpointer.stats.differentials) == (0, 2)


def test_a_version_that_gets_a_base_instead_leaves_nothing_reserved() -> None:
    url, calls, training = memory(), Calls(), Training()
    with training.attach(Hierarchy.of(faulty(url, calls))) as checkpointer:
        training.step(1)
        checkpointer.flush()
        with torch.no_grad():
            next(training.model.parameters()).add_(1)
        training.step(2)
        assert calls.count("drop", VERSION_2) == 1
        assert calls.count("publish", VERSION_2) == 0
        checkpointer.flush()
    assert recovered(url) == (2, training.states[2])
