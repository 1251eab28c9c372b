"""Memory to move: page-aligned, touched, and of bytes that nothing can compress or leave out."""

from __future__ import annotations

import mmap
import os

__all__ = ["BLOCK_BYTES", "empty_buffer", "filled_buffer"]

BLOCK_BYTES = 1 << 20


def empty_buffer(nbytes: int) -> memoryview:
    """Writable memory of this process alone, as malloc gives it, page-aligned, every page of it backed already."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = memoryview(mmap.mmap(-1, max(nbytes, 1), flags=private))[:nbytes]
    for start in range(0, nbytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def filled_buffer(nbytes: int) -> memoryview:
    """The same, filled with random bytes (a MiB of them, repeated with a change in each repetition)."""
    memory = empty_buffer(nbytes)
    block = bytearray(os.urandom(BLOCK_BYTES))
    for number, start in enumerate(range(0, nbytes, BLOCK_BYTES)):
        block[:8] = number.to_bytes(8, "little")
        end = min(start + BLOCK_BYTES, nbytes)
        memory[start:end] = block[: end - start]
    return memory
