"""What the file drivers ask of the operating system: locks, gathered writes, and one mapping of its errors."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiercheck.errors import (
    CapacityExceeded,
    Corruption,
    FileSystemFull,
    TierError,
    Transient,
    Unauthorized,
    Unsupported,
)
from tiercheck.types import Payload

__all__ = [
    "close_read",
    "closed_on_error",
    "fsync_directory",
    "locked",
    "map_os_errors",
    "meaning_of",
    "read_into",
    "try_lock",
    "unlink_quietly",
    "unlock",
    "unlock_and_close",
    "write_buffers",
]

CHUNK_BYTES = 8 << 20
"""Bytes a system call moves at most, so that a cancellation is noticed within milliseconds."""
BUFFERS_PER_WRITE = 512
"""Buffers a gathered write takes at most; Linux's own limit is 1024."""
LOCK_WAIT_S_MAX = 30.0
"""Critical sections last microseconds; who waits this long waits for a process that is stopped."""

_ERRORS: dict[int, tuple[type[TierError], str]] = {
    # A missing object is told apart where it is looked for; what else can be missing is the tier itself.
    errno.ENOENT: (
        TierError,
        "the tier's own directory was removed while the tier was open, or its file system was unmounted; bring it back",
    ),
    errno.ENOSPC: (
        FileSystemFull,
        "the file system is full, of bytes ('df') or of files ('df -i'); free some, or choose a larger one",
    ),
    errno.EDQUOT: (FileSystemFull, "the disk quota is used up; free space, or have it raised"),
    errno.EFBIG: (CapacityExceeded, "the object is larger than the file system's largest file"),
    errno.EACCES: (Unauthorized, "the file system refuses this user; check the directory's owner and mode"),
    errno.EPERM: (Unauthorized, "the file system refuses this user; check the directory's owner and mode"),
    errno.EROFS: (
        Unauthorized,
        "the file system is mounted read-only; mount it for writing, or bring what it holds elsewhere (tiercheck copy)",
    ),
    errno.ELOOP: (Unauthorized, "a symbolic link stands where an object, or a directory above it, should; remove it"),
    errno.ENOLCK: (Unsupported, "the file system takes no locks (flock); mount it with them, or choose another"),
    errno.EOPNOTSUPP: (Unsupported, "the file system cannot do this; choose another"),
    errno.ENOSYS: (Unsupported, "the file system cannot do this; choose another"),
    errno.ENAMETOOLONG: (Unsupported, "the directory and the key together make too long a path; shorten either"),
}
_TRANSIENT = {
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EBUSY,
    errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV,
    # What clients of network file systems say of a connection that is lost, and of files opened over it.
    errno.EBADFD, errno.ESHUTDOWN, errno.EREMOTEIO, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED,
    errno.ECONNABORTED,
}  # fmt: skip


class map_os_errors:  # noqa: N801  (it is used as a verb)
    """``OSError`` to the ``TierError`` it means, and the tier's name onto a ``TierError`` that lacks it."""

    def __init__(self, tier: str, key: str | None = None) -> None:
        self._tier = tier
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TierError):
            error.tier = error.tier or self._tier
            error.key = error.key or self._key
        elif isinstance(error, OSError):
            meaning, advice = meaning_of(error)
            raise meaning(f"{advice}: {error.strerror or error}", tier=self._tier, key=self._key) from error


def meaning_of(error: OSError) -> tuple[type[TierError], str]:
    """The kind of ``TierError`` that the system's error is, and what to do about it."""
    if error.errno in _TRANSIENT:
        return Transient, "the file system failed, perhaps not for long"
    return _ERRORS.get(error.errno or 0, (TierError, "the file system failed in an unexpected way"))


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the open file ``fd`` now, or say ``False``. An exclusive lock of its own becomes a shared one, and back."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Unlock ``fd``. Closing alone would not do: a child forked meanwhile holds the same open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)


class locked:  # noqa: N801  (it is used as a verb)
    """Hold the lock file ``path``, made if missing; gives its descriptor. ``open_file``: how to open it.

    Excludes threads as well as processes, since each holder opens the file for itself. A holder's death
    releases it. Errors: ``Transient`` after :data:`LOCK_WAIT_S_MAX`.
    """

    def __init__(self, path: Path, open_file: Callable[[], int] | None = None, *, shared: bool = False) -> None:
        self._path = path
        self._open_file = open_file
        self._shared = shared
        self._fd = -1

    def __enter__(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600) if self._open_file is None else self._open_file()
        try:
            self._wait(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return fd

    def __exit__(self, *exc_info: object) -> None:
        unlock_and_close(self._fd)

    def _wait(self, fd: int) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S_MAX
        pause_s = 0.00005
        while not try_lock(fd, shared=self._shared):
            if time.monotonic() > deadline:
                raise Transient(
                    f"another process has held the lock {self._path} for {LOCK_WAIT_S_MAX:.0f} s; "
                    f"find it with 'fuser {self._path}': it may be stopped"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.01)


def unlock_and_close(fd: int) -> None:
    """Close ``fd``, also if the system refuses to unlock it."""
    try:
        unlock(fd)
    finally:
        os.close(fd)


def close_read(fd: int) -> None:
    """Close a file that was only read. What the system says of that concerns no byte that was read: a network file
    system may say that the file was replaced meanwhile, each time it is closed."""
    with suppress(OSError):
        os.close(fd)


@contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Inside, ``fd`` is not handed to anybody yet: if that fails, its lock is given back, and it is closed. What is
    raised is that failure, also on a file system without locks."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            unlock(fd)
        os.close(fd)
        raise


def unlink_quietly(name: str, folder: int) -> None:
    """Remove a file that is given up, for a reason that is told: if that cannot be done, either, it is debris."""
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def write_buffers(fd: int, payload: Payload, check: Callable[[], None]) -> int:
    """Write the buffers one after the other, unjoined; returns the bytes written.

    ``check`` is called between system calls and may raise. No view of a buffer outlives the call.
    """
    written = 0
    views: list[memoryview] = [memoryview(buffer) for buffer in payload if len(buffer)]
    try:
        index = at = 0  # the next byte to write is views[index][at]
        while index < len(views):
            check()
            gathered: list[memoryview] = []
            room, next_index, next_at = CHUNK_BYTES, index, at
            while next_index < len(views) and room and len(gathered) < BUFFERS_PER_WRITE:
                part = views[next_index][next_at : next_at + room]
                gathered.append(part)
                room -= part.nbytes
                next_index, next_at = next_index + 1, 0
            try:
                count = os.writev(fd, gathered)
            finally:
                for part in gathered:
                    part.release()
            written += count
            while count:
                step = min(count, views[index].nbytes - at)
                at, count = at + step, count - step
                if at == views[index].nbytes:
                    index, at = index + 1, 0
    finally:
        for view in views:
            view.release()
    return written


def read_into(fd: int, offset: int, into: memoryview, check: Callable[[], None]) -> None:
    """Fill ``into`` from ``offset`` on. ``check`` as in :func:`write_buffers`.

    Errors: ``Corruption`` if the file ends early; objects never shrink, so somebody else cut it.
    """
    at = 0
    while at < into.nbytes:
        check()
        with into[at : at + CHUNK_BYTES] as part:
            count = os.preadv(fd, [part], offset + at)
        if not count:
            raise Corruption(f"the object's file ends at byte {offset + at}: something other than TierCheck cut it")
        at += count


def fsync_directory(path: Path) -> None:
    """Make the names in the directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
