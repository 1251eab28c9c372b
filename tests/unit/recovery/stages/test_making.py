"""What is decided before anything is read, and what is said of it afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.unit.recovery.stages.test_transfers import Held
from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.errors import RecoveryError
from tiercheck.format.index.logical import MASTER, LogicalIndex, LogicalTensor
from tiercheck.keys import ClaimKey
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.recovery.ranks import Ranks
from tiercheck.recovery.stages.making import (
    CHARACTERS_MAX,
    RAISED_RATE,
    TEXTS_MAX,
    Made,
    StageMaking,
    bounded,
)
from tiercheck.replication.objects.records import seal
from tiercheck.runtime.front import run
from tiercheck.runtime.group import BlockingGroup, SimulatedGroup
from tiercheck.streams.stage import Moments, StagePlace, state_name

EMBEDDING, HEAD = ("embed", (9, 2)), ("head", (2, 9))
WIDTH = 4
BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.99}


@dataclass
class Stage(Held):
    """Of a rank: its layers; an end has an embedding or a head besides. All elements are the rank's number + 1."""

    rank: int
    stages: int = 4
    copies: int = 1
    width: int = WIDTH
    depth: int = 1
    """How many layers a stage has, named by the stage's number + 1, then with a letter behind."""
    counted: int | None = None
    """The steps that the optimizer has counted, if its moments are known. A mean of gradients that were all the rank's
    number + 1, and one of their squares."""
    scheduled: bool = False
    tied: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    arrays: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage = self.rank // self.copies
        layers = [(f"{self.stage + 1}{' bcd'[at].strip()}", (("w", (self.width,)),)) for at in range(self.depth)]
        if self.stage == 0:
            layers.insert(0, ("0", (EMBEDDING,)))
        if self.stage == self.stages - 1:
            layers.append(("9", (HEAD,)))
        self.layers = tuple(layers)
        for name, parameters in layers:
            for parameter, shape in parameters:
                self.arrays[f"{MASTER}{name}.{parameter}"] = np.full(np.prod(shape), self.rank + 1, np.float32)

    @property
    def place(self) -> StagePlace:
        return StagePlace(self.stage, self.stages, self.copies, self.layers, self.tied, self.scheduled, self.kept)

    def index(self) -> LogicalIndex:
        tensors = [
            LogicalTensor(f"{name}.{parameter}", "F32", shape, trained=True)
            for name, parameters in self.layers
            for parameter, shape in parameters
        ]
        return LogicalIndex.of_whole(tensors)

    def norms(self, host_state: Mapping[str, Any]) -> Sequence[float | None]:
        found: Sequence[float | None] = host_state["norms"]
        return found

    def clear(self, stored: Collection[str]) -> None:
        for name in stored:
            self.arrays[name][:] = 0

    def moments(self) -> Mapping[str, Moments]:
        if self.counted is None:
            raise RecoveryError("this one is torch.optim.sgd.SGD")
        for master in [name for name in self.arrays if name.startswith(MASTER)]:
            like = self.arrays[master]
            for key, beta in BETAS.items() if self.counted else ():
                seen = (self.rank + 1) ** (2 if key == "exp_avg_sq" else 1)
                self.arrays[state_name(master, key)] = np.full_like(like, (1 - beta**self.counted) * seen)
            self.arrays[state_name(master, "step")] = np.full(1, self.counted, np.float32)
        state: dict[str, Any] = {"exp_avg": [self.width], "exp_avg_sq": [self.width], "step": [], "kind": "x"}
        return {
            name: Moments(self.counted, BETAS, state if self.counted else {})
            for name in self.arrays
            if name.startswith(MASTER)
        }

    def optimizer(self, stored: str) -> Mapping[str, Any]:
        return {"kind": "x"}

    def expect_optimizer(self, stored: str, told: Mapping[str, Any], like_master: Collection[str] = ()) -> None:
        assert told["kind"] == "x"
        assert set(like_master) in ({*BETAS}, set())
        for key in like_master:
            self.arrays[state_name(stored, key)] = np.zeros(self.width, np.float32)
        if like_master:
            self.arrays[state_name(stored, "step")] = np.zeros(1, np.float32)

    def finish(self) -> None:
        pass


def made(
    stages: Sequence[Stage],
    lost: Collection[int],
    option: LostStage | None = None,
    *,
    norms: Sequence[Sequence[float | None]] | None = None,
    newest: Mapping[int, int] | None = None,
) -> list[Made]:
    """What all ranks come to at version 7. ``newest``: by rank, what a lost one can come to."""

    def act(group: SimulatedGroup) -> Made:
        scheduler: Any = None
        state: Any = stages[group.rank]
        ranks = Ranks(BlockingGroup(group), scheduler, 10.0)

        def newest_of(asked: Any) -> int | None:
            return min(((newest or {}).get(rank, -1) for rank in asked), default=-1) if newest else None

        making = StageMaking(state, ranks, option or LostStage(), frozenset(lost), newest_of)
        is_lost = group.rank in lost
        host = {"of": group.rank, "norms": (norms or [[1.0] * 3] * len(stages))[group.rank]}

        async def both() -> Made:
            await making.look()
            await making.plan()
            return await making.make(7, None if is_lost else host)

        return run(both())

    outcomes = on_all_ranks(len(stages), act)
    failed = [each for each in outcomes if isinstance(each, Exception)]
    if failed:
        assert len(failed) == len(outcomes), "all ranks refuse, or none"
        raise failed[0]
    return outcomes


def pipeline(stages: int = 4, copies: int = 1, **options: Any) -> list[Stage]:
    return [Stage(rank, stages, copies, **options) for rank in range(stages * copies)]


def test_the_middle_is_the_weighted_average_and_takes_the_host_state_of_the_stage_before() -> None:
    stages = pipeline(kept=("mask",))
    found = made(stages, [1], norms=[[5.0, 1.0], [9.0], [9.0], [9.0, 9.0]])
    # The embedding's gradient does not count: 1 of stage 0, and 9 of stage 2, each the square of a norm.
    assert stages[1].arrays[f"{MASTER}2.w"].tolist() == pytest.approx([0.1 * 1 + 0.9 * 3] * WIDTH)
    assert found[1].host_state["of"] == 0
    assert [each.host_state["of"] for each in found] == [0, 0, 2, 3]
    (said, rate) = found[0].said
    assert all(each.said == found[0].said for each in found)
    assert said == (
        "stage 1 of 4 (rank 1) was lost with every copy, and at version 7 it is made of 0.1 of stage 0 (norm 1) and "
        "0.9 of stage 2 (norm 3), norms to the power of 2; its optimizer's state begins anew, and the host state is "
        "that of rank 0; what no optimizer updates is as the script made it (mask)"
    )
    assert rate == "the learning rate is raised by a factor of 1.1 for 100 steps"
    assert {each.host_state[RAISED_RATE]["until"] for each in found} == {107}


def test_the_rate_stays_where_a_schedule_is_attached() -> None:
    found = made(pipeline(scheduled=True), [1])
    assert RAISED_RATE not in found[0].host_state
    assert len(found[0].said) == 1


@pytest.mark.parametrize("norms", [[None, None], [float(0), 4.0]], ids=["not known", "known"])
def test_norms_that_are_not_known_weigh_alike(norms: list[float | None]) -> None:
    stages = pipeline()
    found = made(stages, [2], norms=[[1.0, 1.0], [norms[0]], [None], [norms[1], None]])
    known = norms[0] is not None
    assert stages[2].arrays[f"{MASTER}3.w"].tolist() == [4.0 if known else 3.0] * WIDTH
    assert ("alike, since the version does not hold the gradients' norms" in found[0].said[0]) is not known


def test_each_layer_is_weighed_by_its_own_norms() -> None:
    stages = pipeline(depth=2)
    # Squares of norms, by layer: an end has another one. Layer for layer 1 and 9, then 4 and 1.
    found = made(stages, [1], LostStage(weights="by-layer"), norms=[[5.0, 1.0, 4.0], [9.0], [9.0, 1.0], [9.0] * 3])
    assert stages[1].arrays[f"{MASTER}2.w"].tolist() == pytest.approx([0.1 * 1 + 0.9 * 3] * WIDTH)
    assert stages[1].arrays[f"{MASTER}2b.w"].tolist() == pytest.approx([0.8 * 1 + 0.2 * 3] * WIDTH)
    words = (
        "made of 0.1 to 0.8 of stage 0 and 0.2 to 0.9 of stage 2, each layer by its own norms to the power of 2; its "
        "optimizer's state begins anew"
    )
    assert words in found[0].said[0]


@pytest.mark.parametrize(("exponent", "words"), [(2.0, "of stage 2, alike, since"), (0.0, "of stage 2; its")])
def test_layers_weigh_alike_if_their_norms_are_not_known_or_not_looked_at(exponent: float, words: str) -> None:
    stages = pipeline(depth=2)
    option = LostStage(weights="by-layer", exponent=exponent)
    found = made(stages, [1], option, norms=[[5.0, 1.0, 4.0], [9.0], [9.0, None], [9.0] * 3])
    for layer in ("2", "2b"):
        assert stages[1].arrays[f"{MASTER}{layer}.w"].tolist() == [2.0] * WIDTH
    assert words in found[0].said[0]


def test_moments_are_averaged_each_corrected_for_its_bias() -> None:
    stages = pipeline(counted=10)
    stages[2].counted = 3
    found = made(stages, [1], LostStage(moments="averaged"), norms=[[5.0, 1.0], [9.0], [9.0], [9.0, 9.0]])
    arrays = stages[1].arrays
    # Of 10 steps whose gradients are 1 a tenth, of 3 whose gradients are 3 nine tenths: as of 10 steps.
    assert arrays["state/step/master/2.w"].tolist() == [10]
    mean, of_squares = arrays["state/exp_avg/master/2.w"], arrays["state/exp_avg_sq/master/2.w"]
    assert mean.tolist() == pytest.approx([0.6513215599 * (0.1 * 1 + 0.9 * 3)] * WIDTH)
    assert of_squares.tolist() == pytest.approx([0.0956179250 * (0.1 * 1 + 0.9 * 9)] * WIDTH)
    assert arrays[f"{MASTER}2.w"].tolist() == pytest.approx([0.1 * 1 + 0.9 * 3] * WIDTH)
    assert "norms to the power of 2; its optimizer's moments are made in the same way, and" in found[0].said[0]


def test_a_copied_end_has_its_neighbours_moments() -> None:
    stages = pipeline(counted=3)
    stages[0].layers = stages[0].layers[1:]  # without an embedding
    made(stages, [0], LostStage(method="neighbours-and-ends", moments="averaged"))
    for key in ("exp_avg", "exp_avg_sq", "step"):
        own, others = (stages[rank].arrays[f"state/{key}/master/{rank + 1}.w"] for rank in (0, 1))
        assert own.tolist() == others.tolist()


def test_where_no_step_was_taken_there_are_no_moments() -> None:
    stages = pipeline(counted=0)
    stages[2].counted = 4
    made(stages, [1], LostStage(moments="averaged"))
    assert stages[1].arrays["state/step/master/2.w"].tolist() == [4]
    assert stages[1].arrays["state/exp_avg/master/2.w"].tolist() == pytest.approx([0.5 * 3 * (1 - 0.9**4)] * WIDTH)
    stages = pipeline(counted=0)
    made(stages, [1], LostStage(moments="averaged"))
    assert not any("exp_avg" in name for name in stages[1].arrays)


def test_data_parallel_copies_of_a_stage_count_once() -> None:
    stages = pipeline(copies=2)
    made(stages, [2, 3], norms=[[0.0, 4.0]] * 2 + [[None]] * 2 + [[12.0]] * 2 + [[1.0, 1.0]] * 2)
    # Stage 0 is ranks 0 and 1, stage 2 is ranks 4 and 5: a quarter and three quarters.
    own = [stages[rank].arrays[f"{MASTER}2.w"][0] for rank in (2, 3)]
    assert own == [0.25 * 1 + 0.75 * 5, 0.25 * 2 + 0.75 * 6], "each takes of the ranks of its number's parity"


@pytest.mark.parametrize(
    ("lost", "option", "words"),
    [
        ([0], LostStage(), r"stage 0 \(average: it is an end stage of 4"),
        ([1, 2], LostStage(), "its neighbour 2 is lost too"),
        ([3], LostStage(method="neighbours-and-ends"), r"rank 3 cannot be made .* no surviving rank has 9\.head"),
        ([1], LostStage(method="older-base"), "no older base of it is at hand"),
        ([1], LostStage(moments="averaged"), "this one is torch.optim.sgd.SGD"),
    ],
    ids=["an end", "two in a row", "a head without a copy", "no base", "moments of no known kind"],
)
def test_what_cannot_be_made_is_refused_before_anything_is_changed(
    lost: list[int], option: LostStage, words: str
) -> None:
    stages = pipeline()
    before = [{name: array.copy() for name, array in stage.arrays.items()} for stage in stages]
    with pytest.raises(RecoveryError, match=words):
        made(stages, lost, option)
    for stage, arrays in zip(stages, before, strict=True):
        assert all(np.array_equal(arrays[name], array) for name, array in stage.arrays.items())


def test_layers_of_other_shapes_are_refused_by_name() -> None:
    stages = pipeline()
    stages[2] = Stage(2, width=5)
    with pytest.raises(RecoveryError, match=r"'w' differs in '2' \(\(4,\)\) and '3' \(\(5,\)\)"):
        made(stages, [1])


def test_both_neighbours_may_be_ends_whose_other_layers_are_alike() -> None:
    stages = pipeline(3)
    stages[2].layers = (*stages[2].layers[:-1], ("9", (EMBEDDING,)))  # a head of the embedding's name and shape
    made(stages, [1], norms=[[5.0, 1.0], [9.0], [9.0, 5.0]])
    assert stages[1].arrays[f"{MASTER}2.w"].tolist() == pytest.approx([0.1 * 1 + 0.9 * 3] * WIDTH)


def test_a_layer_that_two_stages_name_alike_is_taken_as_it_is_if_it_is_tied_and_else_refused() -> None:
    def with_ties(*tied: str) -> list[Stage]:
        stages = pipeline()
        for each in (stages[0], stages[3]):
            each.layers = (("embed", (EMBEDDING,)), *(layer for layer in each.layers if layer[0] not in ("0", "9")))
            each.arrays[f"{MASTER}embed.embed"] = np.full(18, each.rank + 1, np.float32)
            each.tied = tied
        return stages

    option = LostStage(method="neighbours-and-ends")
    stages = with_ties("embed")
    made(stages, [0], option)
    assert stages[0].arrays[f"{MASTER}embed.embed"].tolist() == [4.0] * 18
    assert stages[0].arrays[f"{MASTER}1.w"].tolist() == [2.0] * WIDTH
    with pytest.raises(RecoveryError, match="stages 0 and 3 both have embed, so that one would be taken for the other"):
        made(with_ties(), [0], option)


def test_an_older_base_stays_as_it_was_read() -> None:
    stages = pipeline()
    found = made(stages, [2, 3], LostStage(method="older-base", learning_rate=1.0), newest={2: 4, 3: 5})
    assert [stage.arrays[f"{MASTER}{rank + 1}.w"][0] for rank, stage in enumerate(stages)] == [1, 2, 3, 4]
    assert [each.split(", its")[0] for each in found[0].said] == [
        "stage 2 of 4 (rank 2) was lost with every copy, and at version 7 it is that of version 4",
        "stage 3 of 4 (rank 3) was lost with every copy, and at version 7 it is that of version 5",
    ]
    assert [each.host_state["of"] for each in found] == [0, 1, 1, 1]


def test_what_is_told_of_it_fits_into_a_record_however_much_it_is() -> None:
    said = bounded([str(number) * 5000 for number in range(9)])
    assert [len(each) for each in said[:-1]] == [CHARACTERS_MAX] * TEXTS_MAX
    assert said[-1] == "and 4 more"
    seal(ClaimKey(2, "ab" * 8), Branch(2, 1, 7, 4, "ab" * 8, made=said))
