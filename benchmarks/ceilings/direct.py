"""Plain O_DIRECT reads and writes of one file from an aligned buffer, with the depth and block that do best here."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Unavailable

__all__ = ["DirectFile", "Shape"]

BLOCKS = (1 << 20, 4 << 20, 16 << 20)
DEPTHS = (1, 2, 4)


@dataclass(frozen=True)
class Shape:
    """How a file is written or read: so many blocks of so many bytes at once, its room allocated first or not."""

    block_bytes: int
    depth: int
    preallocate: bool = False


class DirectFile:
    """A file in ``directory``. ``buffer`` is page-aligned, a multiple of 4096 bytes long, and not empty."""

    def __init__(self, directory: Path, buffer: memoryview) -> None:
        self._path = self._read_path = directory / "raw"
        self._buffer = self._into = buffer
        self.write_shape = Shape(BLOCKS[-1], 1)
        self.read_shape = Shape(BLOCKS[-1], 1)

    def check(self) -> None:
        """Errors: ``Unavailable`` where the file system has no O_DIRECT."""
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
        except OSError as error:
            raise Unavailable(
                f"no O_DIRECT in {self._path.parent} ({error.strerror}); name another --directory"
            ) from error

    async def calibrate(self, repetitions: int) -> None:
        """Find the shapes that do best; they are used from then on."""
        self.write_shape = await best(
            itertools.starmap(Shape, itertools.product(BLOCKS, DEPTHS, (False, True))), self._write, repetitions
        )
        await self._calibrate_reads(repetitions)

    async def read_as(self, path: Path, into: memoryview, repetitions: int) -> None:
        """Read that file into that buffer from now on, both of the same length as ours, by the shape that does best.

        Of two buffers one may take a disk's reads half as fast again as the other, whatever the file: it depends on
        the pages that they got.
        """
        self._read_path, self._into = path, into
        await self._calibrate_reads(repetitions)

    async def _calibrate_reads(self, repetitions: int) -> None:
        self.read_shape = await best(
            itertools.starmap(Shape, itertools.product(BLOCKS, DEPTHS)), self._read, repetitions
        )

    async def write(self) -> float:
        """Seconds to write and fdatasync a new file; the old one is removed before."""
        return await asyncio.to_thread(self._write, self.write_shape)

    async def read(self) -> float:
        """Seconds to read it, or what :meth:`read_as` has named."""
        return await asyncio.to_thread(self._read, self.read_shape)

    def _write(self, shape: Shape) -> float:
        self._path.unlink(missing_ok=True)
        begun = time.perf_counter()
        fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            if shape.preallocate:
                os.posix_fallocate(fd, 0, self._buffer.nbytes)
            self._in_blocks(shape, self._buffer, lambda part, offset: os.pwrite(fd, part, offset))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - begun

    def _read(self, shape: Shape) -> float:
        begun = time.perf_counter()
        fd = os.open(self._read_path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._in_blocks(shape, self._into, lambda part, offset: os.preadv(fd, [part], offset))
        finally:
            os.close(fd)
        return time.perf_counter() - begun

    def _in_blocks(self, shape: Shape, buffer: memoryview, move: Callable[[memoryview, int], int]) -> None:
        def move_all(part: memoryview, offset: int) -> None:
            while part.nbytes:
                moved = move(part, offset)
                if moved <= 0:
                    raise OSError(f"{self._path} ended at {offset}")
                part, offset = part[moved:], offset + moved

        step = shape.block_bytes
        offsets = range(0, buffer.nbytes, step)
        if shape.depth == 1:
            for offset in offsets:
                move_all(buffer[offset : offset + step], offset)
            return
        with ThreadPoolExecutor(shape.depth, thread_name_prefix="direct") as pool:
            list(pool.map(lambda offset: move_all(buffer[offset : offset + step], offset), offsets))


async def best(shapes: Iterable[Shape], measure: Callable[[Shape], float], repetitions: int) -> Shape:
    """The shape whose best repetition is shortest."""
    taken = {shape: min([await asyncio.to_thread(measure, shape) for _ in range(repetitions)]) for shape in shapes}
    return min(taken, key=taken.__getitem__)
