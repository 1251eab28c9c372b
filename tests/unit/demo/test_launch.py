"""How the demo starts its trainers; tests/cluster has those that train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tiercheck.demo.launch import Trainers
from tiercheck.demo.settings import TrainingSettings


def test_a_signal_that_comes_while_they_are_started_leaves_no_process(tmp_path: Path) -> None:
    started: list[psutil.Popen] = []

    def interrupted(*_: object) -> NoReturn:
        started.append(psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        raise SystemExit(143)

    with pytest.raises(SystemExit), Trainers(TrainingSettings(steps=1, seed=1), tmp_path / "run", start=interrupted):
        pass
    assert started[0].wait(10) == -9
    assert started[0].stdin is not None
    started[0].stdin.close()
