"""Modification times that no other file of a directory ever had, so that a reused inode cannot repeat an etag."""

from __future__ import annotations

import os
import time

__all__ = ["Stamps"]


class Stamps:
    """Of one directory. The last one that was given out is the content of its lock file; whoever asks holds the lock,
    and gives its descriptor."""

    def __init__(self) -> None:
        self._step_ns = 1

    def fit(self, lock_fd: int) -> None:
        """Give out no finer ones than the file system keeps."""
        self._step_ns = kept_step_ns(lock_fd)

    def next_ns(self, lock_fd: int) -> int:
        """A new one, whatever the clock does."""
        last_ns = int.from_bytes(os.pread(lock_fd, 8, 0), "little")
        step_ns = self._step_ns
        stamp_ns = (max(time.time_ns(), last_ns + step_ns) + step_ns - 1) // step_ns * step_ns
        os.pwrite(lock_fd, stamp_ns.to_bytes(8, "little"), 0)
        return stamp_ns


def kept_step_ns(fd: int) -> int:
    """The finest step of modification times that the file system of ``fd`` keeps: 1 ns, 100 ns, or 2 s (FAT)."""
    probe = 1_700_000_001_234_567_891
    os.utime(fd, ns=(probe, probe))
    kept = os.fstat(fd).st_mtime_ns
    return next((step for step in (1, 100, 1000, 10**9) if abs(kept - probe) < step), 2 * 10**9)
