"""What the comparison with other libraries concludes from what the jobs say, and a small one of those that are here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.peers.job import Order
from benchmarks.peers.results import results_of

ORDER = Order("dcp", "/nowhere", 10**9, (2, 4), blocks=2, block=4)
SINGLE = {"durable_s": 3.0, "bytes": 10**9}


def block(every: int, step: float, saved: float) -> dict[str, Any]:
    taken = [(saved if number % every == 0 else step, number % every == 0) for number in range(4)]
    return {"every": every, "plain": [step] * 4, "saving": taken}


def test_each_interval_is_judged_by_its_own_blocks() -> None:
    blocks = [block(2, 1.0, 1.5), block(2, 2.0, 2.5), block(4, 1.0, 3.0), block(4, 1.0, 3.0)]
    again = [{"digest": "a", "load_s": 1.0, "first_step_s": 0.25}]
    often, seldom = results_of(ORDER, [*blocks, SINGLE, {"digest": "a"}], again, 7)
    assert (often.every, often.step_s, often.stall_s) == (2, 1.5, 0.5)
    assert often.step_ratio == pytest.approx((1.25 + 2.25 / 2) / 2)
    assert (seldom.every, seldom.stall_s, seldom.step_ratio) == (4, 2.0, 1.5)
    assert (seldom.durable_s, seldom.restart_s, seldom.peak_bytes, seldom.saved_bytes) == (3.0, 1.25, 7, 10**9)


def test_other_bits_than_were_saved_are_no_figure() -> None:
    again = [{"digest": "b", "load_s": 1.0, "first_step_s": 0.25}]
    with pytest.raises(RuntimeError, match="is not what was saved"):
        results_of(ORDER, [block(2, 1.0, 1.5), SINGLE, {"digest": "a"}], again, 7)


def test_a_way_runs_in_an_environment_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--size", "12MB", "--every", "1", "--blocks", "1", "--block", "2", "--directory", str(tmp_path)]
    ways = ["--only", "torch.save", "--environments", str(tmp_path / "environments")]
    assert main(["peers", "--json", *small, *ways]) == 0
    out = capsys.readouterr().out
    machine, *lines = map(json.loads, out.splitlines())
    assert machine["figure"] == "machine"
    (line,) = lines
    assert (line["way"], line["every"], line["state_bytes"]) == ("torch.save", 1, 12_000_000)
    assert line["restart_s"] > 0
    assert line["saved_bytes"] > 12e6
    assert [path.name for path in tmp_path.iterdir()] == ["environments"], "nothing else is left"
    kept, picture = tmp_path / "lines.json", tmp_path / "picture.svg"
    kept.write_text(out)
    assert main(["peers", "--lines", str(kept), "--plot", str(picture), "--markdown"]) == 0
    assert "| 12 MB | torch.save | 1 |" in capsys.readouterr().out
    texts = "".join(ElementTree.fromstring(picture.read_bytes()).itertext())
    for text in ("torch.save", "restart to first step (s)", "each step saved"):
        assert text in texts


def test_lines_that_are_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"figure": "shm.put/memcpy"}\n')
    assert main(["peers", "--lines", str(other)]) == 2
    assert "no figure of peers" in capsys.readouterr().err
