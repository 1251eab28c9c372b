"""When a base is due, on all ranks alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tiercheck.policy.policies import CadencePolicy, EverySeconds, EveryVersions, Progress, When
from tiercheck.recording.cadence import Cadence


class Ranks:
    """So many ranks that train in lock step, each with a clock of its own."""

    def __init__(self, policy: CadencePolicy, world: int, *, opened: int = 0) -> None:
        self.met: list[int] = []
        self.version = opened
        self.clocks = [0.0] * world
        self.ranks = [
            Cadence(policy, opened, lambda rank=rank: self.clocks[rank], self.agree(rank) if world > 1 else None)  # type: ignore[misc]  # the loop's value
            for rank in range(world)
        ]
        self.answers: list[bool] = []

    def agree(self, rank: int) -> Callable[[bool], Awaitable[bool]]:
        async def agree(due: bool) -> bool:
            if rank == 0:
                self.met.append(self.version)
                self.answers.append(due)
            return self.answers[-1]

        return agree

    def train(self, last: int, *seconds: float) -> list[int]:
        """The versions at which all ranks make a base; ``seconds`` of each rank's clock go by in a version."""
        found = []
        while self.version < last:
            self.version += 1
            self.clocks = [clock + each for clock, each in zip(self.clocks, seconds, strict=True)]
            may = [each.may_be_due(self.version) for each in self.ranks]
            due = [asyncio.run(each.is_due(self.version)) for each in self.ranks]
            assert len(set(due)) == 1, "the ranks do not agree"
            assert may[0] or not due[0]
            if due[0]:
                found.append(self.version)
        return found


def test_by_versions_no_rank_asks_another() -> None:
    ranks = Ranks(EveryVersions(10), 2, opened=7)
    assert ranks.train(35, 1.0, 1.0) == [10, 20, 30]
    assert ranks.met == []


def test_by_seconds_rank_0_s_clock_counts_and_the_ranks_meet_seldom() -> None:
    ranks = Ranks(EverySeconds(12, versions_max=40, ask_every=5), 2)
    assert ranks.train(60, 1.0, 0.1) == [15, 30, 45, 60]
    assert ranks.met == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60]


def test_after_the_interval_a_base_is_due_without_asking() -> None:
    ranks = Ranks(EverySeconds(1000, versions_max=7, ask_every=5), 2)
    assert ranks.train(21, 1.0, 1.0) == [7, 14, 21]
    assert ranks.met == [5, 10, 15, 20]


def test_what_depends_on_versions_alone_is_not_asked_of_rank_0() -> None:
    ranks = Ranks(EveryVersions(8) | EverySeconds(7, versions_max=40, ask_every=5), 2)
    assert ranks.train(40, 1.0, 0.1) == [8, 15, 16, 24, 32, 40]
    assert ranks.met == [5, 10, 15, 20, 25, 30, 35], "at 40 a base is due in any case"


def test_alone_nobody_is_met() -> None:
    assert Ranks(When(lambda seen: seen.version == 12, ask_every=4), 1).train(20, 1.0) == [12]


@dataclass(frozen=True)
class Failing(EveryVersions):
    """Fails at one version."""

    def due(self, seen: Progress) -> bool:
        if seen.version == 3:
            raise ZeroDivisionError("no rate yet")
        return super().due(seen)


def test_a_cadence_that_raises_is_refused_and_a_base_is_made() -> None:
    ranks = Ranks(Failing(10), 2)
    assert ranks.train(12, 1.0, 1.0) == [3, 10]
    assert ranks.ranks[0].refusals.count == 1
