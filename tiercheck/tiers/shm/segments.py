"""An object directory in shared memory whose files are recycled.

Fresh pages of a tmpfs cost an allocation and a clearing each, so filling a new file is many times slower than
filling one whose pages are there already. What is overwritten or deleted therefore goes to a pool, and the
next writer takes its file from there. Beside what :mod:`tiercheck.tiers.posix.directories.local` keeps::

    pool/      files for reuse; free space, as far as anybody outside is concerned
    charged    bytes of the objects and temporary files, and of the pool (:class:`.PoolAccounting`)

A file is reused only by who holds its exclusive lock. A reader holds a shared one for as long as its mapping
lives, so what it sees never changes. A file that leaves the pool for good is cut to nothing first: its pages
are free at once.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Container
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tiercheck.errors import CapacityExceeded, FileSystemFull, Transient
from tiercheck.tiers.posix.directories.local import ObjectDirectory
from tiercheck.tiers.posix.directories.object_files import CONTROL, Temporary, not_found
from tiercheck.tiers.posix.files import try_lock, unlock, unlock_and_close
from tiercheck.tiers.shm.hugepages import back_with_huge_pages
from tiercheck.tiers.shm.pool import ANY, NOBODY, SPARE_BYTES_MIN, PoolAccounting, SegmentPool, Selection, whole_pages
from tiercheck.types import ObjectInfo, PutMode

__all__ = ["Segment", "SegmentDirectory"]

POOL_FILES_MAX = 512
"""Two bases, and the differentials of the interval between them."""
BACKED_AT_ONCE_BYTES = 32 << 20
OPEN_ATTEMPTS_MAX = 1000


@dataclass(frozen=True)
class Segment:
    """A temporary file of ``nbytes``, all of them backed by memory once its backing was made."""

    temporary: Temporary
    nbytes: int
    recycled_bytes: int
    """So many of them are from the pool: pages that need no clearing."""
    inode: int
    mtime_ns: int
    """When the file was last published, cut or extended before it came here."""

    @property
    def fd(self) -> int:
        return self.temporary.fd


def at_once(work: Callable[[], None]) -> None:
    work()


class SegmentDirectory(ObjectDirectory):
    """``limit_bytes`` bounds objects, temporary files and pool together; ``pool_bytes`` the pool alone."""

    makes_folders_first = True

    def __init__(self, root: Path) -> None:
        super().__init__(root, durable=False)
        self.limit_bytes = 0
        self.size: int | None = None
        """What ``limit_bytes`` is to be. It is less while others leave less; ``None``: it is what they leave."""
        self.pool_bytes = 0
        self.advise_huge_pages = False
        self._is_prepared = False
        self._taken: set[Temporary] = set()
        self._accounting = PoolAccounting(self.control / "charged")
        self._spares = SegmentPool(self.control / "pool", self._accounting)

    def prepare(self) -> None:
        # The namespace is this user's alone, and nobody moves it: whoever removes it waits for its lock.
        self.beneath.hold()
        self.beneath.make(f"{CONTROL}/pool")
        super().prepare()
        with self.locked():
            self._accounting.set(charged=self.held_bytes(locked=True))
            self._spares.recount()
        self._is_prepared = True

    def prepare_to_read(self) -> None:
        super().prepare_to_read()
        self.beneath.hold()

    def close(self) -> None:
        """Let go of what is kept for this process, and of what a thread that was interrupted (Ctrl-C) has left behind;
        called once no other call runs."""
        for temporary in list(self._taken):
            self.discard(temporary, mapped=True)
        if self._is_prepared:
            self._is_prepared = False
            with suppress(FileNotFoundError), self.locked():  # removed by force, with all that was kept
                self._spares.disown()
        self._accounting.close()
        self.beneath.release()

    # Writing.

    def create_temporary(self, nbytes: int, check: Callable[[], None]) -> Temporary:
        """A file of ``nbytes``, all of them backed by memory. Errors: ``CapacityExceeded``."""
        return self.take(nbytes, nbytes, check, Selection(owned=False)).temporary

    def take(
        self,
        at_least: int,
        at_most: int,
        check: Callable[[], None],
        selection: Selection = ANY,
        *,
        new_bytes: int = 0,
        empties_pool: bool = True,
        backing: Callable[[Callable[[], None]], None] = at_once,
    ) -> Segment:
        """A file of ``at_least`` to ``at_most`` bytes: the spare that fits best, cut or extended, or a new one, of
        ``new_bytes`` if that is within these bounds, and there is room.
        ``empties_pool``: if there is no memory but what is kept for reuse, that is given up. ``backing``: calls what it
        is given, which makes the memory that the file lacks.

        Errors: ``CapacityExceeded``; then nothing is kept.
        """
        path = self.temporary_path()
        with ExitStack() as undo:
            with self.locked() as lock_fd:
                stamp_ns = self.stamps.next_ns(lock_fd)
                room = self._room_for(at_least)
                # Counted before it is there, sized before it is backed: dying in between leaves no count too low.
                self._accounting.add(charged=at_most)
                found = self._spares.take(path, at_least, at_most, selection)
                if found is None:
                    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    recycled_bytes, nbytes = 0, new_bytes if at_least <= new_bytes <= min(at_most, room) else at_least
                else:
                    fd, recycled_bytes = found
                    nbytes = min(max(at_least, whole_pages(recycled_bytes)), at_most)
                    if nbytes > room:
                        nbytes = at_least
                undo.callback(unlock_and_close, fd)  # what was counted for it is counted anew when room is short
                try_lock(fd)
                status = os.fstat(fd)
                if nbytes != recycled_bytes:
                    os.ftruncate(fd, nbytes)
                self._accounting.add(charged=nbytes - at_most)
                self._trim_pool()
            undo.pop_all()
        recycled_bytes = min(recycled_bytes, nbytes)
        temporary = Temporary(path, fd, stamp_ns)
        self._taken.add(temporary)
        segment = Segment(temporary, nbytes, recycled_bytes, status.st_ino, status.st_mtime_ns)
        if recycled_bytes < nbytes:
            try:
                backing(lambda: self._back(fd, recycled_bytes, nbytes, check, empties_pool=empties_pool))
            except BaseException:
                self.destroy(segment)
                raise
        return segment

    def publish_beginning(self, segment: Segment, nbytes: int, key: str, mode: PutMode) -> ObjectInfo:
        """Cut it to ``nbytes``, and publish that as :meth:`publish` does, under one lock."""
        self.check_key(key)
        with self.locked():
            if nbytes != segment.nbytes:  # under the lock: a recount in between would count the cut twice
                os.ftruncate(segment.fd, nbytes)
                self._accounting.add(charged=nbytes - segment.nbytes)
            info = self.stamped(segment.temporary, key)
            self.give_name(segment.temporary, key, mode)
        return info

    def extend(self, segment: Segment, nbytes: int, check: Callable[[], None]) -> Segment:
        """Make it ``nbytes`` long, backed. Errors: ``CapacityExceeded``; then it is as it was."""
        with self.locked():
            self._accounting.add(charged=nbytes - segment.nbytes)
            os.ftruncate(segment.fd, nbytes)
        try:
            self._back(segment.fd, segment.nbytes, nbytes, check)
        except BaseException:
            with self.locked():
                os.ftruncate(segment.fd, segment.nbytes)
                self._accounting.add(charged=segment.nbytes - nbytes)
            raise
        return replace(segment, nbytes=nbytes)

    def discard(self, temporary: Temporary, *, mapped: bool = False, owner: int = NOBODY) -> None:
        """Close the file; one that was not published goes to the pool, as ``owner``'s.

        ``mapped``: its writer cannot be kept from its mapping. The mapping then keeps the file's lock, shared,
        so that nobody reuses the file while it lives.
        """
        self._taken.discard(temporary)
        try:
            if temporary.exists():
                with self.locked():
                    if mapped:
                        try_lock(temporary.fd, shared=True)
                    self._retire(None, temporary.path, os.fstat(temporary.fd), owner)
        finally:
            (os.close if mapped else unlock_and_close)(temporary.fd)

    def destroy(self, segment: Segment) -> None:
        """Give the memory of an unpublished file back."""
        self._taken.discard(segment.temporary)
        try:
            with self.locked():
                os.ftruncate(segment.fd, 0)
                os.unlink(segment.temporary.path)
                self._accounting.add(charged=-segment.nbytes)
        finally:
            unlock_and_close(segment.fd)

    def replace(self, temporary: Temporary, folder: int, name: str, current: os.stat_result | None) -> None:
        if current is not None and current.st_size >= SPARE_BYTES_MIN:
            # The old file gets its name in the pool first, so that at no moment there is no object. Dying in between
            # leaves a file with two names, which nobody reuses.
            os.link(name, self._spares.path_for(current.st_size, current.st_ino), src_dir_fd=folder)
        super().replace(temporary, folder, name, current)
        if current is not None:
            self._accounting.add(charged=-current.st_size)
            self._trim_pool()

    def link(self, temporary: Temporary, folder: int, name: str) -> None:
        # One kernel has all clients of its memory, so the lock excludes them; a file with two names is not reused.
        self.replace(temporary, folder, name, None)

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
                    unlock_and_close(fd)
            time.sleep(min(attempt, 10) * 0.0001)
        raise Transient("the object is replaced faster than it can be opened; try again", key=key)

    def unlock_object(self, fd: int) -> None:
        unlock(fd)

    # Removing.

    def _lock_reaches(self, host: str) -> bool:
        """Memory is one kernel's, whatever name a container of it has for its host."""
        return True

    def retire(self, folder: int, name: str, status: os.stat_result) -> None:
        self._retire(folder, name, status, NOBODY)

    def empty_pool(self) -> int:
        """Give the pool's memory back; returns its bytes. Called under the lock."""
        return sum(self._spares.evict(spare) for spare in self._spares.scan())

    def pooled_bytes(self) -> int:
        return sum(spare.nbytes for spare in self._spares.scan())

    def expect(self, nbytes: int) -> None:
        """Objects, temporary files and pool usually take so much together: what the pool has beyond goes."""
        with self.locked():
            self._accounting.expect(nbytes)
            self._trim_pool()

    def check_room_for_spares(self, nbytes: int) -> None:
        """Errors: ``CapacityExceeded`` if that many bytes of spares of this process cannot be kept."""
        with self.locked():
            self._room_for(nbytes)
            others = self._spares.bytes_of_other_processes()
        if others + nbytes > self.pool_bytes:
            raise CapacityExceeded(
                f"{nbytes} bytes cannot be kept ready: the pool holds {self.pool_bytes} bytes at most, and other "
                f"processes keep {others} of them; give the tier a larger pool= (or size=)"
            )

    def count_spares(self, nbytes: int, among: Container[int]) -> int:
        """How many spares of that length are among these inodes."""
        with self.locked():
            return self._spares.count(nbytes, among)

    # Details; all but _back are called under the lock.

    def _retire(self, folder: int | None, name: str, status: os.stat_result, owner: int) -> None:
        if status.st_size >= SPARE_BYTES_MIN:
            os.rename(name, self._spares.path_for(status.st_size, status.st_ino, owner), src_dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
        self._accounting.add(charged=-status.st_size)
        self._trim_pool()

    def _trim_pool(self) -> None:
        needed = self._accounting.needed()
        most = self.limit_bytes if needed is None else min(self.limit_bytes, needed)
        self._spares.trim(min(self.pool_bytes, max(0, most - self._accounting.read().charged)), POOL_FILES_MAX)

    def _back(self, fd: int, start: int, stop: int, check: Callable[[], None], *, empties_pool: bool = True) -> None:
        """Allocate the pages of ``[start, stop)`` now: later, a full tmpfs would kill the writer with SIGBUS."""
        while start < stop:
            check()
            step = min(BACKED_AT_ONCE_BYTES, stop - start)
            try:
                if self.advise_huge_pages:
                    back_with_huge_pages(fd, start, step)
                os.posix_fallocate(fd, start, step)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                with self.locked():
                    self.reclaim()
                    if empties_pool and self.empty_pool():
                        continue
                free = os.statvfs(self.root)
                raise FileSystemFull(
                    f"{stop} bytes do not fit into the shared memory: after {start} of them "
                    f"{free.f_bavail * free.f_frsize} are free; somebody else fills it: free it, or enlarge it with "
                    f"'mount -o remount,size=... {self.root.parent}'"
                ) from error
            start += step

    def _room_for(self, nbytes: int) -> int:
        """The bytes left under the limit, ``nbytes`` at least. Errors: ``CapacityExceeded``."""
        room = self.limit_bytes - self._accounting.read().charged
        if room < nbytes:
            # What has died since the tier was opened makes room now, and may have left the count too high.
            self.reclaim()
            used = self._accounting.set(charged=self.held_bytes(locked=True)).charged
            room = self.limit_bytes - used
            if room < nbytes and self.limit_bytes != self.size:  # others held memory when the tier was opened
                memory = os.statvfs(self.root)
                free = memory.f_bavail * memory.f_frsize
                others = memory.f_blocks * memory.f_frsize - free - used
                most = used + free
                self.limit_bytes = max(self.limit_bytes, most if self.size is None else min(most, self.size))
                room = self.limit_bytes - used
        if room < nbytes:
            message = f"{nbytes} bytes do not fit: {used} of {self.limit_bytes} are in use; "
            if self.limit_bytes == self.size:
                raise CapacityExceeded(f"{message}give the tier a larger size=, or delete objects")
            enlarge = f"enlarge the shared memory with 'mount -o remount,size=... {self.root.parent}'"
            if others < nbytes - room:
                raise CapacityExceeded(f"{message}delete objects, or {enlarge}")
            raise FileSystemFull(f"{message}others hold {others} of the shared memory: free those, or {enlarge}")
        return room
