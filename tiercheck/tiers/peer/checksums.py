"""The checksums of what was put here, for those who get it.

A server has verified the checksum of every chunk that it received. Sending that one along with the chunk saves
reading the chunk to make another, and it also covers the time in between: what decays in the server's memory is
noticed by the client.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from tiercheck.types import ByteRange, ObjectInfo

__all__ = ["KnownChecksums"]

CHUNKS_MAX = 1 << 20
"""Of all objects together, 8 bytes each."""
OBJECTS_MAX = 1 << 14


@dataclass(frozen=True)
class _Known:
    etag: str
    nbytes: int
    chunk_bytes: int
    checksums: array[int]


class KnownChecksums:
    """Of the objects that were put last; what is too much is forgotten, the oldest first."""

    def __init__(self) -> None:
        self._objects: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._chunks = 0

    def keep(self, namespace: str, info: ObjectInfo, chunk_bytes: int, checksums: array[int]) -> None:
        """``checksums``: one a chunk, in order (format ``Q``)."""
        before = self._objects.pop((namespace, info.key), None)
        self._chunks += len(checksums) - (len(before.checksums) if before is not None else 0)
        self._objects[namespace, info.key] = _Known(info.etag, info.nbytes, chunk_bytes, checksums)
        while self._chunks > CHUNKS_MAX or len(self._objects) > OBJECTS_MAX:
            _, oldest = self._objects.popitem(last=False)
            self._chunks -= len(oldest.checksums)

    def find(self, namespace: str, key: str, etag: str, part: ByteRange) -> int | None:
        """The checksum of ``part`` of that very object, where it is one of the chunks it was put in."""
        known = self._objects.get((namespace, key))
        if known is None or known.etag != etag or part.start % known.chunk_bytes:
            return None
        if part.stop != min(part.start + known.chunk_bytes, known.nbytes):
            return None
        return known.checksums[part.start // known.chunk_bytes]
