"""What the comparison with other libraries concludes from what the jobs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.peers import job
from benchmarks.peers.job import Order
from benchmarks.peers.results import StepCost, VersionCost, back_s, results_of

ORDER = Order("dcp", "/nowhere", 10**9, (2, 4), blocks=2, block=4)
ALONE = [{"first": True, "durable_s": 3.0, "bytes": 10**9}, {"first": False, "durable_s": 0.5, "bytes": 10**8}]


def block(every: int, step: float, saved: float) -> dict[str, Any]:
    taken = [(saved if number % every == 0 else step, number % every == 0) for number in range(4)]
    return {"every": every, "plain": [step] * 4, "saving": taken}


def test_each_interval_is_judged_by_its_own_blocks_and_a_version_once() -> None:
    blocks = [block(2, 1.0, 1.5), block(2, 2.0, 2.5), block(4, 1.0, 3.0), block(4, 1.0, 3.0)]
    again = [{"load_s": load_s, "first_step_s": 0.25} for load_s in (1.0, 9.0, 0.5)]
    often, seldom, version = results_of(ORDER, [*blocks, *ALONE, {"digest": "a"}], again, {"digest": "a"}, 7)
    assert isinstance(often, StepCost) and isinstance(seldom, StepCost)
    assert (often.every, often.step_s, often.stall_s) == (2, 1.5, 0.5)
    assert often.step_ratio == pytest.approx((1.25 + 2.25 / 2) / 2)
    assert (seldom.every, seldom.stall_s, seldom.step_ratio) == (4, 2.0, 1.5)
    assert version == VersionCost(10**9, "dcp", 3.0, 0.5, 1.25, 7, 10**9, 10**8)


def test_what_came_after_the_last_save_is_trained_again() -> None:
    version = VersionCost(10**9, "dcp", 3.0, 0.5, 1.25, 7, 10**9, 10**8)
    assert back_s(StepCost(10**9, "dcp", 1, 2.0, 1.0, 1.5), version) == 1.25
    assert back_s(StepCost(10**9, "dcp", 4, 2.0, 1.0, 1.1), version) == 1.25 + 1.5 * 2.0


def test_a_deep_job_trains_its_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of zeros take half the bytes, and denormal moments several times as long."""
    monkeypatch.setattr(job, "WIDTH", 64)
    layers = 160
    training = job.Training(Order("dcp", "/nowhere", layers * job.STATE_BYTES * 64**2, (1,), 1, 1), seed=1)
    for _ in range(3):
        training.step()
    parameters = list(training.job.model.parameters())
    assert len(parameters) == layers
    for each in (parameters[0], parameters[-1]):
        moment = training.job.optimizer.state[each]["exp_avg_sq"]
        assert 1e-20 < float(moment.mean()) < 1e20


def test_other_bits_than_were_saved_are_no_figure() -> None:
    again = [{"load_s": 1.0, "first_step_s": 0.25}]
    with pytest.raises(RuntimeError, match="is not what was saved"):
        results_of(ORDER, [block(2, 1.0, 1.5), *ALONE, {"digest": "a"}], again, {"digest": "b"}, 7)


def test_lines_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"figure": "shm.put/memcpy"}\n')
    assert main(["peers", "--lines", str(other)]) == 2
    assert "no figure of peers" in capsys.readouterr().err
