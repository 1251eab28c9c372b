"""What ranks do together: one that fails tells the others why, and ranks at different steps say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.errors import GroupError, Mismatch, RecoveryError
from tiercheck.recovery.ranks import Ranks, gather
from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.runtime.group import BlockingGroup, SimulatedGroup


@pytest.fixture
def scheduler() -> Iterator[ThreadScheduler]:
    scheduler = ThreadScheduler()
    yield scheduler
    run(scheduler.close())


def test_a_rank_that_fails_tells_the_others() -> None:
    def act(group: SimulatedGroup) -> list[Any]:
        def produce() -> int:
            if group.rank == 1:
                raise Mismatch("another model")
            return group.rank

        return run(gather(BlockingGroup(group), "comparing", produce, deadline_s=10))

    first, second, third = on_all_ranks(3, act)
    assert isinstance(second, Mismatch)
    assert str(second) == "another model"
    for other in (first, third):
        assert isinstance(other, Mismatch)
        assert str(other) == "comparing: rank 1 reports: another model"


def test_ranks_that_do_different_things_tell_each_other() -> None:
    def act(group: SimulatedGroup) -> list[Any]:
        return run(gather(BlockingGroup(group), ("the end of the job", "agreeing")[group.rank], dict, deadline_s=10))

    first, second = on_all_ranks(2, act)
    assert isinstance(first, GroupError)
    assert isinstance(second, GroupError)
    assert "the end of the job: rank 1 is at 'agreeing' instead" in str(first)
    assert "agreeing: rank 0 is at 'the end of the job' instead" in str(second)


def test_what_travels_comes_back_as_it_was() -> None:
    value = {"a": [1, (2, b"3")], "b": None}
    gathered = on_all_ranks(2, lambda group: run(gather(BlockingGroup(group), "x", lambda: value, deadline_s=10)))
    assert gathered == [[value, value]] * 2


def test_an_error_of_another_rank_is_a_recovery_error_unless_it_is_a_mismatch() -> None:
    def act(group: SimulatedGroup) -> list[Any]:
        def produce() -> None:
            if group.rank == 0:
                raise GroupError("lost")

        return run(gather(BlockingGroup(group), "reading", produce, deadline_s=10))

    first, second = on_all_ranks(2, act)
    assert isinstance(first, GroupError)
    assert isinstance(second, RecoveryError)


def test_what_all_ranks_do_together_leaves_each_its_own_value_and_tells_the_others(scheduler: ThreadScheduler) -> None:
    def act(group: SimulatedGroup) -> tuple[object, object, list[Any]]:
        ranks = Ranks(BlockingGroup(group), scheduler, 10)
        own = object()

        async def look() -> object:
            return own

        async def tell() -> tuple[object, int]:
            return own, ranks.rank

        stays = run(ranks.together("looking", look))
        value, told = run(ranks.exchange("telling", tell))
        return stays is own, value is own, told

    assert on_all_ranks(2, act) == [(True, True, [0, 1])] * 2


def test_a_rank_that_fails_in_what_all_do_leaves_the_others_without_a_value(scheduler: ThreadScheduler) -> None:
    def act(group: SimulatedGroup) -> None:
        async def divide() -> int:
            return 1 // group.rank

        run(Ranks(BlockingGroup(group), scheduler, 10).together("looking", divide))

    first, second = on_all_ranks(2, act)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, RecoveryError)
    assert "looking: rank 0 reports: ZeroDivisionError" in str(second)
