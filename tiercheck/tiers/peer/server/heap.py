"""Keeps the C heap from giving every received frame's memory back to the kernel.

ZeroMQ allocates each frame that it receives. glibc takes what is that large from the kernel and gives it back at
once, so that every page of every frame is cleared and entered anew, which costs more than to receive it. With the
thresholds raised, frames are received into memory that was used before.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

from tiercheck.tiers.peer.server.limits import CHUNK_BYTES_MAX

__all__ = ["keep_frame_memory"]

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES_MAX = 64 << 20
"""Free memory that a heap may keep; above it goes back to the kernel as ever."""


@cache
def keep_frame_memory() -> bool:
    """Raise glibc's thresholds for this process, once. False if the C library is another: then nothing is done."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 2 * CHUNK_BYTES_MAX) and libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX))
