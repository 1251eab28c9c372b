"""Memory that is at hand before something is measured that takes new memory."""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["WAKE", "wake"]

WAKE = 4
"""Times the bytes of what is measured that are touched before it. What it takes then need not be what was touched: with
as many as it takes, one in two recoveries was up to eight times as long."""


def wake(nbytes: int) -> None:
    """Touch so much memory, and let it go: the host of a virtual machine may have taken back what was free, and giving
    it again takes longer than a recovery."""
    with mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, nbytes, mmap.PAGESIZE):
            memory[start] = 1
