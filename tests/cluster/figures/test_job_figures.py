"""The benchmarks that train whole jobs measure them, small ones."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main

pytestmark = pytest.mark.cluster


def test_saved_jobs_and_bytes_moved_outside_are_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["quick.folded.shm+durable", "quick.outside.memory"]
    assert main(["overhead", "--json", "--quick", "--directory", str(tmp_path), "--only", *names]) == 0
    _, step, stall, outside = map(json.loads, capsys.readouterr().out.splitlines())
    assert (step["figure"], stall["figure"]) == (f"step.{names[0]}", f"stall.{names[0]}")
    assert outside["figure"] == f"step.{names[1]}"
    assert step["captured_bytes"] > step["bytes"] == stall["bytes"] == outside["bytes"]
    assert step["steps"] == 8
    assert not [*tmp_path.iterdir()]


def test_a_way_runs_in_an_environment_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--size", "12MB", "--every", "1", "--blocks", "1", "--block", "2", "--directory", str(tmp_path)]
    ways = ["--only", "torch.save", "--environments", str(tmp_path / "environments")]
    assert main(["peers", "--json", *small, *ways]) == 0
    out = capsys.readouterr().out
    machine, *lines = map(json.loads, out.splitlines())
    assert machine["figure"] == "machine"
    step, version = lines
    assert (step["way"], step["every"], step["state_bytes"]) == ("torch.save", 1, 12_000_000)
    assert (version["way"], version["state_bytes"]) == ("torch.save", 12_000_000)
    assert version["restart_s"] > 0
    assert version["first_saved_bytes"] == version["saved_bytes"] > 12e6
    assert [path.name for path in tmp_path.iterdir()] == ["environments"], "nothing else is left"
    kept, picture = tmp_path / "lines.json", tmp_path / "picture.svg"
    kept.write_text(out)
    assert main(["peers", "--lines", str(kept), "--plot", str(picture), "--markdown"]) == 0
    assert "| 12 MB | torch.save | 1 |" in capsys.readouterr().out
    texts = "".join(ElementTree.fromstring(picture.read_bytes()).itertext())
    for text in ("torch.save", "restart to first step (s)", "each step saved"):
        assert text in texts
