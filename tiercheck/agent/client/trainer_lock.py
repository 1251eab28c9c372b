"""Who trains a rank on this node, as the kernel knows it: a locked file in the run directory.

A trainer holds the lock from before it looks at what is there until it ends, however it ends. While it says that it
recovers, the agent moves nothing of the rank: so a pause needs no clock, ends with whoever asked for it, and an agent
that was killed meanwhile finds it when it starts again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiercheck.agent.protocol.rundir import RunDirectory, lock_file
from tiercheck.errors import ConfigurationError, JobConflict
from tiercheck.tiers.posix.files import try_lock, unlock
from tiercheck.tiers.registry import make_driver

__all__ = ["Trainer", "TrainerLock", "trainer_of", "trainers"]

LOOK_WAIT_S_MAX = 0.5
"""Whoever looks holds the lock for a moment."""
LOOK_PAUSE_S = 0.005
CONTENT_BYTES_MAX = 64


@dataclass(frozen=True)
class Trainer:
    """The process that holds a rank. ``pid``: as it says itself (in a container it may be another one)."""

    pid: str
    recovering: bool


class TrainerLock:
    """Held by this process for one rank of a first tier, until :meth:`release` or the end of the process.

    It begins recovering. Errors: ``JobConflict`` naming the process that has it; ``ConfigurationError`` for a URL or a
    run directory that cannot be.
    """

    def __init__(self, run: RunDirectory, namespace: str, rank: int) -> None:
        self._run = run
        self._path = path_of(run, namespace, rank)
        self._descriptor: int | None = None
        self._state = "recovering"
        self._changing = threading.Lock()
        """:meth:`keep` is called on another thread than the others."""
        _held.add(self)
        try:
            self._descriptor = self._taken(namespace, rank)
            self._say()
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"{namespace} is locked by a file in {run.root}, which failed: {error}; make room there, or point "
                "TIERCHECK_RUN_DIR at another directory of this node"
            ) from error

    def recovered(self) -> None:
        """From here on the agent moves what is registered."""
        with self._changing:
            self._state = "training"
            self._say()

    def keep(self) -> None:
        """See to it that others find the lock. What removes old files takes its file for a new one; one that was
        removed is made again. If another trainer has taken the rank meanwhile, this one goes on without: the
        generations of the two decide.

        Errors: ``OSError``, ``ConfigurationError`` if it cannot be made now.
        """
        with self._changing:
            if self._descriptor is None:
                return
            if is_at(self._path, self._descriptor):
                os.utime(self._descriptor)
                return
            self._run.make()
            descriptor = lock_file(self._path)
            if descriptor is None:
                return
            if not is_at(self._path, descriptor):  # somebody who looked has removed it just then
                os.close(descriptor)
                return
            self._give_back()
            self._descriptor = descriptor
            self._say()

    def release(self) -> None:
        """Idempotent."""
        with self._changing:
            self._give_back()

    def _give_back(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            if is_at(self._path, descriptor):  # else it was removed, and may be another trainer's
                with suppress(FileNotFoundError):
                    self._path.unlink()
            unlock(descriptor)  # closing alone would leave it to a child that was forked meanwhile
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child, such as a data loader's worker: it must not hold the lock beyond the parent's end."""
        self._changing = threading.Lock()  # another thread of the parent may have been at it
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _taken(self, namespace: str, rank: int) -> int:
        until = time.monotonic() + LOOK_WAIT_S_MAX
        while True:
            descriptor = lock_file(self._path)
            if descriptor is not None:
                if is_at(self._path, descriptor):
                    return descriptor
                os.close(descriptor)  # its holder has just released it, and removed the file
            elif time.monotonic() > until:
                trainer = holder(self._path) or Trainer("unknown", False)
                if trainer.pid == str(os.getpid()):
                    raise JobConflict(
                        f"this process is using {namespace} for rank {rank} already: close the checkpointer that it "
                        "attached before it attaches another"
                    )
                raise JobConflict(
                    f"rank {rank} of another job on this node (process {trainer.pid}) is using {namespace}; end it, or "
                    "give this job a tier of its own"
                )
            else:
                time.sleep(LOOK_PAUSE_S)

    def _say(self) -> None:
        if self._descriptor is not None:
            content = f"{self._state} {os.getpid()}".encode()
            os.pwrite(self._descriptor, content.ljust(CONTENT_BYTES_MAX), 0)


def trainer_of(run: RunDirectory, namespace: str, rank: int) -> Trainer | None:
    """The living process that holds the rank of the first tier ``namespace``, if there is one."""
    return holder(path_of(run, namespace, rank))


def trainers(run: RunDirectory) -> list[Trainer]:
    """All of this run directory."""
    found = [holder(path) for path in run.root.glob("trainer-*.lock")]
    return [trainer for trainer in found if trainer is not None]


def path_of(run: RunDirectory, namespace: str, rank: int) -> Path:
    place = f"{make_driver(namespace).url}\0{rank}"
    return run.root / f"trainer-{hashlib.sha256(place.encode()).hexdigest()[:32]}.lock"


def holder(path: Path) -> Trainer | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if not try_lock(descriptor, shared=True):
            return read(descriptor)
        # A process that was killed has left the file. It goes if nobody else holds it: who takes it looks again.
        if try_lock(descriptor) and is_at(path, descriptor):
            path.unlink()
        unlock(descriptor)
        return None
    finally:
        os.close(descriptor)


def read(descriptor: int) -> Trainer:
    """While it says nothing yet, it recovers."""
    state, _, pid = os.pread(descriptor, CONTENT_BYTES_MAX, 0).decode(errors="replace").partition(" ")
    return Trainer(pid.strip() or "unknown", state != "training")


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that has that name now."""
    try:
        return path.lstat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


_held: weakref.WeakSet[TrainerLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for lock in list(_held):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
