"""``kill -9`` of an agent, and of the process that folds for it, in the middle of a fold: nothing is lost, nothing
half-written is left, and no memory stays reserved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.agents import Node, node

__all__ = ["node"]

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("who", ["agents", "folds"])
def test_killed_at_many_points_of_a_fold(node: Node, who: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.folds.victim", who, str(node.folder)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 5
