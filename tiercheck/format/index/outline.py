"""What a rank's index comes to in little: of each tensor one area that encloses the rank's pieces of it.

A tensor is a matrix here: the first dimension counts its rows, all others together its columns. So the area of a block
that is cut along the first dimension or along the others, and that of a range which begins and ends with a row, is the
piece itself. All other areas are too large at most: whoever has elements of a tensor has them in its area.

The ranks of a layout mostly hold pieces of the same tensors, layer after layer. Their outlines name that list by its
checksum, and the areas are compressed: some hundred bytes a rank, where its index takes tens of kilobytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tiercheck import schema
from tiercheck.format.checksums import checksum_of
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Range

__all__ = ["NOTHING", "Area", "Outline", "Outlines", "TensorKey", "area_of", "areas_of", "outline_of", "packed_areas"]

TensorKey = tuple[str, str]
"""As :attr:`LogicalTensor.key`."""
NUMBERS = 4
"""Of an area."""
OUTLINES_AT_ONCE = 256
"""Compared in one pass: their areas take 2.4 MB for 300 tensors."""


class Area(NamedTuple):
    """Some rows of a tensor, and some columns; what is behind the last one comes second."""

    first_row: int
    rows_end: int
    first_column: int
    columns_end: int

    def meets(self, other: Area) -> bool:
        return (
            max(self.first_row, other.first_row) < min(self.rows_end, other.rows_end)
            and max(self.first_column, other.first_column) < min(self.columns_end, other.columns_end)
        )  # fmt: skip


NOTHING = Area(0, 0, 0, 0)


class Outline(Struct, frozen=True, array_like=True):
    """What a rank tells the others of an index. Ranks that say the same here have the same areas."""

    tensors: str
    """The checksum of the list of its tensors."""
    areas: bytes
    """By tensor of this list: compressed."""


def area_of(piece: Range | Block, tensor: LogicalTensor) -> Area:
    """The smallest area that encloses a piece."""
    if not piece.elements:
        return NOTHING
    inner = tensor.shape[1:]
    columns = math.prod(inner)
    if isinstance(piece, Range):
        first, last = divmod(piece.start, columns), divmod(piece.start + piece.length - 1, columns)
        if first[0] == last[0]:
            return Area(first[0], first[0] + 1, first[1], last[1] + 1)
        return Area(first[0], last[0] + 1, 0, columns)
    if not piece.offsets:
        return Area(0, 1, 0, 1)
    start = end = 0
    for size, offset, length in zip(inner, piece.offsets[1:], piece.lengths[1:], strict=True):
        start, end = start * size + offset, end * size + offset + length - 1
    return Area(piece.offsets[0], piece.offsets[0] + piece.lengths[0], start, end + 1)


def areas_of(index: LogicalIndex) -> dict[TensorKey, Area]:
    """By tensor of which the index has a piece, be it of no elements, the area of all its pieces."""
    found: dict[TensorKey, Area] = {}
    for pieces in index.stored.values():
        for piece in pieces:
            if not isinstance(piece, Padding):
                tensor = index.tensors[piece.tensor]
                found[tensor.key] = both(found.get(tensor.key, NOTHING), area_of(piece, tensor))
    return found


def both(one: Area, other: Area) -> Area:
    """The smallest area that encloses both."""
    if NOTHING in (one, other):
        return other if one == NOTHING else one
    return Area(min(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), max(one[3], other[3]))


def outline_of(index: LogicalIndex) -> tuple[Outline, bytes]:
    """The outline, and the list of tensors that it names, packed."""
    areas = areas_of(index)
    by_key = {tensor.key: tensor for tensor in index.tensors.values()}
    told = schema.pack([by_key[key] for key in sorted(areas)])
    return Outline(checksum_of(told), packed_areas([areas[key] for key in sorted(areas)])), told


def packed_areas(areas: Sequence[Area]) -> bytes:
    """As :attr:`Outline.areas`."""
    numbers = np.array(areas, "<i8").reshape(-1, NUMBERS)
    return zlib.compress(np.ascontiguousarray(numbers.T).tobytes(), 9)


class Outlines:
    """The outlines of the ranks that saved, by rank. ``lists``: by checksum, the tensors that they name. Errors:
    ``ValueError`` if ranks do not agree on a tensor's shape, and for areas of another number of tensors."""

    def __init__(self, told: Mapping[int, Outline], lists: Mapping[str, Sequence[LogicalTensor]]) -> None:
        self._lists = lists
        by_outline: dict[Outline, list[int]] = {}
        for rank in sorted(told):
            by_outline.setdefault(told[rank], []).append(rank)
        self.alike = [tuple(ranks) for ranks in by_outline.values()]
        """Ranks of one outline."""
        self._by_list: dict[str, list[tuple[int, Outline]]] = {}
        for number, outline in enumerate(by_outline):
            self._by_list.setdefault(outline.tensors, []).append((number, outline))
        self.tensors: dict[TensorKey, LogicalTensor] = {}
        """Every tensor of which any rank has a piece."""
        for name in self._by_list:
            for tensor in lists[name]:
                if self.tensors.setdefault(tensor.key, tensor).shape != tensor.shape:
                    one, other = list(tensor.shape), list(self.tensors[tensor.key].shape)
                    raise ValueError(f"{tensor.name} has the shape {one} on some ranks, and {other} on others")

    def meeting(self, wanted: Mapping[TensorKey, Area]) -> dict[TensorKey, dict[Area, list[int]]]:
        """By tensor, and by area that meets the one that is wanted: which of :attr:`alike` have it."""
        found: dict[TensorKey, dict[Area, list[int]]] = {key: {} for key in wanted}
        for name, outlines in self._by_list.items():
            here = [(at, each.key) for at, each in enumerate(self._lists[name]) if each.key in wanted]
            if not here:
                continue
            columns = [at for at, _ in here]
            limits = np.array([wanted[key] for _, key in here], np.int64).T
            for numbers, areas in read_areas(outlines, len(self._lists[name])):
                held = areas[:, :, columns]
                rows = np.maximum(held[:, 0], limits[0]) < np.minimum(held[:, 1], limits[1])
                meets = rows & (np.maximum(held[:, 2], limits[2]) < np.minimum(held[:, 3], limits[3]))
                for outline, column in np.argwhere(meets).tolist():
                    area = Area(*held[outline, :, column].tolist())
                    found[here[column][1]].setdefault(area, []).append(numbers[outline])
        return found


def read_areas(
    outlines: Sequence[tuple[int, Outline]], tensors: int
) -> Iterator[tuple[Sequence[int], NDArray[np.int64]]]:
    """Some at a time: their numbers, and by outline, number of an area and tensor the areas. Errors: ``ValueError``."""
    nbytes = tensors * NUMBERS * 8
    for begin in range(0, len(outlines), OUTLINES_AT_ONCE):
        some = outlines[begin : begin + OUTLINES_AT_ONCE]
        read = b"".join(zlib.decompressobj().decompress(outline.areas, nbytes + 1) for _, outline in some)
        if len(read) != nbytes * len(some):
            raise ValueError(f"the outlines of a list of {tensors} tensors are of another one")
        yield [number for number, _ in some], np.frombuffer(read, "<i8").reshape(len(some), NUMBERS, tensors)
