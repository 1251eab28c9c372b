"""A plain safetensors file, laid out before any tensor is there, so that tensors come in any order and in parts.

Its header is written last: until then nothing reads the file.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercheck.format.container import DTYPES, TensorSpec

__all__ = ["PlainFile", "laid_out", "split"]

HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class PlainFile:
    """A file's tensors, in file order, and the room of its header."""

    specs: tuple[TensorSpec, ...]
    header_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.header_nbytes + sum(spec.nbytes for spec in self.specs)

    def make(self, path: Path) -> dict[str, memoryview]:
        """The writable bytes of each tensor in the new file, mapped. All its blocks are allocated first, so that a disk
        that is full says so now. Errors: ``OSError``."""
        with path.open("xb+") as file:
            os.posix_fallocate(file.fileno(), 0, self.nbytes)
            return self._parts(mmap.mmap(file.fileno(), self.nbytes))

    def map(self, path: Path) -> dict[str, memoryview]:
        """The same of a file that is there, to read."""
        with path.open("rb") as file:
            return self._parts(mmap.mmap(file.fileno(), self.nbytes, access=mmap.ACCESS_READ))

    def _parts(self, memory: mmap.mmap) -> dict[str, memoryview]:
        view, start = memoryview(memory), self.header_nbytes
        parts: dict[str, memoryview] = {}
        for spec in self.specs:
            parts[spec.name] = view[start : start + spec.nbytes]
            start += spec.nbytes
        return parts

    def finish(self, path: Path, notes: Mapping[str, str]) -> None:
        """Write the header. Errors: ``ValueError`` if the notes are longer than those it was laid out for."""
        header = encoded(self.specs, notes)
        room = self.header_nbytes - 8
        if len(header) > room:
            raise ValueError(f"the header takes {len(header)} bytes, and there is room for {room}")
        with path.open("rb+") as file:
            file.write(room.to_bytes(8, "little") + header.ljust(room))


def laid_out(specs: Iterable[TensorSpec], notes: Mapping[str, str]) -> PlainFile:
    """``notes``: the longest that :meth:`PlainFile.finish` may get."""
    # Wide elements first, so that each tensor lies at a multiple of its element's size.
    ordered = tuple(sorted(specs, key=lambda spec: (-DTYPES[spec.dtype], spec.name)))
    nbytes = 8 + len(encoded(ordered, notes))
    return PlainFile(ordered, -(-nbytes // HEADER_ALIGNMENT) * HEADER_ALIGNMENT)


def split(specs: Sequence[TensorSpec], nbytes_max: int) -> list[list[TensorSpec]]:
    """In order, as many as fit into files of ``nbytes_max``; a larger tensor has a file of its own."""
    files: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not files or spec.nbytes > room:
            files.append([])
            room = nbytes_max
        files[-1].append(spec)
        room -= spec.nbytes
    return files


def encoded(specs: Iterable[TensorSpec], notes: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(notes)}
    start = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
        start += spec.nbytes
    return json.dumps(header, separators=(",", ":")).encode()
