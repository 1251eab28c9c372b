"""Every figure can be measured: against real servers, with small objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tiers import FIGURES

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).absolute().parents[3]


def test_every_figure_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "tiers", "--quick", "--json", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    told = f"{done.stdout}\n{done.stderr}"
    machine, *lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert machine["figure"] == "machine"
    assert [line["figure"] for line in lines] == [figure.name for figure in FIGURES], told
    assert done.returncode == 0, told
    skipped = {line["figure"] for line in lines if "skipped" in line}
    if os.environ.get("CI"):
        assert not skipped, told
    assert not {figure.name for figure in FIGURES if figure.name.startswith("shm.")} & skipped, told
    for line in lines:
        if line["figure"] in skipped:
            continue
        assert line["ceiling"] > 0, told
        assert line["ratio"] >= 0, told
        assert line["spread"][0] <= line["spread"][1], told
        if line["figure"].endswith(".peak_bytes"):
            # Unlike speed, this does not depend on how busy the machine is.
            assert line["met"], f"{line['figure']} takes more than its budget: {line}"
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
