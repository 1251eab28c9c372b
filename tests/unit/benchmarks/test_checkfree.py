"""The checkfree benchmark: its trace, its trainings and its cost model are what they say, and it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.checkfree import report
from benchmarks.checkfree.cost import CostModel, in_place, redundant, rolled_back, steps_to
from benchmarks.checkfree.experiment import MODELS, Part, Run, parts, run_parts, single_parts, trace_of
from benchmarks.checkfree.mending import ENDS_KEPT, STRATEGIES, mend, recorded_error
from benchmarks.checkfree.one_failure import SMOOTHED, aftermaths
from benchmarks.checkfree.pipeline import STAGES, Pipeline
from benchmarks.checkfree.report import results
from benchmarks.checkfree.trace import Trace, hard_trace, plain_trace

TINY = replace(MODELS["tiny"], seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkfree")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[dict[str, Any]]:
    """The quick form's, each training once."""
    found = folder / "lines.jsonl"
    assert main(["checkfree", "--quick", "--json", "--lines", str(found)]) == 0
    return [json.loads(line) for line in found.read_text("utf-8").splitlines()]


def named(lines: list[dict[str, Any]], strategy: str, rate: str) -> dict[str, Any]:
    (found,) = (line for line in lines if line["key"]["strategy"]["name"] == strategy and line["key"]["rate"] == rate)
    return found


# The trace.


def test_a_higher_rate_loses_what_a_lower_one_loses_and_never_two_in_a_row() -> None:
    traces = [plain_trace(rate, seed=3, steps=300, stages=6) for rate in ("5%", "10%", "16%")]
    assert traces[0].before(12_000) < traces[1].before(12_000) < traces[2].before(12_000)
    assert traces[0].lost.keys() <= traces[1].lost.keys() <= traces[2].lost.keys()
    assert all(b - a > 1 for each in traces for lost in each.lost.values() for a, b in pairwise(lost))
    assert traces[0].before(12_000) == pytest.approx(12_000 * 6 * 0.0009, rel=0.3)


def test_the_hard_trace_loses_both_ends_and_pairs_in_turns() -> None:
    lost = list(hard_trace("16%", seed=3, steps=300, stages=6).lost.values())
    assert set(lost[::2]) == {(0, 5)}
    assert all(b - a == 1 for a, b in lost[1::2])


# The pipeline.


def test_a_fork_goes_on_bit_for_bit() -> None:
    run = Run(Part(TINY, STRATEGIES["none"], trace_of(TINY, "-")))
    run.train(10)
    fork = run.fork()
    run.train(13)
    later = run.pipeline.whole()
    again = Run(run.part, run.pipeline, fork)
    again.train(13)
    assert all(
        np.array_equal(one, two)
        for name in later
        for one, two in zip(later[name], again.pipeline.whole()[name], strict=True)
    )
    assert again.training == run.training


def test_swaps_change_the_order_of_every_other_micro_batch_alone() -> None:
    plain, swapped = Pipeline(TINY), Pipeline(TINY, swaps=True)
    assert plain.validation_loss() == swapped.validation_loss(), "stages in order"
    assert plain.step() != swapped.step()
    one, two = Pipeline(replace(TINY, micro_batches=1)), Pipeline(replace(TINY, micro_batches=1), swaps=True)
    assert one.step() == two.step(), "the first micro-batch is not swapped"


def test_the_norms_are_of_what_the_stages_were_given() -> None:
    pipeline = Pipeline(replace(TINY, clip=1e9))
    pipeline.step()
    for stage, layers in enumerate(pipeline.stages):
        gradients = [each.grad.double() for each in layers.parameters() if each.grad is not None]
        wanted = float(sum((each * each).sum() for each in gradients)) ** 0.5
        assert pipeline.norms[stage] == pytest.approx(wanted, rel=1e-5)


# Making a stage anew.


def mended(strategy: str, *lost: int, steps: int = 12) -> tuple[Pipeline, Pipeline]:
    """A pipeline that has lost stages, as it was and as it was made anew."""
    pair = []
    for _ in range(2):
        run = Run(Part(TINY, STRATEGIES[strategy], Trace("-", {})))
        run.train(steps)
        pair.append((run.pipeline, run.bases))
    mend(pair[1][0], STRATEGIES[strategy], lost, pair[1][1])
    return pair[0][0], pair[1][0]


def test_checkfree_averages_by_the_squares_of_the_norms_and_begins_the_moments_anew() -> None:
    before, after = mended("checkfree", 2)
    one, two = (float(before.norms[at] or 0) ** 2 for at in (1, 3))
    for name, (value, _, _, steps) in after.stage(2).items():
        wanted = (one * before.stage(1)[name][0] + two * before.stage(3)[name][0]) / (one + two)
        assert np.allclose(value, wanted, rtol=1e-5, atol=1e-7)
        assert steps == 0
    assert after.raised_at == {2: 12}
    after.step()
    rates = [group["lr"] for group in after.optimizer.param_groups]
    assert rates[2] == pytest.approx(1.1 * rates[1]) and rates[0] == rates[1]


def test_moments_are_averaged_if_asked_for() -> None:
    before, after = mended("moments", 2)
    for name, (_, first, second, steps) in after.stage(2).items():
        assert steps == 12
        for own, at in ((first, 1), (second, 2)):
            low, high = (np.minimum, np.maximum)
            pair = before.stage(1)[name][at], before.stage(3)[name][at]
            assert np.all(own >= low(*pair) - 1e-6) and np.all(own <= high(*pair) + 1e-6)


def test_roll_back_gives_back_the_base_and_touches_no_survivor() -> None:
    before, after = mended("roll-back", 0, 1, 5)
    run = Run(Part(TINY, STRATEGIES["none"], Trace("-", {})))
    run.train(8)
    for at in range(STAGES):
        wanted = run.pipeline.stage(at) if at in (0, 1, 5) else before.stage(at)
        for name, held in after.stage(at).items():
            assert all(np.array_equal(one, two) for one, two in zip(held, wanted[name], strict=True))


def test_what_is_fitted_to_recorded_activations_gives_them_back_better() -> None:
    errors = {name: recorded_error(mended(name, 2)[1], 2).item() for name in ("checkfree", "fitted", "distilled")}
    assert errors["fitted"] < 1.01 * errors["checkfree"], "but for the grid of mixes that are tried"
    assert errors["distilled"] < 0.9 * errors["checkfree"]


# The lines.


def test_every_part_is_run_once_and_taken_from_the_lines_afterwards(
    lines: list[dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [*single_parts("tiny", [1]), *parts("tiny", [1], rates=["10%"])]
    assert len(lines) == len(chosen) == len({json.dumps(line["key"]) for line in lines})
    told: list[str] = []
    assert list(run_parts(chosen, folder / "lines.jsonl", progress=told.append)) == lines
    assert told == []


def test_a_training_that_lost_nothing_yet_is_the_undisturbed_one(lines: list[dict[str, Any]]) -> None:
    alone, struck = named(lines, "none", "-"), named(lines, "checkfree", "10%")
    first = struck["mended"][0]["step"]
    same = [each for each in struck["validation"] if each[0] < first]
    assert same == [each for each in alone["validation"] if each[0] < first]
    assert struck["validation"][-1] != alone["validation"][-1]


def test_one_failure_is_compared_with_the_training_beside_it(lines: list[dict[str, Any]]) -> None:
    found = {(each.strategy, each.lost): each for each in aftermaths(lines)}
    assert ("checkfree", "stage 0") not in found and ("checkfree+", "stage 0") in found
    assert {strategy for strategy, lost in found if lost == "stage 2 and 3"} == {"roll-back", "roll-back+movement"}
    undisturbed, lost = named(lines, "none", "nothing at 20"), named(lines, "random", "stage 2 at 20")
    gap = lost["validation"][0][1] - undisturbed["validation"][0][1]
    assert found["random", "stage 2"].gaps[0] == pytest.approx(gap)
    trained = lost["training"][0] - undisturbed["training"][0]
    assert found["random", "stage 2"].trained == [pytest.approx(trained)]


def test_what_is_spared_the_ends_has_as_many_failures_as_the_averages(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace("-", {3: (0,), 5: (0, 3), 7: (1, 4), 9: (5,)})
    assert trace.struck(ENDS_KEPT.struck).lost == {5: (3,), 7: (1, 4)}
    assert trace.struck(STRATEGIES["checkfree"].struck) == trace.struck(ENDS_KEPT.struck)
    assert trace.struck(STRATEGIES["roll-back"].struck) == trace
    assert "roll-back, ends kept" in {part.strategy.name for part in parts("3M", [1], rates=["10%"])}
    monkeypatch.setattr(report, "plain_trace", lambda rate, **_: replace(trace, rate=rate))
    failures = {each.strategy: each.failures for each in results(lines) if each.derived}
    assert failures["full roll-back, 10, ends kept"] == 3 and failures["full roll-back, 10"] == 6
    assert failures["redundant"] == 6


def test_the_training_loss_is_that_of_the_last_steps(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LAST", 2 * SMOOTHED)
    alone = {**named(lines, "none", "-"), "training": [3.0, 2.0, 1.0]}
    mine = {**named(lines, "checkfree", "10%"), "training": [9.0, 2.5, 1.75]}
    found = {each.strategy: each for each in results([alone, mine]) if not each.derived}
    assert (found["none"].trained, found["none"].trained_above) == (1.5, 0.0)
    assert (found["checkfree"].trained, found["checkfree"].trained_above) == (2.125, 0.625)


def test_tables_and_a_plot_come_of_the_lines(
    lines: list[dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["checkfree", "--only-lines", "--lines", str(folder / "lines.jsonl")]
    assert main([*again, "--markdown", "--plot", str(folder / "plot.svg")]) == 0
    shown = capsys.readouterr().out
    assert "lost: stage 2;" in shown and "| full roll-back, 10 (derived) |" in shown
    assert ElementTree.parse(folder / "plot.svg").getroot().tag.endswith("svg")
    assert main(again) == 0
    assert main(["checkfree", "--only-lines", "--lines", str(folder / "none.jsonl")]) == 2
    (folder / "other.jsonl").write_text('{"figure": "other"}\n')
    assert main(["checkfree", "--only-lines", "--lines", str(folder / "other.jsonl")]) == 2


# The cost model.


def test_the_cost_model_is_what_it_says() -> None:
    cost = CostModel()
    assert cost.iteration_s == pytest.approx(68.4, abs=0.1)
    assert cost.state_s == pytest.approx(16.0) and cost.neighbours_s(2) == pytest.approx(10.7, abs=0.1)
    curve = [(100, 3.0), (200, 2.0)]
    assert redundant(curve, cost)[0] == (pytest.approx(100 * cost.iteration_s * 4 / 3 / 3600), 3.0)
    plain, late = in_place(curve, [], cost), in_place(curve, [(150, 36.0)], cost)
    assert late[0] == plain[0] and late[1][0] - plain[1][0] == pytest.approx(0.01)


def test_a_full_roll_back_trains_again_what_it_lost() -> None:
    cost, curve = CostModel(), [(10, 3.0), (20, 2.0)]
    trace = Trace("-", {15: (1,), 25: (2,)})
    by_iterations, by_hours = rolled_back(curve, trace, 10, 20, 100, cost)
    assert by_iterations == [(10, 3.0), (25, 2.0)]
    assert by_hours[1][0] == pytest.approx((25 * cost.iteration_s + cost.state_s) / 3600)
    assert rolled_back(curve, Trace("-", dict.fromkeys(range(5, 100, 5), (1,))), 10, 20, 100, cost)[0] == []


def test_a_target_is_reached_between_two_points() -> None:
    curve = [(0, 4.0), (10, 3.0), (20, 3.5), (30, 2.0)]
    assert steps_to(curve, 3.5) == 5
    assert steps_to(curve, 2.5) == pytest.approx(20 + 10 * 1.0 / 1.5)
    assert steps_to(curve, 5.0) == 0 and steps_to(curve, 1.0) is None
