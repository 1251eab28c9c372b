"""How a disk wants to be written to: block size and depth, found by a short trial.

Most disks reach their bandwidth with the default, 4 blocks of 4 MiB at a time. The trial finds those that do not,
and never takes longer than a fraction of a second; what it finds is kept for the device.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tiercheck.tiers.posix.direct import preallocate, reopen_direct
from tiercheck.types import bytes_text

__all__ = ["CANDIDATES", "Geometry", "choose", "measure_geometry"]


@dataclass(frozen=True)
class Geometry:
    """``depth`` transfers of ``block_bytes`` at a time."""

    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{bytes_text(self.block_bytes).replace('.0', '')} x {self.depth}"


MIB = 1 << 20
CANDIDATES = (Geometry(4 * MIB, 4), Geometry(4 * MIB, 1), Geometry(16 * MIB, 2), Geometry(1 * MIB, 8))
"""The first is the default."""
TRIAL_BYTES = 32 * MIB
TRIALS_S_MAX = 0.25
ROUNDS = 2
BETTER_BY = 1.15
"""Another than the default is taken where it was at least this many times as fast: a trial is short, and noisy."""

_known: dict[int, Geometry] = {}
_one_at_a_time = threading.Lock()


def measure_geometry(fd: int, clock: Callable[[], float] = time.perf_counter) -> Geometry:
    """What suits the device that holds ``fd``, an empty file of ours on which direct transfers work.

    The device is asked once a process. The file is empty again afterwards. Errors: ``OSError``, ``ENOSPC`` included.
    """
    device = os.fstat(fd).st_dev
    with _one_at_a_time:
        if device not in _known:
            room = os.fstatvfs(fd)
            # A small or nearly full disk is left in peace.
            ample = room.f_bavail * room.f_frsize >= 16 * TRIAL_BYTES
            _known[device] = choose(_try_all(fd, clock) if ample else {})
        return _known[device]


def choose(bytes_per_s: Mapping[Geometry, float]) -> Geometry:
    """The fastest, or the default where it is nearly as fast, or was not measured."""
    default = CANDIDATES[0]
    if default not in bytes_per_s:
        return default
    best = max(bytes_per_s, key=bytes_per_s.__getitem__)
    return best if bytes_per_s[best] > BETTER_BY * bytes_per_s[default] else default


def _try_all(fd: int, clock: Callable[[], float]) -> dict[Geometry, float]:
    """The best rate of each candidate that was measured in time."""
    deadline = clock() + TRIALS_S_MAX
    rates: dict[Geometry, float] = {}
    preallocate(fd, TRIAL_BYTES)
    direct_fd = reopen_direct(fd, os.O_WRONLY)
    try:
        with (
            mmap.mmap(-1, max(candidate.block_bytes for candidate in CANDIDATES)) as memory,
            memoryview(memory) as view,
        ):
            for candidate in CANDIDATES * ROUNDS:
                started = clock()
                if not _write_trial(direct_fd, view, candidate, lambda: clock() < deadline):
                    break
                rates[candidate] = max(rates.get(candidate, 0.0), TRIAL_BYTES / max(clock() - started, 1e-9))
    finally:
        os.close(direct_fd)
        os.ftruncate(fd, 0)
    return rates


def _write_trial(fd: int, view: memoryview, geometry: Geometry, in_time: Callable[[], bool]) -> bool:
    """Whether all of it was written in time."""
    blocks = itertools.count()
    count = TRIAL_BYTES // geometry.block_bytes

    def drain(part: memoryview) -> bool:
        while (block := next(blocks)) < count:
            if not in_time():
                return False
            os.pwritev(fd, [part], block * geometry.block_bytes)
        return True

    with view[: geometry.block_bytes] as part, ThreadPoolExecutor(geometry.depth) as threads:
        return all(list(threads.map(drain, [part] * geometry.depth)))
