"""Whether the ranks' stages are a pipeline of which a lost one can be made anew."""

from __future__ import annotations

import re

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.recovery.stages.places import check_pipeline, not_to_be_averaged, stage_state, stage_told
from tiercheck.streams.stage import StagePlace


def place(stage: int, stages: int, *layers: str, tied: tuple[str, ...] = ()) -> StagePlace:
    return StagePlace(stage, stages, 1, tuple((name, ()) for name in layers), tied, scheduled=False)


def check(*places: StagePlace) -> None:
    check_pipeline(map(stage_told, places))


def test_a_pipeline_with_tied_ends_and_copies_of_stages() -> None:
    check(
        place(0, 2, "embed", "0", tied=("embed",)),
        place(0, 2, "embed", "0", tied=("embed",)),
        place(1, 2, "embed", tied=("embed",)),
    )


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place(0, 2, "0"), place(1, 3, "1")], "pipelines of different lengths"),
        ([place(0, 4, "0"), place(3, 4, "3")], r"none is stage 1\.\.2 of 4: a rank that has several stages"),
        ([place(0, 2, "embed", "0", tied=("embed",)), place(1, 2, "0")], "stages 0 and 1 both have 0, so that one"),
    ],
    ids=["lengths", "a stage without a rank", "layers named from the first in each stage"],
)
def test_any_other_one_is_refused_at_the_start(places: list[StagePlace], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check(*places)


def test_a_job_without_stages_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match="on_lost_stage is for pipelines"):
        stage_state(None)


def split(*stages: str) -> list[StagePlace]:
    """A letter for each layer: ``e`` and ``h`` for what only the ends have, ``b`` for a block."""
    shapes = {"e": (("weight", (100, 8)),), "b": (("weight", (8, 8)),), "w": (("weight", (8, 16)),), "h": ()}
    return [
        StagePlace(at, len(stages), 1, tuple((f"{at}.{i}", shapes[kind]) for i, kind in enumerate(kinds)), (), False)
        for at, kinds in enumerate(stages)
    ]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["ebb", "bb", "bb", "bbh"], None),
        (["eb", "bb", "bb", "bbh"], "stage 1 could not be made from stage 0 if it were lost: they have 2 and 1 layers"),
        (["ebb", "bb", "b", "bh"], "stage 1 could not be made from stage 2 if it were lost: they have 2 and 1 layers"),
        (
            ["eb", "b", "w", "wh"],
            "stage 1 could not be made from stage 2 .* layers of other shapes; only stages",
        ),
        (["ebb", "bh"], None),
    ],
)
def test_a_split_of_which_no_stage_is_an_average_is_told(stages: list[str], said: str | None) -> None:
    found = not_to_be_averaged(map(stage_told, split(*stages)))
    assert found is None if said is None else found is not None and re.match(said, found), found
