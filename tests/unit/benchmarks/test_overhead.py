"""What saving costs the step, on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.overhead import jobs
from benchmarks.overhead.matrix import Block, BlockPair, Cell, cells_of, figures_of, seconds_of


def test_each_number_of_tensors_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "tensors.*", "--elements", "400", "--tensors", "20", "--pairs", "5"]
    assert main(["overhead", "--json", *options]) == 0
    machine, line = map(json.loads, capsys.readouterr().out.splitlines())
    assert machine["figure"] == "machine"
    assert (line["figure"], line["tensors"], line["bytes"], line["goal"]) == ("stall.tensors.20/10", 20, 1600, "<= 3")
    assert line["value"] > 0


def test_a_job_is_told_apart_into_its_stall_and_what_the_mover_does_to_it() -> None:
    saving = Block((1.3, 1.1), 2.2, 0.5, 0.25, stalls=(0.1, 0.1), other_stall=0.1, captured=80)
    pairs = [BlockPair(saving, Block((1.0,), 1.0, 0.0, 0.0), 0.05)] * 2
    (step, found), (stall, held) = figures_of(Cell("40M", "exact", "shm+durable"), pairs)
    assert (step.name, step.goal, stall.name, stall.goal) == (
        "step.40M.exact.shm+durable",
        1.02,
        "stall.40M.exact.shm+durable",
        1.6,
    )
    assert (found.summary.value, found.summary.ceiling, found.summary.ratio) == pytest.approx((1.2, 1.0, 1.2))
    assert found.details["stall_s"] == pytest.approx(0.15)
    assert found.details["interference_s"] == pytest.approx(0.05)
    assert found.details["more_cpu_s"] == pytest.approx(0.1)
    assert found.details["waiting_s"] == pytest.approx(0.1)
    assert found.details["threads_cpu_s"] == pytest.approx(0.25)
    assert found.details["captured_bytes"] == 40
    assert held.summary.ratio == pytest.approx(2.0)


def test_a_job_that_saves_nothing_has_no_stall_and_no_goal() -> None:
    pairs = [BlockPair(Block((1.0,), 1.0, 0.0, 0.0), Block((1.0,), 1.0, 0.0, 0.0), 0.05)]
    ((figure, found),) = figures_of(Cell("40M", "outside", "disk"), pairs)
    assert (figure.goal, found.summary.ratio, found.summary.spread) == (None, 1.0, (1.0, 1.0))


def test_the_jobs_share_the_time_by_how_long_their_steps_are() -> None:
    cells = cells_of(("demo", "40M", "127M"))
    shares = seconds_of(cells, 540.0)
    assert sum(shares.values()) == pytest.approx(540.0)
    assert shares[Cell("demo", "exact", "shm")] < shares[Cell("40M", "outside", "disk")]
    assert shares[Cell("40M", "exact", "shm")] < shares[Cell("127M", "folded", "shm+peer")]


def test_a_job_for_which_there_is_too_little_memory_is_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(jobs.STATES_HELD, "shm", 1 << 60)
    assert main(["overhead", "--json", "--quick", "--only", "quick.exact.shm"]) == 0
    _, skipped = map(json.loads, capsys.readouterr().out.splitlines())
    assert "of memory" in skipped["skipped"]


def test_a_job_that_fails_keeps_no_other_from_being_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing")
    assert main(["overhead", "--json", "--quick", "--directory", missing, "--only", "quick.exact.shm"]) == 1
    _, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert "missing" in failed["failed"]


def test_without_a_gpu_a_job_on_one_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["overhead", "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err
    assert main(["overhead", "--device", "cuda", "--list"]) == 0
    assert "cuda.step.torch.1B.nf4" in capsys.readouterr().out.split()
