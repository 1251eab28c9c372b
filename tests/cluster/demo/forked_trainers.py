"""The demo's trainers watched, with ranks that are forked; the argument is a directory."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.cluster.forked_ranks import fork_ranks
from tiercheck.demo.launch import Deadlines, TrainerFailure, Trainers, gone
from tiercheck.demo.settings import TrainingSettings

__all__ = ["ENDLESS"]

ENDLESS = TrainingSettings(steps=1_000_000, seed=1, width=16, layers=1, heads=1, sequence=8, micro_batch=1)


def main() -> None:
    directory = Path(sys.argv[1])
    trains_is_stopped_and_is_missed(directory / "stopped")
    a_rank_that_dies_is_reported_with_its_own_words(directory / "dies")


def trains_is_stopped_and_is_missed(folder: Path) -> None:
    """One start serves three stories: it trains; a rank that stops is named; kill leaves nobody."""
    with Trainers(ENDLESS, folder, start=fork_ranks) as trainers:
        told: list[int] = []
        ranks = trainers.watch(
            lambda ranks: all(rank.version >= 3 for rank in ranks),
            lambda ranks: told.append(min(rank.version for rank in ranks)),
        )
        assert told == sorted(told)
        assert told[-1] >= 3
        processes = [psutil.Process(rank.started["pid"]) for rank in ranks]
        assert not any(map(gone, processes))
        os.kill(processes[1].pid, signal.SIGSTOP)
        trainers.deadlines = Deadlines(step_s=2.0)
        with pytest.raises(TrainerFailure, match=r"rank \d, last seen at version \d+, made no progress for 2 s"):
            trainers.watch(lambda _: False, lambda _: None)
        assert all(map(gone, processes)), "a failed watch kills the trainers, a stopped one too"
        trainers.kill()


def a_rank_that_dies_is_reported_with_its_own_words(folder: Path) -> None:
    settings = replace(ENDLESS, steps=5, text=str(folder / "nowhere"))
    with (
        Trainers(settings, folder, start=fork_ranks) as trainers,
        pytest.raises(TrainerFailure, match=r"rank [01]: ConfigurationError: the training .*nowhere does not exist"),
    ):
        trainers.watch(lambda ranks: all(rank.finished for rank in ranks), lambda _: None)
