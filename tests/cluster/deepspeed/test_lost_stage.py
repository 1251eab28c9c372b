"""Pipelines of 4 and 6 stages that lose stages with every copy of them, on real engines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.cluster.deepspeed.test_provider import LAUNCH_SECONDS_MAX, Results, holds
from tests.forks import Forks, tail

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

FOUR_STAGES = ("zero1-bf16", "zero0-fp32", "refusals", "older-base", "tied", "tied-older", "tied-partitions", "copies")
SIX_STAGES = ("six-stages",)


def launch(forks: Forks, directory: Path, checks: tuple[str, ...], ranks: int) -> Results:
    log, program = directory / "log", "tests.cluster.deepspeed.lost_stage"
    codes = forks.run(program, directory, *checks, ranks=ranks, log=log, deadline_s=LAUNCH_SECONDS_MAX)
    files = [directory / f"r{rank}.json" for rank in range(ranks)]
    ending = [f"the launch ended with {codes}:\n{tail(log)}"] if any(codes) else []
    if not all(file.exists() for file in files):
        pytest.fail("\n".join(["before its first check", *ending]))
    return Results([json.loads(file.read_text()) for file in files], ending)


@pytest.fixture(scope="module")
def of_four(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("four"), FOUR_STAGES, 4)


@pytest.fixture(scope="module")
def of_six(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(forks, tmp_path_factory.mktemp("six"), SIX_STAGES, 6)


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 30)
@pytest.mark.parametrize("check", FOUR_STAGES)
def test_a_pipeline_of_four_stages(of_four: Results, check: str) -> None:
    holds(of_four, check)


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 30)
@pytest.mark.parametrize("check", SIX_STAGES)
def test_a_pipeline_of_six_stages(of_six: Results, check: str) -> None:
    holds(of_six, check)
