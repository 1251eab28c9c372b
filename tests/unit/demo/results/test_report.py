"""What the demo concludes: each claim is made exactly where the progress of the two runs supports it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tiercheck.demo.failure import LAST_STEPS_SPARED, Failure, FailurePlan, plan_failure
from tiercheck.demo.results.compare import Interrupted, compare, mean_losses
from tiercheck.demo.results.plot import plot_losses
from tiercheck.demo.results.recovery_view import availability_table, count_sources, plan_table, version_ranges
from tiercheck.demo.results.report import DemoResult, render
from tiercheck.demo.settings import TrainingSettings
from tiercheck.demo.training.model import GPT
from tiercheck.demo.training.model_size import parameter_count
from tiercheck.demo.training.progress import ProgressError, ProgressWriter, RankProgress, Step, read_progress
from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.types import bytes_text

STEPS = 12
SETTINGS = TrainingSettings(steps=STEPS, seed=3, base_every=4, batch=2)
PLAN = FailurePlan(version=9, fraction=0.5, nodes_lost=())
SOURCES = [
    {"object": "r00000/g000001/base/000000000008.safetensors", "tier": "shm"},
    {"object": "r00000/g000001/differential/000000000009-000000000009.safetensors", "tier": "shm"},
]
RECOVERY: dict[str, Any] = {
    "generation": 1,
    "anchor": 8,
    "version": 9,
    "replayed": 1,
    "sources": SOURCES,
    "matrix": [
        {"ranks": [[0, 0]], "tier": "shm", "anchor": True, "differentials": [[9, 9]]},
        {"ranks": [[1, 1]], "tier": "shm", "anchor": False, "differentials": []},
        {"ranks": [[0, 0]], "tier": "nvme", "anchor": True, "differentials": []},
        {"ranks": [[1, 1]], "tier": "nvme", "anchor": True, "differentials": [[9, 9]]},
    ],
    "fidelity": "exact",
    "notes": [],
    "seconds": 0.25,
}


def steps_of(rank: int, versions: range, *, seconds: float = 0.1) -> list[Step]:
    return [Step(v, (5.5 - v / 7 + rank / 3).hex(), seconds, 0.001 * (v - versions[0] + 1)) for v in versions]


def life(rank: int, versions: range, *, seconds: float = 0.1, finished: bool = True) -> RankProgress:
    return RankProgress(
        started={"rank": rank, "parameters": 1000, "corpus": "abc", "version": versions[0] - 1},
        recovered=RECOVERY if versions[0] > 1 else {},
        steps=steps_of(rank, versions, seconds=seconds),
        finished={"digest": {"masters": f"m{rank}"}, "drain_s": 0.5} if finished else {},
    )


def runs() -> tuple[list[RankProgress], Interrupted]:
    reference = [life(rank, range(1, STEPS + 1)) for rank in range(2)]
    first = [life(rank, range(1, 10), seconds=0.11, finished=False) for rank in range(2)]
    second = [life(rank, range(10, STEPS + 1), seconds=0.11) for rank in range(2)]
    return reference, Interrupted(first, second, 8.0, {"shm": 3 << 20, "nvme": 1 << 20}, {"shm": 40_000})


def compared(reference: list[RankProgress], interrupted: Interrupted) -> DemoResult:
    return compare(Failure.SOFTWARE, SETTINGS, PLAN, reference, interrupted, plot=Path("losses.png"))


def test_two_equal_runs() -> None:
    result = compared(*runs())
    assert result.loss_bit_identical
    assert result.params_bit_identical
    assert result.promise_kept
    assert (result.failed_at, result.resumed_at, result.anchor, result.replayed, result.steps_lost) == (9, 9, 8, 1, 0)
    assert result.sources == {"shm": 4}
    assert result.bytes_per_parameter == {"shm": 40.0}
    assert result.overhead == pytest.approx(0.1)
    assert result.stall_share == pytest.approx((0.009 + 0.003) / (12 * 0.11))
    assert result.stall_step_s == pytest.approx(0.001)
    assert result.rerun_s == pytest.approx(0.11)
    assert list(result.losses) == list(range(1, STEPS + 1))
    assert json.loads(json.dumps(result.to_object()))["seed"] == 3


@given(st.integers(0, 1), st.integers(0, STEPS - 1))
def test_one_bit_of_one_loss_of_one_rank_is_found(rank: int, index: int) -> None:
    reference, interrupted = runs()
    lives = interrupted.first if index < 9 else interrupted.second
    steps = lives[rank].steps
    place = index if index < 9 else index - 9
    value = steps[place].loss
    digit = value.index("p") - 1
    steps[place] = replace(steps[place], loss=value[:digit] + f"{int(value[digit], 16) ^ 1:x}" + value[digit + 1 :])
    result = compared(reference, interrupted)
    assert not result.loss_bit_identical
    assert result.first_difference == index + 1
    assert not result.promise_kept


def test_a_state_that_differs_on_one_rank_is_found() -> None:
    reference, interrupted = runs()
    interrupted.second[1].finished = {"digest": {"masters": "other"}, "drain_s": 0.5}
    result = compared(reference, interrupted)
    assert result.loss_bit_identical
    assert not result.params_bit_identical
    assert not result.promise_kept
    assert "the final states differ" in text_of(result)
    assert replace(result, fidelity="approximate").promise_kept


def on_other_ranks() -> tuple[list[RankProgress], Interrupted]:
    """Three ranks go on with what two have trained, at losses of their own."""
    reference, interrupted = runs()
    second = [life(rank, range(10, STEPS + 1), seconds=0.11) for rank in (3, 4, 5)]
    for each in (*reference, *second):
        each.state = {"version": 9, "digest": {"masters": "whole"}}
    return reference, replace(interrupted, second=second)


def test_other_ranks_are_compared_at_the_version_that_they_resume() -> None:
    result = compared(*on_other_ranks())
    assert (result.ranks, result.resumed_on, result.resumed_at) == (2, 3, 9)
    assert result.loss_bit_identical and result.params_bit_identical and result.promise_kept
    assert list(result.losses) == list(range(1, STEPS + 1))
    text = text_of(result)
    assert "version 9, on 3 ranks" in text
    assert "What 3 ranks resumed at step 9 is what 2 ranks had there without a failure, to the last bit" in text


@pytest.mark.parametrize(
    "state", [{}, {"version": 8, "digest": {"masters": "whole"}}, {"version": 9, "digest": {"masters": "other"}}]
)
def test_one_rank_that_resumes_another_state_is_found(state: dict[str, Any]) -> None:
    reference, interrupted = on_other_ranks()
    interrupted.second[2].state = state
    result = compared(reference, interrupted)
    assert not result.params_bit_identical
    assert not result.promise_kept
    assert "the resumed states differ" in text_of(result)


def of_a_lost_stage() -> tuple[TrainingSettings, list[RankProgress], Interrupted]:
    """Stage 1 of three is made anew; its losses are not what they would have been."""
    settings = replace(SETTINGS, ranks=3, stages=3, layers=3, on_lost_stage="neighbours")
    made = {**RECOVERY, "fidelity": "approximate", "notes": ["stage 1 of 3 is made anew"]}
    reference, first, second = (
        [life(0, versions, finished=done) for _ in range(3)]
        for versions, done in ((range(1, STEPS + 1), True), (range(1, 10), False), (range(10, STEPS + 1), True))
    )
    for stage, (without, own) in enumerate(zip(reference, second, strict=True)):
        own.recovered = made
        without.state = {"version": 9, "digest": {"masters": f"m{stage}"}}
        own.state = {"version": 9, "digest": {"masters": "made" if stage == 1 else f"m{stage}"}}
        own.finished = {"digest": {"masters": "other"}, "drain_s": 0.5}
        own.steps = [replace(step, loss=(step.loss_value + 0.25).hex()) for step in own.steps]
    return settings, reference, Interrupted(first, second, 8.0, {}, {})


def compared_stages(settings: TrainingSettings, reference: list[RankProgress], interrupted: Interrupted) -> DemoResult:
    plan = FailurePlan(version=9, fraction=0.5, nodes_lost=(1,), stage_lost=1)
    return compare(Failure.STAGE, settings, plan, reference, interrupted, plot=Path("losses.png"))


def test_a_lost_stage_is_reported_with_what_it_was_made_of_and_the_losses_beside_those_without() -> None:
    result = compared_stages(*of_a_lost_stage())
    assert result.survivors_bit_identical and result.promise_kept
    assert not result.loss_bit_identical and not result.params_bit_identical
    assert result.uninterrupted_losses[10] == pytest.approx(result.losses[10] - 0.25)
    text = text_of(result)
    assert "every copy of stage 1 of 3" in text
    assert "have every bit of version 9" in text
    assert "stage 1 of 3 is made anew" in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["10"])
    assert row[-1] == "+0.250"


@pytest.mark.parametrize("state", [{}, {"version": 9, "digest": {"masters": "other"}}])
def test_a_stage_that_was_not_lost_and_differs_is_a_broken_promise(state: dict[str, Any]) -> None:
    settings, reference, interrupted = of_a_lost_stage()
    interrupted.second[2].state = state
    result = compared_stages(settings, reference, interrupted)
    assert result.survivors_bit_identical is False
    assert not result.promise_kept
    assert "are NOT what they were at version 9" in text_of(result)
    assert "stages that were not lost differ" in text_of(result)


def test_steps_trained_again_are_lost_steps_and_are_compared_too() -> None:
    reference, interrupted = runs()
    second = [life(rank, range(8, STEPS + 1)) for rank in range(2)]
    result = compared(reference, replace(interrupted, second=second))
    assert (result.resumed_at, result.steps_lost) == (7, 2)
    assert result.loss_bit_identical


def test_a_version_that_was_saved_but_not_reported_is_no_loss() -> None:
    reference, interrupted = runs()
    interrupted.first[1].steps.pop()
    result = compared(reference, interrupted)
    assert (result.failed_at, result.resumed_at, result.steps_lost) == (8, 9, 0)
    assert 9 not in result.losses


def test_ranks_that_start_from_different_bases_meet_at_one_version() -> None:
    reference, interrupted = runs()
    interrupted.second[1].recovered = {**RECOVERY, "anchor": 4, "replayed": 5}
    result = compared(reference, interrupted)
    assert (result.resumed_at, result.anchor, result.replayed) == (9, 4, 5)


def test_runs_that_cannot_be_compared_are_refused() -> None:
    reference, interrupted = runs()
    interrupted.second[1].started = {**interrupted.second[1].started, "version": 8}
    with pytest.raises(RecoveryError, match="resumed at: 9, 8"):
        compared(reference, interrupted)
    reference, interrupted = runs()
    interrupted.first[0].started = {**interrupted.first[0].started, "corpus": "changed"}
    with pytest.raises(RecoveryError, match="corpus"):
        compared(reference, interrupted)
    reference, interrupted = runs()
    del interrupted.second[0].steps[1]
    with pytest.raises(RecoveryError, match=r"\[10, 12\], not \[10, 11, 12\]"):
        compared(reference, interrupted)


def text_of(result: DemoResult) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(render(result))
    return capture.get()


def test_the_report_says_what_the_result_holds() -> None:
    text = text_of(compared(*runs()))
    for expected in ("9 of 12 (seed 3)", "version 8", "4 from shm", "identical to the last bit", "shm 3.0 MiB"):
        assert expected in text
    assert "noise" not in text
    noisy = text_of(replace(compared(*runs()), overhead=-0.02))
    assert "-2.0%; below zero: the machine's noise exceeds the cost" in noisy


def test_the_plot_is_a_picture_of_both_curves(tmp_path: Path) -> None:
    reference, interrupted = runs()
    result = compared(reference, interrupted)
    path = tmp_path / "losses.png"
    truth = mean_losses([rank.steps for rank in reference])
    plot_losses(path, result, uninterrupted=truth, before_failure=mean_losses([r.steps for r in interrupted.first]))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 20_000
    plot_losses(path, replace(result, losses={}), uninterrupted=truth, before_failure={})
    assert path.read_bytes() != content


def printed(table: object) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_matrix_and_the_plan_show_what_is_missing() -> None:
    matrix = printed(availability_table(RECOVERY)).splitlines()
    assert any("rank 0" in line and "base 8 + differentials 9" in line for line in matrix)
    assert any("rank 1" in line and "nothing" in line for line in matrix)
    plan = printed(plan_table([RECOVERY, {**RECOVERY, "sources": SOURCES[:1]}])).splitlines()
    assert sum("base 8" in line for line in plan) == 2
    assert sum("differentials 9" in line for line in plan) == 1
    assert count_sources([RECOVERY, RECOVERY]) == {"shm": 4}
    with pytest.raises(ValueError, match="none"):
        plan_table([{**RECOVERY, "sources": [{"object": "job/lineage/g000001", "tier": "shm"}]}])


@given(st.sets(st.integers(0, 40)))
def test_version_ranges_name_every_version_once(versions: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, version_ranges(versions).split(", ")):
        low, _, high = part.partition("-")
        named += range(int(low), int(high or low) + 1)
    assert named == sorted(versions)


@given(seed=st.integers(0, 2**31 - 1), kind=st.sampled_from(list(Failure)))
def test_the_failure_is_a_function_of_the_seed_and_in_the_window(seed: int, kind: Failure) -> None:
    settings = replace(SETTINGS, seed=seed)
    if kind is Failure.STAGE:
        settings = replace(settings, ranks=4, stages=4, layers=4)
    plan = plan_failure(kind, settings)
    assert plan == plan_failure(kind, settings)
    assert settings.base_every + settings.batch < plan.version <= STEPS - LAST_STEPS_SPARED
    assert 0 <= plan.fraction < 1
    assert len(plan.nodes_lost) == {Failure.SOFTWARE: 0, Failure.RACK: 2}.get(kind, 1)


def test_seeds_reach_the_whole_window_and_both_nodes() -> None:
    plans = [plan_failure(Failure.NODE, replace(SETTINGS, seed=seed)) for seed in range(200)]
    assert {plan.version for plan in plans} == {7, 8, 9}
    assert {plan.nodes_lost for plan in plans} == {(0,), (1,)}
    with pytest.raises(ConfigurationError, match="use at least 10 steps"):
        plan_failure(Failure.SOFTWARE, replace(SETTINGS, steps=9))


def test_settings_travel_unchanged_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    settings = replace(SETTINGS, tiers=("shm://a", "nvme:///b"), text="/c")
    settings.save(path)
    assert TrainingSettings.load(path) == settings
    path.write_text(path.read_text().replace('"dropout"', '"dropouts"'))
    with pytest.raises(ConfigurationError, match="dropouts"):
        TrainingSettings.load(path)
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match="lacks"):
        TrainingSettings.load(path)
    for wrong in ({"zero": 4}, {"dtype": "fp64"}, {"heads": 7}, {"dropout": 1.0}, {"seed": -1}, {"steps": 0}):
        with pytest.raises(ConfigurationError):
            replace(SETTINGS, **wrong)


def test_progress_counts_only_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    assert read_progress(path) == RankProgress()
    with ProgressWriter(path) as writer:
        writer.write("started", rank=0, version=4)
        writer.step(5, 0.1, 0.2, 0.0)
        assert read_progress(path).version == 5, "a line is there before the writer goes on"
        writer.write("finished", digest={}, drain_s=1.0)
    content = path.read_bytes()
    whole = read_progress(path)
    assert whole.steps == [Step(5, (0.1).hex(), 0.2, 0.0)]
    assert whole.steps[0].loss_value == 0.1
    for length in range(len(content)):
        path.write_bytes(content[:length])
        torn = read_progress(path)
        assert bool(torn.started) + len(torn.steps) + bool(torn.finished) == content[:length].count(b"\n")
    path.write_bytes(b'{"record": "nonsense"}\n')
    with pytest.raises(ProgressError, match="line 1"):
        read_progress(path)
    with pytest.raises(FileExistsError):
        ProgressWriter(path)


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_bytes_are_told_in_units(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_the_parameter_count_is_the_models() -> None:
    model = GPT(width=24, layers=3, heads=2, sequence=10, dropout=0.0)
    count = parameter_count(width=24, layers=3, sequence=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    full = TrainingSettings(steps=1, seed=0)
    assert 5e6 < parameter_count(width=full.width, layers=full.layers, sequence=64) < 10e6


def test_a_stage_that_is_lost_is_an_inner_one_and_may_leave_an_older_base() -> None:
    settings = replace(SETTINGS, steps=30, ranks=5, stages=5, on_lost_stage="neighbours")
    plans = [plan_failure(Failure.STAGE, replace(settings, seed=seed)) for seed in range(100)]
    assert {plan.stage_lost for plan in plans} == {1, 2, 3}
    assert all(plan.nodes_lost == (plan.stage_lost,) for plan in plans)
    assert {plan.bases_kept_until for plan in plans} == {-1}, "no base of the stage is left"
    for method in ("older-base", "older-base-or-neighbours"):
        plan = plan_failure(Failure.STAGE, replace(settings, on_lost_stage=method))
        assert plan.bases_kept_until == plan.version - 5
    with pytest.raises(ConfigurationError, match="only a pipeline can lose a stage"):
        plan_failure(Failure.STAGE, SETTINGS)
