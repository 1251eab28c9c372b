"""The C library's memcpy, by several threads at once."""

from __future__ import annotations

import ctypes
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

__all__ = ["Memcpy"]


class Memcpy:
    """Copies ``source`` into one of ``targets`` after the other, each thread its own contiguous part.

    ``targets`` are writable and as long as ``source``; the caller keeps them touched.
    """

    def __init__(self, source: memoryview, targets: list[memoryview], threads: int) -> None:
        self._nbytes = source.nbytes
        # A read-only buffer has no address for ctypes: the source must be writable, though nothing writes to it.
        self._source = ctypes.addressof(ctypes.c_char.from_buffer(source))
        self._targets = itertools.cycle([ctypes.addressof(ctypes.c_char.from_buffer(target)) for target in targets])
        self._buffers = (source, targets)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="memcpy")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    async def __call__(self) -> float:
        """Seconds of one copy."""
        target = next(self._targets)
        part = -(-self._nbytes // self._threads // 4096) * 4096  # whole pages
        starts = range(0, self._nbytes, max(part, 1))
        begun = time.perf_counter()
        jobs = [
            self._pool.submit(ctypes.memmove, target + start, self._source + start, min(part, self._nbytes - start))
            for start in starts
        ]
        for job in jobs:
            job.result()
        return time.perf_counter() - begun
