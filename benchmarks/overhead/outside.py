"""Moves so many bytes each time it is asked to, in a process of its own: what a mover would do, without its Python.

``python -m benchmarks.overhead.outside NBYTES [FILE]``: copies them in memory, or writes them to the file, past the
page cache. Prints ``ready``, then a line for each move that has ended; ends with its standard input.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.ceilings.buffers import BLOCK_BYTES, empty_buffer, filled_buffer

__all__ = ["main"]

WRITE_BYTES = 4 * BLOCK_BYTES


def main(nbytes: int, file: Path | None) -> None:
    source = filled_buffer(-(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)
    target = empty_buffer(source.nbytes) if file is None else None
    print("ready", flush=True)
    for _ in sys.stdin:
        if target is not None:
            target[:] = source
        elif file is not None:
            write(file, source)
        print("moved", flush=True)


def write(file: Path, source: memoryview) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        for start in range(0, source.nbytes, WRITE_BYTES):
            part = source[start : start + WRITE_BYTES]
            if os.pwrite(descriptor, part, start) != part.nbytes:
                raise OSError(f"{file} took a part of a block")
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
