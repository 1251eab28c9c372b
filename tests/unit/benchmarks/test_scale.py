"""What each step costs one rank does not grow with the job, but for what rank 0 does for all."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.scale.command import Cost, costs

ON_OTHERS = "a start on other ranks: whom to read", "a rank"


def by_step(world: int) -> dict[tuple[str, str], Cost]:
    return {(cost.step, cost.who): cost for cost in costs(world)}


def test_no_step_costs_a_rank_more_in_a_larger_job() -> None:
    few, many = by_step(10), by_step(700)
    assert few.keys() == many.keys()
    for name, cost in few.items():
        if name not in {("a commit", "rank 0"), ON_OTHERS}:
            assert many[name].requests == cost.requests, name
            assert many[name].in_turn == cost.in_turn, name
    commit = many["a commit", "rank 0"]
    assert commit.requests == 2 * 700 + 3
    assert commit.in_turn <= 2 * 6 + 4
    looked = many["a recovery: the survey", "a rank"]
    assert 0 < looked.told_bytes < 1024
    assert looked.in_turn <= 4
    converted = many[ON_OTHERS]
    assert converted.told_bytes < 1024
    assert converted.requests <= 32, "of the few that saved what it wants"
    assert converted.in_turn <= 12


def test_a_commit_at_4096_ranks_follows_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--json", "--worlds", "64"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (commit,) = [line for line in lines if line["step"] == "a commit"]
    assert (commit["requests"], commit["in_turn"], commit["counted"]) == (2 * 64 + 3, 2 + 3, True)
    assert 2 * 4096 / 128 + 3 <= 70, "so many round trips at 4,096 ranks"
