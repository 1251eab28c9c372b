"""Moments of masters that are cut otherwise than those that go into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.recovery.stages.test_transfers import flat, ingredient
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.format.index.assemble import Holdings
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.stages.optimizers import averaged_moments
from tiercheck.recovery.stages.transfers import Contribution, contributions
from tiercheck.runtime.front import run
from tiercheck.runtime.group import BlockingGroup, SimulatedGroup
from tiercheck.streams.stage import Moments

BETA = 0.5
STEPS = {0: 1, 1: 2, 2: 3}
MASTER = "master/part"


class Optimizers:
    """What a rank is asked of its optimizer. The count of steps is a plain number, as DeepSpeed's is."""

    def __init__(self, rank: int) -> None:
        self.steps = STEPS.get(rank, 0)
        self.expected: dict[str, Any] = {}

    def moments(self) -> Mapping[str, Moments]:
        return {MASTER: Moments(self.steps, {"m": BETA}, {"m": [12], "step": self.steps})}

    def expect_optimizer(self, stored: str, told: Mapping[str, Any], like_master: Any) -> None:
        self.expected = {stored: (told, list(like_master))}


def test_a_partition_has_one_count_of_steps_and_each_part_its_own_correction() -> None:
    """Ranks 0 and 1 hold layer 1 in two parts, rank 2 layer 3 as a whole; rank 3 had layer 2, and padding behind it."""
    held = {0: flat(1, 0, 5), 1: flat(1, 5, 7), 2: flat(3, 0, 12)}
    shares = [ingredient(0.25, 1, {0: held[0], 1: held[1]}), ingredient(0.75, 3, {2: held[2]})]
    planned = contributions(3, flat(2, 0, 12, 2), Holdings(held), shares)
    optimizers = [Optimizers(rank) for rank in range(4)]

    def act(group: SimulatedGroup) -> list[Contribution]:
        scheduler: Any = None  # nothing is read from a tier
        state: Any = optimizers[group.rank]
        return run(averaged_moments(planned, state, Ranks(BlockingGroup(group), scheduler, 10.0)))

    first, *others = on_all_ranks(4, act)
    assert others == [first] * 3, "every rank makes the same plan"
    names = {(each.stored, each.into) for each in first}
    assert names == {(f"state/m/{MASTER}", f"state/m/{MASTER}")}, "a plain count is told, and not brought"
    # 1 - 0.5 ** 3 = 7/8 is divided by what the source's own steps give: 1/2, 3/4 and 7/8.
    found = {each.source: (each.weight, each.copy.target_start) for each in first}
    assert found == {
        0: (pytest.approx(0.25 * 7 / 4), 0),
        1: (pytest.approx(0.25 * 7 / 6), 5),
        2: (pytest.approx(0.75), 0),
    }
    assert [each.expected for each in optimizers] == [{}, {}, {}, {MASTER: ({"m": [12], "step": 3}, ["m"])}]
