"""Pipelines of 4 and 6 stages that lose stages with every copy of them, on real engines."""

from __future__ import annotations

import pytest

from tests.cluster.deepspeed.launches import MARKS, Results, holds, launch
from tests.forks import Forks

pytestmark = MARKS

FOUR_STAGES = ("zero1-bf16", "zero0-fp32", "refusals", "older-base", "tied", "tied-older", "tied-partitions", "copies")
SIX_STAGES = ("six-stages",)


@pytest.fixture(scope="module")
def of_four(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("four"), "lost_stage", *FOUR_STAGES, ranks=4)


@pytest.fixture(scope="module")
def of_six(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("six"), "lost_stage", *SIX_STAGES, ranks=6)


@pytest.mark.parametrize("check", FOUR_STAGES)
def test_a_pipeline_of_four_stages(of_four: Results, check: str) -> None:
    holds(of_four, check)


@pytest.mark.parametrize("check", SIX_STAGES)
def test_a_pipeline_of_six_stages(of_six: Results, check: str) -> None:
    holds(of_six, check)
