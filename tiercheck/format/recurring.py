"""Tensors that every record of a stream has, or every base: laid out and described once, and not once a version.

The names of a record's begin with the version's digits. So the header of one version's record differs from that of the
one before in those digits and in the checksums: both are written over the text that was there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiercheck.format.header import ALIGNMENT, COMPACT, STORED_AS, Extent, TensorSpec, description_of, round_up

__all__ = ["Checksums", "Recurring"]

Checksums = Sequence[int] | NDArray[np.uint64]
"""The numbers whose hexadecimal digits a header has."""

CHECKSUM_DIGITS = 16
DIGITS = f"V{CHECKSUM_DIGITS}"
HEXADECIMAL = np.frombuffer(b"".join(b"%02x" % value for value in range(256)), np.uint16)
"""The two digits of each byte, as they lie."""


class Recurring:
    """Tensors that come first in each of many shards, one behind the other. One thread uses it at a time.

    ``tensors``: in the order in which they lie. Each name begins with the version, here ``stamp_digits`` zeros. Errors:
    ``ValueError`` for another name, or one that is there twice.
    """

    def __init__(self, tensors: Iterable[TensorSpec], stamp_digits: int = 0) -> None:
        self.nbytes = 0
        self.paddings = 0
        self.starts: list[int] = []
        """Where each tensor lies in the memory of all."""
        self.stops: list[int] = []
        self._stamp_digits = stamp_digits
        self._stamp = "0" * stamp_digits
        extents = list(self._laid_out(tensors))
        names = [extent.spec.name for extent in extents if not extent.is_padding]
        self._names = frozenset(name[stamp_digits:] for name in names)
        if len(self._names) < len(names) or any(not name.startswith(self._stamp) for name in names):
            raise ValueError("the names of tensors that recur begin with the version, and are unique in a shard")
        checksums, entries = bytearray(), bytearray()
        stamps: tuple[list[int], list[int]] = ([], [])
        digests: list[int] = []
        for extent in extents:
            name = COMPACT.encode(extent.spec.name).encode("ascii")
            if not extent.is_padding:
                stamps[0].append(len(checksums) + len(',"xxh3_64:'))
                checksums += b',"xxh3_64:' + name[1:] + b':"'
                digests.append(len(checksums))
                checksums += b"0" * CHECKSUM_DIGITS + b'"'
                if extent.spec.dtype in STORED_AS:
                    stamps[0].append(len(checksums) + len(',"dtype:'))
                    checksums += b',"dtype:' + name[1:] + b':"' + extent.spec.dtype.encode("ascii") + b'"'
                stamps[1].append(len(entries) + len(',"'))
            entries += b"," + name + b":" + COMPACT.encode(description_of(extent)).encode("ascii")
        self._texts = np.frombuffer(checksums, np.uint8), np.frombuffer(entries, np.uint8)
        self._stamps = np.array(stamps[0], np.int64), np.array(stamps[1], np.int64)
        self._digests = np.array(digests, np.int64)
        places = max(0, len(checksums) - CHECKSUM_DIGITS + 1)
        self._digits = np.ndarray((places,), DIGITS, checksums, strides=(1,))
        """So many digits from each byte of the first text on: those of a checksum are written at once."""
        gaps = zip(self.stops, self.starts[1:], strict=False)
        self._lines = np.array([stop // ALIGNMENT for stop, start in gaps if start > stop], np.int64)
        """Those that hold a gap: each ends with one, since the next tensor begins a line."""

    def holds(self, name: str, stamp: str) -> bool:
        """Whether ``name`` is one of them, in the record of this version."""
        return name.startswith(stamp) and name[self._stamp_digits :] in self._names

    def clear_gaps(self, memory: memoryview) -> None:
        """Make zeros of what lies between the tensors in this memory of theirs; they are written afterwards."""
        whole = memory[: self.nbytes // ALIGNMENT * ALIGNMENT]
        np.frombuffer(whole, np.uint8).reshape(-1, ALIGNMENT)[self._lines] = 0

    def texts(self, stamp: str, checksums: Checksums) -> tuple[memoryview, memoryview]:
        """What a header says of them: their checksums, and where they lie. Each text begins with a comma, and holds
        until the next call."""
        if len(stamp) != self._stamp_digits or len(checksums) != len(self._digests):
            raise ValueError(f"{stamp!r} and {len(checksums)} checksums do not describe {len(self._digests)} tensors")
        for position, (before, now) in enumerate(zip(self._stamp, stamp, strict=True)):
            if before != now:
                for text, stamps in zip(self._texts, self._stamps, strict=True):
                    text[stamps + position] = ord(now)
        self._stamp = stamp
        octets = np.asarray(checksums, np.uint64).astype(">u8").view(np.uint8)
        self._digits[self._digests] = HEXADECIMAL[octets].view(DIGITS)
        return self._texts[0].data, self._texts[1].data

    def _laid_out(self, tensors: Iterable[TensorSpec]) -> Iterable[Extent]:
        for spec in tensors:
            start = round_up(self.nbytes) if spec.nbytes else self.nbytes
            if start > self.nbytes:
                yield Extent.padding(self.paddings, self.nbytes, start - self.nbytes)
                self.paddings += 1
            self.starts.append(start)
            self.nbytes = start + spec.nbytes
            self.stops.append(self.nbytes)
            yield Extent(spec, start, None)
