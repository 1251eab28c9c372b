"""Segments mapped for writing: the memory behind a reservation of the shm tier."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable

from tiercheck.errors import CapacityExceeded
from tiercheck.tiers.directory import Temporary
from tiercheck.tiers.segments import POOLED_BYTES_MIN, SegmentDirectory
from tiercheck.types import ObjectInfo, PutMode

__all__ = ["MappedSegment", "MappingCache"]

MADV_POPULATE_WRITE = 23
POPULATED_AT_ONCE_BYTES = 4 << 20
"""The interpreter stands still while pages are populated: a millisecond at a time."""
KEPT_MAPPINGS_MAX = 256
COPIED_SURPLUS_BYTES_MIN = 1 << 20
"""A reservation that is used up but for less than this is cut to what was used."""


class MappingCache:
    """Mappings of segments that this process has published, for when their files come back from the pool.

    Mapping a file anew costs a page fault a page. Who takes a file from the pool has it alone, so that a mapping
    of it that was kept is as good as a new one, and faster. A kept mapping is never touched before that.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[mmap.mmap, int]] = {}  # inode -> its mapping, and a descriptor to look at it
        self._lock = threading.Lock()

    def keep(self, mapping: mmap.mmap, fd: int) -> None:
        """Take over the mapping of the open file ``fd``, and ``fd``."""
        with self._lock:
            self._kept[os.fstat(fd).st_ino] = (mapping, fd)
            self._prune()

    def take(self, inode: int) -> mmap.mmap | None:
        with self._lock:
            self._prune()
            mapping, fd = self._kept.pop(inode, (None, -1))
            if fd >= 0:
                os.close(fd)
            return mapping

    def clear(self) -> None:
        with self._lock:
            while self._kept:
                self._forget(next(iter(self._kept)))

    def _prune(self) -> None:
        # A file without a name never comes back, and its mapping would hold its memory.
        for inode in [inode for inode, (_, fd) in self._kept.items() if not os.fstat(fd).st_nlink]:
            self._forget(inode)
        while len(self._kept) > KEPT_MAPPINGS_MAX:
            self._forget(next(iter(self._kept)))

    def _forget(self, inode: int) -> None:
        mapping, fd = self._kept.pop(inode)
        mapping.close()
        os.close(fd)


class MappedSegment:
    """A temporary file of ``nbytes``, backed, populated and mapped; ``view`` is its memory."""

    def __init__(
        self,
        directory: SegmentDirectory,
        cache: MappingCache,
        temporary: Temporary,
        mapping: mmap.mmap | None,
        nbytes: int,
    ) -> None:
        self.nbytes = nbytes
        self.view = memoryview(mapping)[:nbytes] if mapping is not None else memoryview(bytearray())
        self._directory = directory
        self._cache = cache
        self._temporary: Temporary | None = temporary
        self._mapping = mapping
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, directory: SegmentDirectory, cache: MappingCache, nbytes: int, check: Callable[[], None]
    ) -> MappedSegment:
        temporary = directory.create_temporary(nbytes, check)
        mapping: mmap.mmap | None = None
        try:
            if nbytes:  # nothing cannot be mapped
                mapping = cache.take(os.fstat(temporary.fd).st_ino)
                populated = 0
                if mapping is None:
                    mapping = mmap.mmap(temporary.fd, nbytes)
                else:
                    populated = min(len(mapping), nbytes)
                    mapping.resize(nbytes)
                populate(mapping, populated, nbytes, check)
            return cls(directory, cache, temporary, mapping, nbytes)
        except BaseException:
            if mapping is not None:
                mapping.close()
            directory.discard(temporary)
            raise

    def publish(self, key: str, nbytes: int, mode: PutMode, check: Callable[[], None]) -> ObjectInfo:
        """Make the first ``nbytes`` the object, once. :meth:`give_back` must follow, whether it raises or not."""
        with self._lock:
            temporary = self._temporary
            if temporary is None:
                raise RuntimeError(f"the segment for {key!r} was given back before it could be published")
            surplus = self.nbytes - nbytes
            if surplus >= COPIED_SURPLUS_BYTES_MIN and surplus > nbytes // 2:
                info = self._publish_copy(key, nbytes, mode, check)
                if info is not None:
                    self._close(temporary, self._release_view(self.nbytes))
                    return info
            alone = self._release_view(nbytes)
            try:
                check()
                self._directory.shrink(temporary, self.nbytes, nbytes)
                return self._directory.publish(temporary, key, mode)
            finally:
                self._close(temporary, alone)

    def _publish_copy(self, key: str, nbytes: int, mode: PutMode, check: Callable[[], None]) -> ObjectInfo | None:
        """Publish a copy of the first ``nbytes``, so that the segment stays as long as it is for its next use.

        Cutting it would give away pages that are slower to get back than these are to copy. ``None`` where there is
        no room for both.
        """
        try:
            with self.view[:nbytes] as content:
                return self._directory.store(key, [content], mode, check)
        except CapacityExceeded:
            return None

    def give_back(self) -> None:
        """Unmap and close; a segment that was not published goes to the pool. Idempotent."""
        with self._lock:
            if self._temporary is not None:
                self._close(self._temporary, self._release_view(self.nbytes))

    def _release_view(self, nbytes: int) -> bool:
        """Whether nobody else has the memory: no slice of the view, no array made of it.

        If so, it is cut to ``nbytes``.
        """
        try:
            self.view.release()
            if self._mapping is not None:
                self._mapping.resize(max(nbytes, 1))  # refused while somebody has the memory
        except BufferError:
            return False
        return True

    def _close(self, temporary: Temporary, alone: bool) -> None:
        mapping, self._mapping, self._temporary = self._mapping, None, None
        if mapping is not None and alone:
            if len(mapping) >= POOLED_BYTES_MIN:
                self._cache.keep(mapping, os.dup(temporary.fd))
            else:
                mapping.close()
        self._directory.discard(temporary, mapped=not alone)


def populate(mapping: mmap.mmap, start: int, stop: int, check: Callable[[], None]) -> None:
    """Enter the pages of ``[start, stop)`` into the page table now, at a fraction of the cost of a fault each."""
    start -= start % mmap.PAGESIZE
    for at in range(start, stop, POPULATED_AT_ONCE_BYTES):
        check()
        try:
            mapping.madvise(MADV_POPULATE_WRITE, at, min(POPULATED_AT_ONCE_BYTES, stop - at))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # Linux before 5.14: the first writes pay, and nothing else changes
