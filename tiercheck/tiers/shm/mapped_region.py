"""Ranges of this process's addresses that show files: the memory behind a reservation.

A region stays where it is while the files behind it change. What it shows of a segment stays shown, so that no
page has to be mapped again when the segment comes back from the pool.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from tiercheck.tiers.shm.populate import populate_to_write

__all__ = ["Kept", "MappedRegion", "MappedRegionCache"]

POPULATED_AT_ONCE_BYTES = 64 << 10
"""Meanwhile nothing else in this process can be mapped or unmapped, and training's first step maps hundreds of buffers:
in pieces of 4 MiB it waited for each of them, and took twice as long."""
HUGE_PAGE_BYTES = 2 << 20
LOOKED_AT_ONCE = 8

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HIDDEN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MappedRegion:
    """``room`` bytes of addresses, with nothing behind them at first.

    Unmapped when neither the region nor a view of it is left.
    """

    def __init__(self, room: int) -> None:
        aligned = HUGE_PAGE_BYTES if room >= HUGE_PAGE_BYTES else mmap.PAGESIZE
        nbytes = room + aligned
        base = _map(None, nbytes, _PROT_NONE, _HIDDEN, -1, 0)
        self.room = room
        self.address = -(-base // aligned) * aligned
        self.shown_bytes = 0
        """So many of the segment's file are mapped, from its beginning."""
        self._populated_bytes = 0
        self._behind_bytes = 0
        self._lent: weakref.ref[ctypes.Array[ctypes.c_ubyte]] | None = None
        self._unpin: list[Callable[[], None]] = []
        self._end = weakref.finalize(self, _unmap, base, nbytes, self._unpin)
        self._end.atexit = False  # views may outlive everything else

    def show(self, fd: int, nbytes: int) -> None:
        """Map the first ``nbytes`` of ``fd``, whole pages: the file that is shown already, or else the first one."""
        if nbytes > self.shown_bytes:
            self._map_at(self.shown_bytes, nbytes - self.shown_bytes, fd, self.shown_bytes)
        # What was shown beyond is left to show_behind and hide.
        self.shown_bytes = nbytes
        self._populated_bytes = min(self._populated_bytes, nbytes)

    def show_behind(self, fd: int, nbytes: int) -> None:
        """Map the first ``nbytes`` of another file behind what is shown."""
        self._map_at(self.shown_bytes, nbytes, fd, 0)
        self._behind_bytes = nbytes

    def hide_behind(self) -> None:
        """Take away what :meth:`show_behind` has mapped."""
        if self._behind_bytes:
            _map(self.address + self.shown_bytes, self._behind_bytes, _PROT_NONE, _HIDDEN | _MAP_FIXED, -1, 0)
            self._behind_bytes = 0

    def cut(self, nbytes: int) -> None:
        """The file is only ``nbytes`` long by now: the pages after that are gone."""
        self._populated_bytes = min(self._populated_bytes, nbytes - nbytes % mmap.PAGESIZE)

    def populate(self, check: Callable[[], None]) -> None:
        """Enter what is shown into the page table now, at a fraction of the cost of a fault each."""
        while self._populated_bytes < self.shown_bytes:
            check()
            nbytes = min(POPULATED_AT_ONCE_BYTES, self.shown_bytes - self._populated_bytes)
            populate_to_write(self.address + self._populated_bytes, nbytes)
            self._populated_bytes += nbytes

    def lend(self, nbytes: int) -> memoryview:
        """The first ``nbytes``: writable, format ``B``. The region lives for as long as any view made of it."""
        exporter = self._exporter(nbytes)
        self._lent = weakref.ref(exporter)
        return memoryview(exporter).cast("B")

    def lend_to_read(self, nbytes: int, fd: int) -> memoryview:
        """The same, to any number of readers. ``fd`` is closed once no view that was made of it is left.

        Read-only for whoever respects that: the pages can be written to, and what ignores it, as ``torch.frombuffer``
        does, would write to the object.
        """
        exporter = self._exporter(nbytes)
        _lent_to_read[fd] = weakref.finalize(exporter, _close_lent, fd)
        _lent_to_read[fd].atexit = False
        return memoryview(exporter).cast("B").toreadonly()

    @property
    def is_lent(self) -> bool:
        """Whether somebody has the memory to write to: the view, a slice of it, an array made of it."""
        return self._lent is not None and self._lent() is not None

    # Pinning.

    @property
    def is_pinned(self) -> bool:
        return bool(self._unpin)

    def pinned(self, undo: Callable[[], None]) -> None:
        """What is shown was pinned; ``undo`` takes that back, and is called before the memory goes."""
        self._unpin.append(undo)

    def unpin(self) -> None:
        while self._unpin:
            self._unpin.pop()()

    def _exporter(self, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        exporter = (ctypes.c_ubyte * nbytes).from_address(self.address)
        exporter.region = self  # type: ignore[attr-defined]  # so that it lives as long as the buffer
        return exporter

    def _map_at(self, at: int, nbytes: int, fd: int, offset: int) -> None:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        _map(self.address + at, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)


_lent_to_read: dict[int, weakref.finalize[..., Any]] = {}
"""By the open file, what closes it."""


def _close_lent(fd: int) -> None:
    # Not unlocked first: another view may be of the same open file.
    del _lent_to_read[fd]
    os.close(fd)


def _leave_to_parent() -> None:
    """A forked child, such as a data loader's worker, would hold the locks of what its parent was just reading, and so
    the memory, for as long as it lives."""
    for fd, finalizer in list(_lent_to_read.items()):
        finalizer.detach()
        _close_lent(fd)


os.register_at_fork(after_in_child=_leave_to_parent)


def _map(address: int | None, nbytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    found = _mmap(address, nbytes, prot, flags, fd, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _unmap(base: int, nbytes: int, unpin: list[Callable[[], None]]) -> None:
    while unpin:
        unpin.pop()()
    _munmap(base, nbytes)


class Kept(NamedTuple):
    region: MappedRegion
    mtime_ns: int
    """Of the file, when it was last ours: if it is another by now, others have had the file."""
    fd: int
    """To look at the file."""


class _Pinned:
    def __init__(self, kept: Mapping[int, Kept]) -> None:
        self._kept = kept

    def __contains__(self, inode: object) -> bool:
        kept = self._kept.get(inode) if isinstance(inode, int) else None
        return kept is not None and kept.region.is_pinned


class MappedRegionCache:
    """Regions on segments that this process had, for when their files come back from the pool.

    Cached regions are read-only until their file is taken from the pool. Holders of the file lock may read them.
    Whoever takes a file has it alone, so a cached region is as good as a new one, and faster. Each region holds a
    descriptor; they take at most a quarter of those that this process may have.
    """

    def __init__(self, kept_max: int) -> None:
        descriptors_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.kept_max = kept_max if descriptors_max == resource.RLIM_INFINITY else min(kept_max, descriptors_max // 4)
        self._kept: dict[int, Kept] = {}  # by inode, the least recently looked at first
        self._lock = threading.Lock()

    def __contains__(self, inode: object) -> bool:
        return inode in self._kept

    @property
    def pinned(self) -> Container[int]:
        """The inodes whose regions are pinned."""
        return _Pinned(self._kept)

    def keep(self, region: MappedRegion, fd: int) -> None:
        """Take over the region on the open file ``fd``."""
        status = os.fstat(fd)
        try:
            fd = os.dup(fd)
        except OSError:
            return  # too many are open: the region goes, and a later one costs what a new one costs
        with self._lock:
            if status.st_ino in self._kept:  # of a file that is gone, since inodes' numbers come round again
                self._forget(status.st_ino)
            self._kept[status.st_ino] = Kept(region, status.st_mtime_ns, fd)
            self._prune()

    def find(self, fd: int) -> MappedRegion | None:
        """The region on that open file, if nobody else has had the file since; it stays kept."""
        status = os.fstat(fd)
        with self._lock:
            kept = self._kept.get(status.st_ino)
        return kept.region if kept is not None and kept.mtime_ns == status.st_mtime_ns else None

    def take(self, inode: int) -> Kept | None:
        """The region, if there is one. Its descriptor is closed."""
        with self._lock:
            kept = self._kept.pop(inode, None)
        if kept is not None:
            os.close(kept.fd)
        return kept

    def clear(self) -> None:
        with self._lock:
            while self._kept:
                self._forget(next(iter(self._kept)))

    def counts(self) -> tuple[int, int]:
        """Regions, and how many of them are pinned."""
        with self._lock:
            return len(self._kept), sum(kept.region.is_pinned for kept in self._kept.values())

    def _prune(self) -> None:
        # A file without a name never comes back, and its region would hold its memory. A few at a time are looked at.
        for inode in list(self._kept)[:LOOKED_AT_ONCE]:
            if os.fstat(self._kept[inode].fd).st_nlink:
                self._kept[inode] = self._kept.pop(inode)
            else:
                self._forget(inode)
        while len(self._kept) > self.kept_max:
            self._forget(next(iter(self._kept)))

    def _forget(self, inode: int) -> None:
        os.close(self._kept.pop(inode).fd)
