"""An object directory in shared memory whose files are recycled.

Fresh pages of a tmpfs cost an allocation and a clearing each, so filling a new file is many times slower than
filling one whose pages are there already. What is overwritten or deleted therefore goes to a pool, and the
next writer takes its file from there. Beside what :mod:`tiercheck.tiers.directory` keeps::

    pool/      files for reuse; free space, as far as anybody outside is concerned
    charged    bytes of the objects and temporary files, never too low (a crash may leave it too high)

A file is reused only by who holds its exclusive lock. A reader holds a shared one for as long as its mapping
lives, so what it sees never changes. A file that leaves the pool for good is cut to nothing first: its pages
are free at once.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.tiers.directory import ObjectDirectory, Temporary, files_in, not_found
from tiercheck.tiers.files import try_lock, unlock

__all__ = ["POOLED_BYTES_MIN", "SegmentDirectory"]

POOL_FILES_MAX = 256
POOLED_BYTES_MIN = 128 << 10
"""Smaller files are not worth a place in the pool."""
BACKED_AT_ONCE_BYTES = 32 << 20
OPEN_ATTEMPTS_MAX = 1000


class SegmentDirectory(ObjectDirectory):
    """``limit_bytes`` bounds objects, temporary files and pool together; ``pool_bytes`` the pool alone."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, durable=False)
        self.limit_bytes = 0
        self.pool_bytes = 0
        self._pool = self.control / "pool"

    def prepare(self) -> None:
        self._make_directory(self._pool)
        super().prepare()
        with self.locked():
            self._recount()

    # Writing.

    def create_temporary(self, nbytes: int, check: Callable[[], None]) -> Temporary:
        """A file of ``nbytes``, all of them backed by memory. Errors: ``CapacityExceeded``."""
        with self.locked() as lock_fd:
            stamp_ns = self.next_stamp_ns(lock_fd)
            self._check_limit(nbytes)
            path, fd = self._take(nbytes)
            # Counted before it is sized, sized before it is backed: dying in between never leaves the count too low.
            self._charge(nbytes)
            backed_bytes = min(os.fstat(fd).st_size, nbytes)
            os.ftruncate(fd, nbytes)
            self._trim_pool()
        try:
            self._back(fd, backed_bytes, nbytes, check)
        except BaseException:
            with self.locked():
                os.ftruncate(fd, 0)
                path.unlink()
                self._charge(-nbytes)
            unlock(fd)
            os.close(fd)
            raise
        return Temporary(path, fd, stamp_ns)

    def shrink(self, temporary: Temporary, reserved_bytes: int, nbytes: int) -> None:
        """Cut a temporary file that was made for ``reserved_bytes`` to ``nbytes``."""
        os.ftruncate(temporary.fd, nbytes)
        if nbytes != reserved_bytes:
            with self.locked():
                self._charge(nbytes - reserved_bytes)

    def discard(self, temporary: Temporary, *, mapped: bool = False) -> None:
        """Close the file; one that was not published goes to the pool.

        ``mapped``: its writer cannot be kept from its mapping. The mapping then keeps the file's lock, shared,
        so that nobody reuses the file while it lives.
        """
        if temporary.path.exists():
            with self.locked():
                if mapped:
                    try_lock(temporary.fd, shared=True)
                self.retire(temporary.path, os.fstat(temporary.fd))
        if not mapped:
            unlock(temporary.fd)
        os.close(temporary.fd)

    def replace(self, source: Path, path: Path, current: os.stat_result | None) -> None:
        if current is not None and current.st_size >= POOLED_BYTES_MIN:
            # The old file gets its name in the pool first, so that at no moment there is no object. Dying in between
            # leaves a file with two names, which nobody reuses.
            os.link(path, self._spare_path())
        source.rename(path)
        if current is not None:
            self._charge(-current.st_size)
            self._trim_pool()

    # Reading.

    def open_object(self, key: str) -> int:
        """As ever; the descriptor also holds the file's shared lock, and so does every mapping made of it."""
        path = self.path_of(key)
        for attempt in range(OPEN_ATTEMPTS_MAX):
            fd = super().open_object(key)
            keep = False
            try:
                if try_lock(fd, shared=True):
                    # Between opening and locking the file may have been recycled: is it still this object's?
                    opened, current = os.fstat(fd), path.lstat()
                    keep = (opened.st_ino, opened.st_mtime_ns) == (current.st_ino, current.st_mtime_ns)
                    if keep:
                        return fd
            except (FileNotFoundError, NotADirectoryError):
                raise not_found(key) from None
            finally:
                if not keep:
                    unlock(fd)
                    os.close(fd)
            time.sleep(min(attempt, 10) * 0.0001)
        raise Transient("the object is replaced faster than it can be opened; try again", key=key)

    # Removing.

    def retire(self, path: Path, status: os.stat_result) -> None:
        if status.st_size >= POOLED_BYTES_MIN:
            path.rename(self._spare_path())
        else:
            path.unlink()
        self._charge(-status.st_size)
        self._trim_pool()

    def empty_pool(self) -> int:
        """Give the pool's memory back; returns its bytes. Called under the lock."""
        return sum(self._evict(path, status) for path, status in self._spares())

    def pooled_bytes(self) -> int:
        return sum(status.st_size for _, status in files_in(self._pool))

    # Details; all but _back are called under the lock.

    def _take(self, nbytes: int) -> tuple[Path, int]:
        """A locked file: the one from the pool that fits ``nbytes`` best, within a factor of two, or a new one."""
        path = self.temporary_path()
        fits = []
        for spare, status in self._spares():
            if nbytes <= 2 * status.st_size and status.st_size <= 2 * nbytes:
                # A larger one is cut, which is nearly free; a smaller one must be extended with fresh pages.
                fits.append((max(0, nbytes - status.st_size), status.st_size, spare))
        for _, _, spare in sorted(fits):
            fd = os.open(spare, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if try_lock(fd):
                spare.rename(path)
                return path, fd
            os.close(fd)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try_lock(fd)
        return path, fd

    def _back(self, fd: int, start: int, stop: int, check: Callable[[], None]) -> None:
        """Allocate the pages of ``[start, stop)`` now: later, a full tmpfs would kill the writer with SIGBUS."""
        while start < stop:
            check()
            step = min(BACKED_AT_ONCE_BYTES, stop - start)
            try:
                os.posix_fallocate(fd, start, step)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                with self.locked():
                    if self.empty_pool():
                        continue
                free = os.statvfs(self.root)
                raise CapacityExceeded(
                    f"{stop} bytes do not fit into the shared memory: after {start} of them "
                    f"{free.f_bavail * free.f_frsize} are free; somebody else fills it: free it, or enlarge it with "
                    f"'mount -o remount,size=... {self.root.parent}'"
                ) from error
            start += step

    def _check_limit(self, nbytes: int) -> None:
        if self._charge(0) + nbytes <= self.limit_bytes:
            return
        used = self._recount()
        if used + nbytes > self.limit_bytes:
            raise CapacityExceeded(
                f"{nbytes} bytes do not fit: {used} of {self.limit_bytes} are in use; "
                f"give the tier a larger size=, or delete objects"
            )

    def _charge(self, nbytes: int) -> int:
        """Add to the bytes counted; returns the new count."""
        fd = os.open(self.control / "charged", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            charged = int.from_bytes(os.pread(fd, 8, 0), "little")
            if nbytes:
                charged = max(0, charged + nbytes)
                os.pwrite(fd, charged.to_bytes(8, "little"), 0)
            return charged
        finally:
            os.close(fd)

    def _recount(self) -> int:
        held = self.held_bytes(locked=True)
        self._charge(held - self._charge(0))
        return held

    def _spares(self) -> list[tuple[Path, os.stat_result]]:
        """The files that may be reused, oldest first; those that may not are removed from the pool."""
        good = []
        for path, status in files_in(self._pool):
            if status.st_nlink > 1:
                path.unlink()  # its writer died before it took the other name away: this is an object
            elif status.st_blocks * 512 < status.st_size:
                self._evict(path, status)  # its writer died before all of it was backed
            else:
                good.append((path, status))
        return sorted(good, key=lambda spare: spare[1].st_mtime_ns)

    def _trim_pool(self) -> None:
        spares = self._spares()
        surplus = sum(status.st_size for _, status in spares) - min(
            self.pool_bytes, max(0, self.limit_bytes - self._charge(0))
        )
        for index, (path, status) in enumerate(spares):
            if surplus > 0 or len(spares) - index > POOL_FILES_MAX:
                surplus -= self._evict(path, status)

    @staticmethod
    def _evict(path: Path, status: os.stat_result) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if try_lock(fd):
                os.ftruncate(fd, 0)
                unlock(fd)
        finally:
            os.close(fd)
        path.unlink()
        return status.st_size

    def _spare_path(self) -> Path:
        return self._pool / secrets.token_hex(8)
