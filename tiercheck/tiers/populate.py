"""Page tables filled ahead: what is mapped and backed is entered at a fraction of the cost of a fault a page.

Fails on Linux before 5.14: then the first accesses pay, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["MADV_POPULATE_WRITE", "populate_to_read", "populate_to_write"]

# The standard library does not name them.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate_to_read(address: int, nbytes: int) -> None:
    """Nothing of it is read."""
    start = address - address % mmap.PAGESIZE
    _madvise(start, address + nbytes - start, MADV_POPULATE_READ)


def populate_to_write(address: int, nbytes: int) -> None:
    """``address``: of a page. Nothing is written."""
    _madvise(address, nbytes, MADV_POPULATE_WRITE)
