"""How the bytes of an object get from memory into its file, and back.

:class:`Sequential` moves them by one thread through the page cache. :class:`Blocks` moves blocks at aligned
offsets by several threads: past the page cache (``O_DIRECT``) if memory and file are aligned alike, through
a bounce buffer if they are not, or, with ``direct`` off, through the page cache for file systems that spread
a file over many servers.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from tiercheck.tiers.posix.direct import (
    ALIGNMENT,
    AlignedBuffers,
    address_of,
    copy_bytes,
    is_cached,
    preallocate,
    reopen_direct,
)
from tiercheck.tiers.posix.files import BUFFERS_PER_WRITE, read_into, write_buffers
from tiercheck.tiers.threads import Threads
from tiercheck.types import Payload, bytes_text

__all__ = ["BLOCKS_BYTES_MIN", "Blocks", "Check", "Sequential", "Transfer"]

Check = Callable[[], None]
BLOCKS_BYTES_MIN = 1 << 20
"""Objects smaller than this are moved by one thread: more of them would cost more than they bring."""


class Transfer(Protocol):
    """``check`` is called between system calls and may raise; no view of a caller's buffer outlives a call."""

    def write(self, fd: int, payload: Payload, nbytes: int, check: Check) -> None:
        """Write the buffers, ``nbytes`` together, to the empty file ``fd``. Durable only after an fsync."""

    def read(self, fd: int, offset: int, into: memoryview, check: Check) -> None:
        """Fill ``into`` from ``offset`` on. Errors: ``Corruption`` if the file ends early."""

    def close(self) -> None:
        """Let go of threads and memory; may be used again afterwards."""


class Sequential:
    """One thread, through the page cache."""

    def write(self, fd: int, payload: Payload, nbytes: int, check: Check) -> None:
        del nbytes
        write_buffers(fd, payload, check)

    def read(self, fd: int, offset: int, into: memoryview, check: Check) -> None:
        read_into(fd, offset, into, check)

    def close(self) -> None:
        pass


class Blocks:
    """``depth`` threads, each a block of ``block_bytes`` (a multiple of 4096) at a time.

    Memory: bounce buffers are made when they are needed and kept until :meth:`close`; there are at most
    ``block_bytes`` for each thread that moves blocks, callers included.
    """

    def __init__(self, *, block_bytes: int, depth: int, direct: bool) -> None:
        if block_bytes < ALIGNMENT or block_bytes % ALIGNMENT or depth < 1:
            raise ValueError(
                f"blocks of {block_bytes} bytes x {depth} cannot be: a multiple of {ALIGNMENT}, x 1 or more"
            )
        self.block_bytes = block_bytes
        self.depth = depth
        self.direct = direct
        self._bounce = AlignedBuffers(block_bytes)
        self._threads = Threads(depth, "tiercheck blocks")

    def __str__(self) -> str:
        return f"{bytes_text(self.block_bytes).replace('.0', '')} x {self.depth}"

    def write(self, fd: int, payload: Payload, nbytes: int, check: Check) -> None:
        if nbytes < BLOCKS_BYTES_MIN:
            write_buffers(fd, payload, check)
            return
        preallocate(fd, nbytes)  # a full disk is found before the first byte is written
        source = _Gathered(payload)
        direct_fd = reopen_direct(fd, os.O_WRONLY) if self.direct else fd
        try:
            self._each_block(0, nbytes, lambda a, b: self._write_block(fd, direct_fd, source, a, b), check)
        finally:
            source.release()
            if direct_fd != fd:
                os.close(direct_fd)

    def read(self, fd: int, offset: int, into: memoryview, check: Check) -> None:
        if into.nbytes < BLOCKS_BYTES_MIN:
            read_into(fd, offset, into, check)
            return
        # What the page cache holds comes from there at the speed of memory.
        direct = self.direct and not is_cached(fd, offset, into.nbytes)
        direct_fd = reopen_direct(fd, os.O_RDONLY) if direct else fd
        aligned = (address_of(into) - offset) % ALIGNMENT == 0
        try:
            self._each_block(
                offset,
                offset + into.nbytes,
                lambda a, b: self._read_block(fd, direct_fd, into[a - offset : b - offset], a, aligned),
                check,
            )
        finally:
            if direct_fd != fd:
                os.close(direct_fd)

    def close(self) -> None:
        self._threads.close()
        self._bounce.clear()

    # One block, in whichever thread.

    def _write_block(self, fd: int, direct_fd: int, source: _Gathered, start: int, stop: int) -> None:
        middle = stop // ALIGNMENT * ALIGNMENT if direct_fd != fd else start
        if middle > start:
            if source.aligned(start, middle):
                start += source.write(direct_fd, start, middle)
            else:
                with self._bounce.borrowed() as bounce:
                    source.copy(start, middle, bounce)
                    with bounce[: middle - start] as part:
                        start += os.pwritev(direct_fd, [part], start)
        # The object's last bytes, less than a page, and what a direct write that stopped short has left.
        while start < stop:
            start += source.write(fd, start, stop)

    def _read_block(self, fd: int, direct_fd: int, into: memoryview, start: int, aligned: bool) -> None:
        at = 0
        with into:
            if direct_fd != fd and start % ALIGNMENT == 0:
                whole = into.nbytes // ALIGNMENT * ALIGNMENT
                if aligned:
                    with into[:whole] as part:
                        at = os.preadv(direct_fd, [part], start) if whole else 0
                elif whole:
                    with self._bounce.borrowed() as bounce, bounce[:whole] as part:
                        at = os.preadv(direct_fd, [part], start)
                        with into[:at] as target, part[:at] as source:
                            copy_bytes(target, source)
            with into[at:] as rest:
                read_into(fd, start + at, rest, lambda: None)

    def _each_block(self, start: int, stop: int, move: Callable[[int, int], None], check: Check) -> None:
        """``move(a, b)`` for each block of ``[start, stop)``; blocks begin at multiples of their size."""

        def move_block(number: int) -> None:
            check()
            block = number * self.block_bytes
            move(max(start, block), min(stop, block + self.block_bytes))

        self._threads.share(range(start // self.block_bytes, -(-stop // self.block_bytes)), move_block)


class _Gathered:
    """A payload as one run of bytes, never joined."""

    def __init__(self, payload: Payload) -> None:
        self._views = [memoryview(buffer) for buffer in payload if len(buffer)]
        self._starts = list(itertools.accumulate((view.nbytes for view in self._views), initial=0))[:-1]
        self._addresses = [address_of(view) for view in self._views]

    def parts(self, start: int, stop: int) -> list[memoryview]:
        """Views of ``[start, stop)``, to be released."""
        index = bisect_right(self._starts, start) - 1
        found = []
        while index < len(self._views) and self._starts[index] < stop:
            at = self._starts[index]
            found.append(self._views[index][max(0, start - at) : stop - at])
            index += 1
        return found

    def aligned(self, start: int, stop: int) -> bool:
        """Whether every part of ``[start, stop)`` may be written directly: aligned in memory, and in the file."""
        index = bisect_right(self._starts, start) - 1
        while index < len(self._views) and self._starts[index] < stop:
            begin = max(start, self._starts[index])
            if begin % ALIGNMENT or (self._addresses[index] + begin - self._starts[index]) % ALIGNMENT:
                return False
            index += 1
        return True

    def write(self, fd: int, start: int, stop: int) -> int:
        """Write ``[start, stop)`` there, or the beginning of it; returns the bytes written."""
        parts = self.parts(start, stop)
        try:
            return os.pwritev(fd, parts[:BUFFERS_PER_WRITE], start)
        finally:
            for part in parts:
                part.release()

    def copy(self, start: int, stop: int, into: memoryview) -> None:
        at = 0
        for part in self.parts(start, stop):
            with part, into[at : at + part.nbytes] as target:
                copy_bytes(target, part)
                at += part.nbytes

    def release(self) -> None:
        for view in self._views:
            view.release()
