"""One live process per tier and rank on a node, and one job per tier: two of one name never write to the same tier.

Each is a lock on a file. A rank's is its process's alone. That of the tier is shared by the processes of one start of
the job, whose name is in the file: another start may have given the ranks of this node other numbers. When the process
that holds a lock ends, however it ends, the kernel releases it. The file lies in the node's shared memory. That is the
same for all of its processes, whatever their ``TMPDIR``, and for containers that share a ``shm://`` tier. Across nodes
the lineage record in the shared tier decides (:mod:`tiercheck.replication.objects.generation`).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tiercheck.errors import ConfigurationError, JobConflict

__all__ = ["ProcessLock", "holder_of"]

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
DIRECTORIES = ("nvme", "lustre")
"""What is a directory, by either name."""
START_NBYTES = 64
"""More than a start's name has."""
ANSWER_S = 5.0
"""For so long a file system is asked where a path leads."""


class ProcessLock:
    """Locks the given tiers (by URL) for one rank, until :meth:`release` or the end of the process; with ``start``, for
    the job that started under that name.

    Errors: ``JobConflict``, which names the tier and a process that has locked it. Then nothing is locked.
    """

    def __init__(self, tiers: Iterable[str], rank: int, start: str = "") -> None:
        self._held: list[tuple[int, Path]] = []
        """Open files, each locked, and where they lie. Those of jobs may be locked by others, too."""
        _locks.add(self)
        try:
            directory = _directory()
            for url in tiers:
                path = directory / _name(url, rank)
                self._held.append((_locked(path, url, rank), path))
                if start:
                    path = directory / _name(url, "job")
                    self._held.append((_shared(path, url, start), path))
        except OSError as error:
            self.release()
            raise ConfigurationError(
                f"a tier is locked by a file in {_root()}, which failed: {error}; make that a directory that this user "
                "can write to"
            ) from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the tiers. Idempotent."""
        while self._held:
            descriptor, path = self._held.pop()
            with suppress(OSError):  # a file that stays is locked by nobody, and the next job of the name takes it
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no other process of the job has it
                path.unlink()
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child: let go of what the parent goes on to hold."""
        while self._held:
            os.close(self._held.pop()[0])


def holder_of(url: str, rank: int) -> str | None:
    """The process of this node that has the tier locked for the rank; ``None`` if none has. A start in the very moment
    of the question is refused as if one had."""
    try:
        descriptor = os.open(_directory() / _name(url, rank), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would not do: a child may be forked just now
    except BlockingIOError:
        return _read(descriptor)
    finally:
        os.close(descriptor)
    return None


def _locked(path: Path, url: str, rank: int) -> int:
    """The descriptor of the file, which this process has locked. Errors: ``JobConflict``; ``OSError``."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _conflict(url, rank, _read(descriptor)) from None
            if not _lies_at(descriptor, path):
                continue  # whoever held it has just removed it
            with suppress(OSError):  # memory may be full: then it does not say who holds it
                os.pwrite(descriptor, f"{os.getpid():<31}\n".encode(), 0)
            undo.pop_all()
            return descriptor


def _shared(path: Path, url: str, start: str) -> int:
    """The descriptor of the file, which this process has locked together with others of its job. The first of them
    writes the start's name into it. Errors: ``JobConflict``; ``OSError``."""
    until = time.monotonic() + ANSWER_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _lies_at(descriptor, path):
                    continue
                with suppress(OSError):  # memory may be full: then the file names no start, and passes for this one's
                    os.pwrite(descriptor, f"{os.getpid():<31}\n{start}\n".encode(), 0)
            except BlockingIOError:
                pass  # some process has it
            try:
                # Another process may be the first one meanwhile: what the file says then is asked below.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise _other_start(url, _read(descriptor)) from None
                time.sleep(0.01)  # another process writes just now; to wait for a lock has no deadline
                continue
            if not _lies_at(descriptor, path):
                continue
            if os.pread(descriptor, START_NBYTES, 32).decode(errors="replace").strip() not in ("", start):
                raise _other_start(url, _read(descriptor))
            undo.pop_all()
            return descriptor


def _lies_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _conflict(url: str, rank: int, holder: str) -> JobConflict:
    if holder == str(os.getpid()):
        return JobConflict(
            f"this process is using {url} for rank {rank} already: close the checkpointer that it attached before it "
            "attaches another"
        )
    return JobConflict(
        f"rank {rank} of another job on this node (process {holder}) is using {url}; end it, or give this job a tier "
        "of its own"
    )


def _other_start(url: str, holder: str) -> JobConflict:
    return JobConflict(
        f"another job on this node (process {holder}, of other ranks) is using {url}; end it, or give this job a tier "
        "of its own"
    )


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"


def _name(url: str, rank: int | str) -> str:
    return hashlib.sha256(f"{_place(url)}\0{rank}".encode()).hexdigest()[:32]


def _place(url: str) -> str:
    """What the URL stands for, however it is written, and without its options. Of a directory the path that leads there
    without a link."""
    scheme, authority, path, *_ = urlsplit(url)
    if authority:
        return f"{scheme}://{authority}{path.rstrip('/')}"
    return f"{'nvme' if scheme in DIRECTORIES else scheme}://{_without_links(unquote(path))}"


def _without_links(path: str) -> str:
    """The path that leads there without a link; the path itself if the file system does not answer: a job resumes from
    memory then."""
    answer: Future[str] = Future()

    def ask() -> None:
        try:
            answer.set_result(os.path.realpath(path))
        except OSError as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="tiercheck path", daemon=True).start()  # it may hang for good
    try:
        return answer.result(ANSWER_S)
    except TimeoutError:
        log.warning("%s does not answer: this job's lock on it has its name as it is given", path)
        return os.path.normpath(path)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked child, such as a data loader's worker, shares its parent's locks. It must not hold them after the
    parent's end, or the job could not restart."""
    for lock in list(_locks):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _root() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _directory() -> Path:
    """A directory of this user's alone, the same one for every process of the user on the node."""
    directory = _root() / f"tiercheck-locks-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if directory.is_symlink() or status.st_uid != os.getuid():
        raise ConfigurationError(f"{directory} belongs to someone else; remove it")
    return directory
