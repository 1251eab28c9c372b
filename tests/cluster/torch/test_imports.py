"""A step imports nothing, but for Numba of many tensors: to read a folder may take as long as a disk that a tier is
filling, and training waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared_memory import name

__all__ = ["name"]


@pytest.mark.cluster
def test_a_step_imports_nothing(name: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.cluster.torch.importing", name, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"4 layers, exact": [], "200 layers, exact": [], "4 layers, nf4": []}
