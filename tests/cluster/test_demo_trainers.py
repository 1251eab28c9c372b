"""Trainer processes under the demo's control: killed to the last one, and never waited for without end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tiercheck.demo.launch import Deadlines, TrainerFailure, Trainers
from tiercheck.demo.settings import TrainingSettings

pytestmark = pytest.mark.cluster
ENDLESS = TrainingSettings(steps=1_000_000, seed=1, width=16, layers=1, heads=1, sequence=8, micro_batch=1)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_trainers_train_are_stopped_and_are_missed(tmp_path: Path) -> None:
    """One start serves three stories: it trains; a rank that stops is named; kill leaves nobody."""
    with Trainers(ENDLESS, tmp_path / "run") as trainers:
        told: list[int] = []
        ranks = trainers.watch(
            lambda ranks: all(rank.version >= 3 for rank in ranks),
            lambda ranks: told.append(min(rank.version for rank in ranks)),
        )
        assert told == sorted(told)
        assert told[-1] >= 3
        pids = [rank.started["pid"] for rank in ranks]
        assert all(alive(pid) for pid in pids)
        os.kill(pids[1], signal.SIGSTOP)
        trainers.deadlines = Deadlines(step_s=2.0)
        with pytest.raises(TrainerFailure, match=r"rank \d, last seen at version \d+, made no progress for 2 s"):
            trainers.watch(lambda _: False, lambda _: None)
        assert not any(alive(pid) for pid in pids), "a failed watch kills the trainers, a stopped one too"
        trainers.kill()


def test_a_rank_that_dies_is_reported_with_its_own_words(tmp_path: Path) -> None:
    settings = TrainingSettings(
        steps=5, seed=1, width=16, layers=1, heads=1, sequence=8, micro_batch=1, text=str(tmp_path / "nowhere")
    )
    with (
        Trainers(settings, tmp_path / "run") as trainers,
        pytest.raises(TrainerFailure, match=r"rank 0: ConfigurationError: the training text .*nowhere does not exist"),
    ):
        trainers.watch(lambda ranks: all(rank.finished for rank in ranks), lambda _: None)


def test_workers_die_with_their_agent(tmp_path: Path) -> None:
    with Trainers(ENDLESS, tmp_path / "run") as trainers:
        ranks = trainers.watch(lambda ranks: all(rank.steps for rank in ranks), lambda _: None)
        workers = [psutil.Process(rank.started["pid"]) for rank in ranks]
        workers[0].parent().kill()
        with pytest.raises(TrainerFailure, match="exit code -9"):
            trainers.watch(lambda _: False, lambda _: None)
        _, left = psutil.wait_procs(workers, timeout=10)
        assert not [worker for worker in left if worker.status() != psutil.STATUS_ZOMBIE]
