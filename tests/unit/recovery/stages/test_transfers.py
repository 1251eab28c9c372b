"""What a lost rank is made of, and in which messages that travels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.errors import RecoveryError
from tiercheck.format.index.assemble import Holdings
from tiercheck.format.index.boxes import Copy, strided
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Range
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.stages import transfers
from tiercheck.recovery.stages.transfers import Contribution, Ingredient, contributions, exchange, split, tied
from tiercheck.runtime.front import run
from tiercheck.runtime.group import BlockingGroup, SimulatedGroup

Array = NDArray[np.float32]
SHAPE = (4, 3)


def tensor(layer: int, name: str = "w", shape: tuple[int, ...] = SHAPE) -> LogicalTensor:
    return LogicalTensor(f"{layer}.{name}", "F32", shape, trained=True)


def index(stored: dict[str, tuple[Any, ...]], *tensors: LogicalTensor) -> LogicalIndex:
    return LogicalIndex({each.name: each for each in tensors}, stored)


def flat(layer: int, start: int, length: int, *padding: int) -> LogicalIndex:
    """A rank's partition: a part of the layer's only tensor."""
    pieces = Range(f"{layer}.w", start, length), *map(Padding, padding)
    return index({"master/part": pieces}, tensor(layer))


class Held:
    """A rank's masters, in one array each. See :class:`tiercheck.streams.stage.StageState`."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays

    def read(self, stored: str, copy: Copy) -> bytes:
        return strided(self.arrays[stored][copy.source_start :], copy.lengths, copy.source_strides).tobytes()

    def add(self, stored: str, copy: Copy, elements: bytes, weight: float) -> None:
        target = strided(self.arrays[stored][copy.target_start :], copy.lengths, copy.target_strides)
        target += np.float32(weight) * np.frombuffer(elements, np.float32).reshape(copy.lengths)


def exchanged(planned: Sequence[Contribution], ranks: Sequence[Held]) -> None:
    def act(group: SimulatedGroup) -> None:
        scheduler: Any = None  # nothing is read from a tier
        state: Any = ranks[group.rank]
        run(exchange(planned, state, Ranks(BlockingGroup(group), scheduler, 10.0)))

    assert on_all_ranks(len(ranks), act) == [None] * len(ranks)


def ingredient(weight: float, layer: int, held: dict[int, LogicalIndex]) -> Ingredient:
    return Ingredient({"2.w": (f"{layer}.w", weight)}, Holdings(held))


@pytest.mark.parametrize("nbytes", [8, 20, 1 << 20])
def test_a_weighted_sum_of_partitions_that_are_cut_otherwise(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Rank 0 and 1 hold layer 1 in two parts, rank 2 layer 3 as a whole; rank 3 had layer 2, and padding behind it."""
    monkeypatch.setattr(transfers, "ROUND_NBYTES", nbytes)
    monkeypatch.setattr(transfers, "GIVEN_NBYTES_MIN", nbytes)
    before, after = np.arange(12, dtype=np.float32), np.arange(12, dtype=np.float32) * 10 + 1
    held = {0: flat(1, 0, 5), 1: flat(1, 5, 7), 2: flat(3, 0, 12)}
    wanted = flat(2, 0, 12, 2)
    shares = [ingredient(0.25, 1, {0: held[0], 1: held[1]}), ingredient(0.75, 3, {2: held[2]})]
    planned = contributions(3, wanted, Holdings(held), shares)
    ranks = [Held({"master/part": array.copy()}) for array in (before[:5], before[5:], after, np.zeros(14, np.float32))]
    exchanged(planned, ranks)
    made = ranks[3].arrays["master/part"]
    assert np.array_equal(made[:12], np.float32(0.25) * before + np.float32(0.75) * after)
    assert not made[12:].any()
    assert np.array_equal(ranks[2].arrays["master/part"], after), "what is given stays"


def test_what_weighs_nothing_is_not_brought() -> None:
    held = flat(1, 0, 12)
    assert not contributions(1, flat(2, 0, 12), Holdings({0: held}), [ingredient(0.0, 1, {0: held})])


def test_a_slice_of_a_matrix_is_made_of_slices() -> None:
    block = Block("2.w", (0, 1), (4, 2))
    wanted = index({"master/2.w": (block,)}, tensor(2))
    whole = index({"master/1.w": (Range("1.w", 0, 12),)}, tensor(1))
    (found,) = contributions(1, wanted, Holdings({0: whole}), [ingredient(1.0, 1, {0: whole})])
    values = np.arange(12, dtype=np.float32)
    ranks = [Held({"master/1.w": values}), Held({"master/2.w": np.zeros(8, np.float32)})]
    exchanged([found], ranks)
    assert np.array_equal(ranks[1].arrays["master/2.w"].reshape(4, 2), values.reshape(4, 3)[:, 1:])


def test_what_a_surviving_rank_has_under_the_same_name_is_taken_as_it_is() -> None:
    wanted = index({"master/a": (Range("2.w", 0, 12), Range("0.tied", 0, 3))}, tensor(2), tensor(0, "tied", (3,)))
    tied = index({"master/b": (Range("0.tied", 0, 3),)}, tensor(0, "tied", (3,)))
    other = flat(1, 0, 12)
    found = contributions(2, wanted, Holdings({0: tied, 1: other}), [ingredient(0.5, 1, {1: other})])
    assert [(each.source, each.weight, each.copy.target_start) for each in found] == [(1, 0.5, 0), (0, 1.0, 12)]


def test_what_nobody_has_is_refused_by_name() -> None:
    wanted = index({"master/a": (Range("2.w", 0, 12), Range("2.b", 0, 3))}, tensor(2), tensor(2, "b", (3,)))
    other = flat(1, 0, 7)
    with pytest.raises(RecoveryError, match=r"rank 2 cannot be made of what is left: no surviving rank has 1\.w, 2\.b"):
        contributions(2, wanted, Holdings({1: other}), [ingredient(1.0, 1, {1: other})])
    with pytest.raises(RecoveryError, match=r"no surviving rank has 2\.w, 2\.b"):
        contributions(2, wanted, Holdings({1: other}), [])


@pytest.mark.parametrize("elements_max", [1, 2, 5, 100])
def test_a_copy_in_parts_has_the_same_elements(elements_max: int) -> None:
    copy = Copy((2, 3, 2), 4, (12, 4, 1), 0, (6, 2, 1))

    def pairs(copies: Iterable[Copy]) -> list[tuple[int, int]]:
        runs = (run for each in copies for run in each.runs())
        return [(source + i, target + i) for source, target, count in runs for i in range(count)]

    parts = list(split(copy, elements_max))
    assert all(part.elements <= elements_max for part in parts)
    assert pairs(parts) == pairs([copy])


def test_the_optimizers_state_goes_with_whole_masters_alone() -> None:
    shape = (12,)
    embedding = tensor(0, "tied", shape)
    alone = index({"master/e": (Range("0.tied", 0, 12),)}, embedding)
    among = index({"master/p": (Range("2.w", 0, 12), Range("0.tied", 0, 12))}, tensor(2), embedding)
    other = flat(1, 0, 12)
    whole = contributions(2, alone, Holdings({0: alone}), [])
    assert [(each.stored, each.into) for each in tied(whole, {0: alone, 2: alone})] == [("master/e", "master/e")]
    for source, target in ((among, alone), (alone, among)):
        planned = contributions(2, target, Holdings({0: source}), [ingredient(1.0, 1, {1: other})])
        with pytest.raises(RecoveryError, match=r"tied layers.* would drift apart"):
            tied(planned, {0: source, 1: other, 2: target})
    assert not tied(contributions(2, flat(2, 0, 12), Holdings({1: other}), [ingredient(1.0, 1, {1: other})]), {})


def test_without_ingredients_only_what_others_have_is_brought() -> None:
    wanted = index(
        {"master/a": (Range("2.w", 0, 12),), "master/e": (Range("0.e", 0, 3),)}, tensor(2), tensor(0, "e", (3,))
    )
    tied_there = index({"master/e": (Range("0.e", 0, 3),)}, tensor(0, "e", (3,)))
    found = contributions(2, wanted, Holdings({0: tied_there}), None)
    assert [(each.source, each.into, each.own) for each in found] == [(0, "master/e", True)]
