"""Reading and writing past the page cache: ``O_DIRECT``.

A direct transfer needs its address, its offset and its length to be multiples of the device's block. We take
4096 for all three, which every device in use accepts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "ALIGNMENT",
    "AlignedBuffers",
    "address_of",
    "copy_bytes",
    "direct_obstacle",
    "is_cached",
    "preallocate",
    "reopen_direct",
]

ALIGNMENT = 4096
FREE_COPY_BYTES_MIN = 64 << 10
"""Copies of less than this do not let other threads go on: taking turns would cost more."""
CACHE_SAMPLES = 8
"""Pages of an object that are looked for in the page cache."""


class _PyBuffer(ctypes.Structure):
    """Python's ``Py_buffer``, part of its stable interface since 3.11; ``buf`` is the address."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("buf", "obj")),
        *((name, ctypes.c_ssize_t) for name in ("len", "itemsize")),
        *((name, ctypes.c_int) for name in ("readonly", "ndim")),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def address_of(view: memoryview) -> int:
    """Where the first byte of ``view`` lies; read-only memory too."""
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), 0)  # PyBUF_SIMPLE: contiguous bytes; raises if they are not
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """``into[:] = source``, of one length; other Python threads go on meanwhile if it takes time."""
    if into.nbytes != source.nbytes or into.readonly:
        raise ValueError(f"{source.nbytes} bytes cannot be copied to {into.nbytes} (read-only: {into.readonly})")
    if into.nbytes < FREE_COPY_BYTES_MIN:
        into[:] = source
    else:
        ctypes.memmove(address_of(into), address_of(source), into.nbytes)


def preallocate(fd: int, nbytes: int) -> None:
    """Make the file ``nbytes`` long and have the disk's blocks for all of them, if the file system can.

    Not ``posix_fallocate``, which writes to every block if it cannot. Errors: ``OSError`` (``ENOSPC``, ...).
    """
    if nbytes and _fallocate(fd, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


def reopen_direct(fd: int, flags: int) -> int:
    """Another descriptor of the open file ``fd``, whatever its name is by now, for direct transfers."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT | os.O_CLOEXEC)


def direct_obstacle(fd: int) -> str | None:
    """Why the file system of ``fd``, an empty file of ours, takes no direct transfers; ``None`` if it does.

    It is tried: a page is written and read back. The file is empty again afterwards.
    Errors: ``OSError`` for what has nothing to do with it, such as ``ENOSPC``.
    """
    if not Path("/proc/self/fd").exists():
        return "/proc is not mounted"
    page = mmap.mmap(-1, ALIGNMENT)
    try:
        page[:] = os.urandom(ALIGNMENT)
        expected = bytes(page)
        direct_fd = reopen_direct(fd, os.O_RDWR)
        try:
            written = os.pwritev(direct_fd, [page], 0)
            page[:] = bytes(ALIGNMENT)
            read = os.preadv(direct_fd, [page], 0)
        finally:
            os.close(direct_fd)
        if (written, read, bytes(page)) != (ALIGNMENT, ALIGNMENT, expected):
            return "what O_DIRECT wrote did not come back"
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS):
            raise
        return "no O_DIRECT"
    finally:
        os.ftruncate(fd, 0)
        page.close()
    return None


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether the page cache seems to hold ``[offset, offset + nbytes)`` of the file: a few pages are asked for.

    Changes the read-ahead of ``fd`` to none for as long as it asks, so that asking starts no transfer worth a word.
    """
    if not nbytes:
        return True
    byte = bytearray(1)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        for sample in range(CACHE_SAMPLES):
            at = offset + (nbytes - 1) * sample // (CACHE_SAMPLES - 1)
            if not os.preadv(fd, [byte], at, os.RWF_NOWAIT):
                return False
    except OSError as error:
        # EAGAIN: it would have to be fetched. The others: the file system cannot say.
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        return False
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return True


class AlignedBuffers:
    """Page-aligned buffers of one size, made when asked for and kept for the next one."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrowed(self) -> Iterator[memoryview]:
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = mmap.mmap(-1, self.nbytes)
        try:
            with memoryview(memory) as view:
                yield view
        finally:
            with self._lock:
                self._free.append(memory)

    def clear(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for memory in free:
            memory.close()
