"""Trainer processes under the demo's control: killed to the last one, and never waited for without end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.cluster.demo.forked_trainers import ENDLESS
from tests.forks import Forks, tail
from tiercheck.demo.launch import TrainerFailure, Trainers, gone

pytestmark = pytest.mark.cluster


def wait_until_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still there then. Whoever adopts a process may leave it a zombie: that is gone, too."""
    until = time.monotonic() + seconds
    while (left := [each for each in processes if not gone(each)]) and time.monotonic() < until:
        psutil.wait_procs(left, timeout=0.02)
    return left


def test_trainers_train_are_stopped_are_missed_and_say_of_what_they_died(forks: Forks, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forks.run("tests.cluster.demo.forked_trainers", tmp_path, log=log) == [0], tail(log)


def test_workers_die_with_their_agent(tmp_path: Path) -> None:
    """Which is torchrun's."""
    with Trainers(ENDLESS, tmp_path / "run") as trainers:
        ranks = trainers.watch(lambda ranks: all(rank.steps for rank in ranks), lambda _: None)
        workers = [psutil.Process(rank.started["pid"]) for rank in ranks]
        workers[0].parent().kill()
        with pytest.raises(TrainerFailure, match="exit code -9"):
            trainers.watch(lambda _: False, lambda _: None)
        assert not wait_until_gone(workers, 10.0)
