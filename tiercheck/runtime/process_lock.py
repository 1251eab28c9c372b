"""One live process per tier and rank on a node: two jobs of one name never write to the same tier.

It is a lock on a file. When the process that holds it ends, however it ends, the kernel releases the lock. The lock
works among the processes of one node. Across nodes the lineage record in the shared tier decides
(:mod:`tiercheck.replication.objects.generation`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from tiercheck.errors import ConfigurationError, JobConflict

__all__ = ["ProcessLock", "holder_of"]


class ProcessLock:
    """Locks the given tiers (by URL) for one rank, until :meth:`release` or the end of the process.

    Errors: ``JobConflict``, which names the tier and the process that has locked it. Then nothing is locked.
    """

    def __init__(self, tiers: Iterable[str], rank: int) -> None:
        self._descriptors: list[int] = []
        _locks.add(self)
        try:
            directory = _directory()
            for url in tiers:
                self._take(directory / _name(url, rank), url, rank)
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"a tier is locked by a file in {tempfile.gettempdir()}, which failed: {error}; point TMPDIR at a "
                "writable directory of this node"
            ) from error
        except BaseException:
            self.release()
            raise

    def _take(self, path: Path, url: str, rank: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            if holder == str(os.getpid()):
                raise JobConflict(
                    f"this process is using {url} for rank {rank} already: close the checkpointer that it attached "
                    "before it attaches another"
                ) from None
            raise JobConflict(
                f"rank {rank} of another job on this node (process {holder}) is using {url}; end it, or give this "
                "job a tier of its own"
            ) from None
        # Of one length each time: a file that was truncated is written to the disk when it is closed.
        os.pwrite(descriptor, f"{os.getpid():<31}\n".encode(), 0)

    def release(self) -> None:
        """Unlock the tiers. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def holder_of(url: str, rank: int) -> str | None:
    """The process of this node that has the tier locked for the rank; ``None`` if none has. A start in the very moment
    of the question is refused as if one had."""
    try:
        descriptor = os.open(_directory() / _name(url, rank), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    finally:
        os.close(descriptor)
    return None


def _name(url: str, rank: int) -> str:
    return hashlib.sha256(f"{url.partition('?')[0]}\0{rank}".encode()).hexdigest()[:32]


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child, such as a data loader's worker, shares its parent's locks. It must not hold them after the
    parent's end, or the job could not restart."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)


def _directory() -> Path:
    """A directory of this user's alone. It must be the same for every process of the user on the node."""
    directory = Path(tempfile.gettempdir()) / f"tiercheck-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if directory.is_symlink() or status.st_uid != os.getuid():
        raise ConfigurationError(f"{directory} belongs to someone else; remove it, or point TMPDIR elsewhere")
    return directory
