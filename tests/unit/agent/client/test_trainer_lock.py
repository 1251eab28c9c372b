"""Who trains a rank on a node: one process, as long as it lives, whatever it forks and however it ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.servers.agents import Node, node
from tiercheck.agent.client.start import starting
from tiercheck.agent.client.trainer_lock import Trainer, TrainerLock, trainer_of, trainers
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import ConfigurationError, JobConflict

__all__ = ["node"]

OWN = str(os.getpid())


def files(run: RunDirectory) -> list[Path]:
    return list(run.root.glob("trainer-*"))


async def test_a_child_that_is_forked_during_a_start_keeps_nobody_from_the_next_one(node: Node) -> None:
    run = RunDirectory.of(node.name)
    ended, end = os.pipe()
    async with starting(run, 1.0):
        if not (child := os.fork()):
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
    try:
        async with starting(run, 1.0):
            pass
    finally:
        os.close(end)
        os.close(ended)
        os.waitpid(child, 0)  # noqa: ASYNC222  (it has ended)


def test_one_process_holds_a_rank_and_says_what_it_does(node: Node) -> None:
    run = RunDirectory.of(node.name)
    assert trainer_of(run, "shm://run", 0) is None
    lock = TrainerLock(run, "shm://run?size=1GiB", 0)
    assert trainer_of(run, "shm://run", 0) == Trainer(OWN, True)
    lock.recovered()
    assert trainer_of(run, "shm://run?pool=1GiB", 0) == Trainer(OWN, False)
    with pytest.raises(JobConflict, match="this process is using shm://run for rank 0 already: close the checkpointer"):
        TrainerLock(run, "shm://run", 0)
    others = [TrainerLock(run, "shm://run", 1), TrainerLock(run, "shm://other", 0)]
    assert len(trainers(run)) == 3
    for each in (lock, *others):
        each.release()
        each.release()
    assert trainers(run) == files(run) == []


def test_a_lock_that_cannot_say_whose_it_is_is_not_held(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.of(node.name)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ConfigurationError, match=r"shm://run is locked by a file in .* No space left "):
            TrainerLock(run, "shm://run", 0)
    assert files(run) == []
    TrainerLock(run, "shm://run", 0).release()


def test_the_dead_hold_nothing_whatever_they_have_forked(node: Node) -> None:
    run = RunDirectory.of(node.name)
    ready, readied = os.pipe()
    parent = os.fork()
    if not parent:
        lock = TrainerLock(run, "shm://run", 0)
        lock.recovered()
        child = os.fork()  # a data loader's worker, which outlives the trainer
        if child:
            os.write(readied, f"{child} ".encode())
        signal.pause()
    worker = int(os.read(ready, 32))
    try:
        assert trainer_of(run, "shm://run", 0) == Trainer(str(parent), False)
        with pytest.raises(
            JobConflict, match=rf"rank 0 of another job on this node \(process {parent}\) is using shm://run"
        ):
            TrainerLock(run, "shm://run", 0)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert trainer_of(run, "shm://run", 0) is None
        assert files(run) == [], "what it has left goes"
        TrainerLock(run, "shm://run", 0).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(ready)
        os.close(readied)


def test_who_takes_a_lock_that_is_just_released_has_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was opened before its holder removed it: what is locked then nobody else finds."""
    run = RunDirectory.of(node.name)
    lock = TrainerLock(run, "shm://run", 0)
    from tiercheck.agent.client import trainer_lock

    take, taken = trainer_lock.lock_file, []

    def races(path: Path) -> int | None:
        if not taken:
            taken.append(os.open(path, os.O_RDWR))
            lock.release()
            return taken[0]
        return take(path)

    monkeypatch.setattr(trainer_lock, "lock_file", races)
    other = TrainerLock(run, "shm://run", 0)
    assert trainer_of(run, "shm://run", 0) == Trainer(OWN, True)
    other.release()


def test_a_lock_whose_directory_was_tidied_away_is_found_again(node: Node) -> None:
    run = RunDirectory.of(node.name)
    lock = TrainerLock(run, "shm://run", 0)
    lock.recovered()
    shutil.rmtree(run.root)
    lock.keep()
    assert trainer_of(run, "shm://run", 0) == Trainer(OWN, False)
    with pytest.raises(JobConflict, match="this process is using shm://run for rank 0 already"):
        TrainerLock(run, "shm://run", 0)
    os.utime(*files(run), (0, 0))
    lock.keep()
    assert files(run)[0].stat().st_mtime > 0, "what removes old files would remove it"
    lock.release()
    lock.keep()
    assert files(run) == [], "what was released stays so"


def test_a_lock_that_another_trainer_has_taken_meanwhile_is_left_to_it(node: Node) -> None:
    run = RunDirectory.of(node.name)
    lock = TrainerLock(run, "shm://run", 0)
    lock.recovered()
    files(run)[0].unlink()
    other = TrainerLock(run, "shm://run", 0)
    lock.keep()
    assert trainer_of(run, "shm://run", 0) == Trainer(OWN, True)
    lock.release()
    assert trainer_of(run, "shm://run", 0) == Trainer(OWN, True)
    other.release()
    assert files(run) == []
