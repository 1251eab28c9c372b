"""Page tables filled ahead: what is mapped and backed is entered at a fraction of the cost of a fault a page.

Fails on Linux before 5.14: then the first accesses pay, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["populate_to_read", "populate_to_write"]

# The standard library does not name them.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

_IS_PRESENT = 1 << 63
"""Of an entry in /proc/PID/pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst)."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise() holds Python's lock meanwhile
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate_to_read(address: int, nbytes: int) -> None:
    """Nothing of it is read. If its first, its last and the page in the middle are entered, all are taken to be:
    going through those that are costs half as much as entering them."""
    start = address - address % mmap.PAGESIZE
    if not _are_entered(start, address + nbytes // 2, address + nbytes - 1):
        _madvise(start, address + nbytes - start, MADV_POPULATE_READ)


def populate_to_write(address: int, nbytes: int) -> int:
    """``address``: of a page. Nothing is written. Returns 0, or the number of the error."""
    return ctypes.get_errno() if _madvise(address, nbytes, MADV_POPULATE_WRITE) else 0


def _are_entered(*addresses: int) -> bool:
    """Whether the pages of these addresses are in the page table; in doubt not."""
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            entries = [os.pread(fd, 8, address // mmap.PAGESIZE * 8) for address in addresses]
        finally:
            os.close(fd)
    except OSError:  # no /proc, or none that may be read
        return False
    return all(int.from_bytes(entry, "little") & _IS_PRESENT for entry in entries)
