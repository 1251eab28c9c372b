"""The figures of the kernels that start whole jobs; tests/unit/benchmarks has the others."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.cluster.figures.forked_figure import STEPS
from tests.forks import Forks, tail

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def test_a_figure_of_the_demo_runs_its_trainers(forks: Forks, tmp_path: Path) -> None:
    """Of a snapshot, which needs the most memory."""
    log, found = tmp_path / "log", tmp_path / "figure"
    assert forks.run("tests.cluster.figures.forked_figure", found, log=log) == [0], tail(log)
    measured = json.loads(found.read_text())
    assert measured["pairs"] == 2 * STEPS
    assert 0 < measured["value"] < measured["ceiling"]
    assert measured["ranks"] == 2
