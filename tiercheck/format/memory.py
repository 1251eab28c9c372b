"""Memory for what is long, of huge pages where the machine has them: fresh pages of 4 KiB are filled several times as
slowly as they are copied."""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["fresh_memory"]


def fresh_memory(nbytes: int) -> memoryview:
    """Writable memory of zeros, page-aligned; it costs nothing before it is touched."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]
