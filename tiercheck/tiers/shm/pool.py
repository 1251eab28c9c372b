"""Files kept for reuse, and the counts that tell whether there is room.

What a spare is stands in its name, ``<bytes>-<pid>-<start>.<token>``, so that looking for one takes a single reading of
the directory. Its *owner*, ``pid`` and ``start`` (:func:`this_process`), is the process that has it mapped already and
would have it back, 0 if nobody has: a hint, no lock. Everything here is called under the directory's lock.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tiercheck.tiers.posix.files import closed_on_error, try_lock, unlock, unlock_and_close

__all__ = [
    "ANY",
    "NOBODY",
    "SPARE_BYTES_MIN",
    "Counts",
    "PoolAccounting",
    "SegmentPool",
    "Selection",
    "Spare",
    "this_process",
    "whole_pages",
]

SPARE_BYTES_MIN = 128 << 10
"""Smaller files are not worth keeping."""
NOBODY = 0
STARTED = 19
"""Where ``/proc/PID/stat`` says when it began, behind the name: see proc_pid_stat(5)."""
PID_BITS = 22
"""The kernel's largest number of a process has as many."""
BEHIND_START = "."
"""In a token, behind the moment at which the owner began. Older releases take all of it for a token."""
ALIVE_S = 2.0
"""It is asked at each reservation."""
ALIVE_MAX = 256
# What it costs to use a spare that does not fit, per byte (from measurements; only the ratios matter).
GROWTH_COST = 6
MAPPING_COST = 2
TRESPASS_COST = 4
CUT_COST = 1
PERIOD_CHANGES = 256
"""The length of a period, in changes of the pool (a file leaves it or comes back). Each version makes about two: a
file for its differential leaves the pool, and comes back when the differential goes."""
MUCH_LARGER = 2.5
"""A spare is not deleted for a surplus if it is larger than this many times the surplus, unless no smaller one is
left."""


class Kind(NamedTuple):
    """What makes spares equally good, but for where they are mapped."""

    nbytes: int
    owner: int

    @property
    def is_of_another_process(self) -> bool:
        return self.owner not in (NOBODY, this_process()) and alive(self.owner)


class Spare(NamedTuple):
    name: str
    kind: Kind
    inode: int

    @property
    def nbytes(self) -> int:
        return self.kind.nbytes


@dataclass(frozen=True)
class Selection:
    """Which spares suit who takes one."""

    known: Container[int] = ()
    """Inodes that are mapped here already."""
    fixed: Container[int] = ()
    """Inodes whose pages must stay what they are: their files are not cut and not extended."""
    owned: bool = True
    """Those that other living processes would have back may be taken too."""
    ready: Container[int] = ()
    """Inodes that are left: they are what is being made."""


ANY = Selection()


class Counts(NamedTuple):
    """Bytes of objects and temporary files; bytes and number of spares; how often spares came or went; what all of
    them together usually take, 0 if nobody has said."""

    charged: int
    pooled_bytes: int
    pooled_files: int
    changes: int
    expected_bytes: int
    peak_bytes: int
    """The most that was charged of late: since so many ``changes``, and in the period before."""
    peak_before_bytes: int
    peak_since: int
    """The value of ``changes`` when the present period began."""


class PoolAccounting:
    """The counts, in a file. A crash may leave them too high, and a recount puts them right."""

    _LAYOUT = struct.Struct("<8Q")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def read(self) -> Counts:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        return Counts(*self._LAYOUT.unpack(os.pread(self._fd, self._LAYOUT.size, 0).ljust(self._LAYOUT.size, b"\0")))

    def add(self, *, charged: int = 0, pooled_bytes: int = 0, pooled_files: int = 0) -> Counts:
        """Add to the counts; returns the new ones."""
        old = self.read()
        return self._write(
            old._replace(
                charged=max(0, old.charged + charged),
                pooled_bytes=max(0, old.pooled_bytes + pooled_bytes),
                pooled_files=max(0, old.pooled_files + pooled_files),
                changes=old.changes + (pooled_files != 0),
            )
        )

    def expect(self, nbytes: int) -> None:
        """So much is usually taken by all together. What was taken before does not count any more."""
        now = self.read()
        self._write(
            now._replace(expected_bytes=nbytes, peak_bytes=now.charged, peak_before_bytes=0, peak_since=now.changes)
        )

    def needed(self) -> int | None:
        """What objects, temporary files and pool may take together: what is expected, or what was charged at most of
        late, if that is more. So a tier that goes on holding more than expected makes no memory anew. ``None``: nobody
        has said what is expected."""
        now = known = self.read()
        if not known.expected_bytes:
            return None
        now = now._replace(peak_bytes=max(known.peak_bytes, known.charged))
        if known.changes - known.peak_since >= PERIOD_CHANGES:
            now = now._replace(peak_bytes=known.charged, peak_before_bytes=now.peak_bytes, peak_since=known.changes)
        if now != known:
            self._write(now)
        return max(now.expected_bytes, now.peak_bytes, now.peak_before_bytes)

    def set(self, *, charged: int | None = None, pooled: list[Spare] | None = None) -> Counts:
        """Replace what is given."""
        now = self.read()
        return self.add(
            charged=0 if charged is None else charged - now.charged,
            pooled_bytes=0 if pooled is None else sum(spare.nbytes for spare in pooled) - now.pooled_bytes,
            pooled_files=0 if pooled is None else len(pooled) - now.pooled_files,
        )

    def _write(self, counts: Counts) -> Counts:
        assert self._fd is not None
        os.pwrite(self._fd, self._LAYOUT.pack(*counts), 0)
        return counts


class SegmentPool:
    """The files in ``folder``. Counted before they come and after they went, so that a count is never too low.

    The directory is read anew only after another process has changed it, which the count of changes tells.
    """

    def __init__(self, folder: Path, ledger: PoolAccounting) -> None:
        self.folder = folder
        self._accounting = ledger
        self._listed: defaultdict[Kind, dict[str, Spare]] = defaultdict(dict)
        self._listed_at = -1  # that many changes there had been

    def scan(self) -> list[Spare]:
        """All spares, as they are in the directory. Files with other names are removed: they were never finished."""
        self._listed.clear()
        self._listed_at = self._accounting.read().changes
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    kind = kind_of(entry.name)
                except ValueError:
                    (self.folder / entry.name).unlink()
                else:
                    self._listed[kind][entry.name] = Spare(entry.name, kind, entry.inode())
        return [spare for alike in self._listed.values() for spare in alike.values()]

    def listed(self) -> Mapping[Kind, Mapping[str, Spare]]:
        """All spares, by kind and name."""
        if self._accounting.read().changes != self._listed_at:
            self.scan()
        return self._listed

    def path_for(self, nbytes: int, inode: int, owner: int = NOBODY) -> str:
        """A name for a spare to be, which is counted already."""
        pid, start = owner % (1 << PID_BITS), owner >> PID_BITS
        name = f"{nbytes:x}-{pid:x}-{start:x}{BEHIND_START}{secrets.token_hex(8)}"
        spare = Spare(name, Kind(nbytes, owner), inode)
        if self._accounting.add(pooled_bytes=nbytes, pooled_files=1).changes == self._listed_at + 1:
            self._listed_at += 1
            self._listed[spare.kind][spare.name] = spare
        return self._path(spare)

    def take(self, path: str, at_least: int, at_most: int, selection: Selection) -> tuple[int, int] | None:
        """Move the spare that is cheapest to make ``at_least`` to ``at_most`` bytes long to ``path``.

        Returns its descriptor, locked exclusively, and its length; ``None`` if none is within a factor of two.
        """
        for spare in self._by_cost(at_least, at_most, selection):
            fd = self._open(spare)
            if fd is None:
                continue
            with closed_on_error(fd):
                if try_lock(fd) and self._is_whole(spare, fd):
                    os.rename(self._path(spare), path)
                    self._forget(spare)
                    return fd, spare.nbytes
            unlock_and_close(fd)
        return None

    def _by_cost(self, at_least: int, at_most: int, selection: Selection) -> Iterator[Spare]:
        """Those that suit, the cheapest first. There may be hundreds, of a few kinds: no more are looked at than asked
        for."""
        costs: list[tuple[int, bool, Kind]] = []
        for kind in self.listed():
            if at_least > 2 * kind.nbytes or kind.nbytes > 2 * at_most:
                continue
            others = kind.is_of_another_process
            if others and not selection.owned:
                continue
            cost = GROWTH_COST * max(0, at_least - kind.nbytes) + CUT_COST * max(0, kind.nbytes - at_least)
            mapping = (TRESPASS_COST if others else MAPPING_COST) * kind.nbytes
            costs += [(cost, True, kind), (cost + mapping, False, kind)]
        for _, known, kind in sorted(costs):
            stays = whole_pages(at_least) <= whole_pages(kind.nbytes) <= whole_pages(at_most)
            for spare in list(self._listed[kind].values()):
                if (spare.inode in selection.known) != known or spare.inode in selection.ready:
                    continue
                if stays or spare.inode not in selection.fixed:
                    yield spare

    def evict(self, spare: Spare) -> int:
        """Give the memory of the spare back; returns its bytes. Cut first: a mapping would hold the memory."""
        fd = self._open(spare)
        if fd is None:
            return 0
        try:
            # With a second name it is an object, whose writer died before it took this one away.
            if os.fstat(fd).st_nlink == 1 and try_lock(fd):
                os.ftruncate(fd, 0)
                unlock(fd)
        finally:
            os.close(fd)
        self._remove(spare)
        return spare.nbytes

    def bytes_of_other_processes(self) -> int:
        return sum(kind.nbytes * len(alike) for kind, alike in self.listed().items() if kind.is_of_another_process)

    def count(self, nbytes: int, among: Container[int]) -> int:
        """How many spares of that length are among these inodes."""
        alike = [spares for kind, spares in self.listed().items() if kind.nbytes == nbytes]
        return sum(spare.inode in among for spares in alike for spare in spares.values())

    def disown(self) -> None:
        """Leave this process's spares to everybody."""
        ours = [
            spare for kind, alike in self.listed().items() if kind.owner == this_process() for spare in alike.values()
        ]
        for spare in ours:
            os.rename(self._path(spare), self.path_for(spare.nbytes, spare.inode))
            self._forget(spare)

    def recount(self) -> None:
        """Remove what may not be reused, and count the rest."""
        for spare in self.scan():
            if (fd := self._open(spare)) is not None:
                try:
                    self._is_whole(spare, fd)
                finally:
                    os.close(fd)
        self._accounting.set(pooled=self.scan())

    def trim(self, bytes_max: int, files_max: int) -> None:
        """Evict the oldest until no more than this is kept. Those that are much larger than what must go stay as long
        as others can go: making them anew would cost more."""
        counts = self._accounting.read()
        if counts.pooled_bytes <= bytes_max and counts.pooled_files <= files_max:
            return
        spares = sorted(self.scan(), key=lambda spare: os.lstat(self._path(spare)).st_mtime_ns)
        surplus = self._accounting.set(pooled=spares).pooled_bytes - bytes_max
        # A few more than asked for: looking through all of them at each further one would be slow.
        files = len(spares) if len(spares) <= files_max else files_max * 7 // 8
        for spare in spares[: len(spares) - files]:
            surplus -= self.evict(spare)
        left = spares[len(spares) - files :]
        while surplus > 0 and left:
            fitting = (spare for spare in left if spare.nbytes <= MUCH_LARGER * surplus)
            spare = next(fitting, None) or min(left, key=lambda each: each.nbytes)
            left.remove(spare)
            surplus -= self.evict(spare)

    def _path(self, spare: Spare) -> str:
        return f"{self.folder}/{spare.name}"

    def _open(self, spare: Spare) -> int | None:
        try:
            return os.open(self._path(spare), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._forget(spare)  # counted, but its maker failed before it came
            return None

    def _is_whole(self, spare: Spare, fd: int) -> bool:
        """Whether the file may be reused by who has its lock; otherwise it is removed."""
        status = os.fstat(fd)
        if status.st_nlink == 1 and status.st_size == spare.nbytes <= status.st_blocks * 512:
            return True
        if status.st_nlink == 1:
            os.ftruncate(fd, 0)  # its writer died before all of it was backed
        # Otherwise it is an object, whose writer died before it took this name away.
        self._remove(spare)
        return False

    def _remove(self, spare: Spare) -> None:
        os.unlink(self._path(spare))
        self._forget(spare)

    def _forget(self, spare: Spare) -> None:
        if self._accounting.add(pooled_bytes=-spare.nbytes, pooled_files=-1).changes == self._listed_at + 1:
            self._listed_at += 1
            alike = self._listed[spare.kind]
            alike.pop(spare.name, None)
            if not alike:
                del self._listed[spare.kind]


def whole_pages(nbytes: int) -> int:
    """``nbytes``, up to the next page boundary."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def this_process() -> int:
    """What it is called as an owner. In a container, the process that is started after it often has its number."""
    return owner_of(os.getpid())


@lru_cache(maxsize=4)
def owner_of(pid: int) -> int:
    return began(pid) << PID_BITS | pid


def kind_of(name: str) -> Kind:
    """Of a spare. Errors: ``ValueError`` if the file is none."""
    nbytes, pid, token = name.split("-")
    start, mark, _ = token.partition(BEHIND_START)
    owner = (int(start, 16) << PID_BITS if mark else 0) | int(pid, 16)
    return Kind(int(nbytes, 16), owner)


def alive(owner: int) -> bool:
    """Whether there is such a process, or was a moment ago; in doubt (one of another container) not."""
    now = time.monotonic()
    looked_at, found = _alive.get(owner, (-math.inf, False))
    if now - looked_at > ALIVE_S:
        found = 0 < began(owner % (1 << PID_BITS)) == owner >> PID_BITS
        if len(_alive) >= ALIVE_MAX:
            _alive.clear()
        _alive[owner] = now, found
    return found


_alive: dict[int, tuple[float, bool]] = {}
"""By owner, when somebody looked, and what he found."""


def began(pid: int) -> int:
    """When the process began, in ticks since the machine did; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()  # of all its threads the kernel would add up times
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[STARTED])
