"""Where pieces of one tensor overlap, as copies of elements from one stored tensor to another.

A range of a flattened tensor of n dimensions is cut into at most 2n - 1 boxes. Two boxes overlap in a box. In either
stored tensor the elements of a box lie at a regular distance along each dimension, so that every overlap is a few
strided copies. Two ranges, or two blocks cut along the first dimension, need one copy of consecutive elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercheck.format.index.logical import Block, Range, Shape

__all__ = ["Box", "Copy", "as_range", "boxes_of", "copy_elements", "copy_of", "meet", "strided", "without"]


class Box(NamedTuple):
    """A rectangular part of a tensor; none of its lengths is 0."""

    offsets: Shape
    lengths: Shape


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one stored tensor (the source) that belong at others of another one (the target).

    Both are counted in flattened tensors. Along dimension i there are ``lengths[i]`` elements, every
    ``source_strides[i]`` in the source and every ``target_strides[i]`` in the target. Elements that are consecutive in
    both are one dimension.
    """

    lengths: Shape
    source_start: int
    source_strides: Shape
    target_start: int
    target_strides: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.lengths)

    @property
    def source_stop(self) -> int:
        """Behind the last element in the source: a reader fetches from ``source_start`` to here."""
        return self.source_start + span(self.lengths, self.source_strides)

    @property
    def target_stop(self) -> int:
        return self.target_start + span(self.lengths, self.target_strides)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The same in consecutive elements: where they begin in the source and in the target, and how many they are."""
        *outer, last = self.lengths
        consecutive = self.source_strides[-1] == self.target_strides[-1] == 1
        each, times = (last, 1) if consecutive else (1, last)
        for place in product(*map(range, (*outer, times))):
            source = self.source_start + dot(place, self.source_strides)
            yield source, self.target_start + dot(place, self.target_strides), each


def copy_elements(copies: Iterable[Copy], source: NDArray[Any], target: NDArray[Any], *, source_start: int = 0) -> None:
    """Carry them out on flattened arrays. ``source`` may be a part of the stored tensor, from its element
    ``source_start`` on. Errors: ``ValueError`` if an array is too short."""
    for copy in copies:
        begin = copy.source_start - source_start
        if begin < 0 or copy.source_stop - source_start > len(source) or copy.target_stop > len(target):
            raise ValueError(f"{copy} passes an array of {len(source)} or {len(target)} elements")
        strided(target[copy.target_start :], copy.lengths, copy.target_strides)[...] = strided(
            source[begin:], copy.lengths, copy.source_strides
        )


def strided(flat: NDArray[Any], lengths: Shape, strides: Shape) -> NDArray[Any]:
    """The elements of a :class:`Copy` on one of its sides, ``flat`` from the first of them on. No bound is checked."""
    steps = tuple(stride * flat.strides[0] for stride in strides)
    return np.lib.stride_tricks.as_strided(flat, lengths, steps)


def as_range(piece: Range | Block, shape: Shape) -> Range | Block:
    """The piece as a range, if its elements are consecutive in the flattened tensor."""
    if isinstance(piece, Range):
        return piece
    cut = next((i for i, length in enumerate(piece.lengths) if length != 1), len(shape))
    if piece.elements and piece.lengths[cut + 1 :] != shape[cut + 1 :]:
        return piece
    return Range(piece.tensor, dot(piece.offsets, strides_of(shape)) if piece.elements else 0, piece.elements)


def boxes_of(piece: Range | Block, shape: Shape) -> Iterable[Box]:
    """The boxes that a piece of a tensor of ``shape`` consists of, in the order of their elements."""
    if not piece.elements:
        return ()
    if isinstance(piece, Block):
        return (Box(piece.offsets, piece.lengths),)
    if len(shape) == 1:
        return (Box((piece.start,), (piece.length,)),)
    return boxes_between(piece.start, piece.start + piece.length, shape)


def boxes_between(start: int, stop: int, shape: Shape) -> Iterator[Box]:
    """Of the elements [start, stop) of a flattened tensor."""
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from in_row(first, boxes_between(head, tail, shape[1:]))
        return
    if head:
        yield from in_row(first, boxes_between(head, row, shape[1:]))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if tail:
        yield from in_row(last, boxes_between(0, tail, shape[1:]))


def in_row(row: int, boxes: Iterable[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.lengths)) for box in boxes)


def meet(one: Box, other: Box) -> Box | None:
    """What both have."""
    offsets, lengths = [], []
    for start, length, other_start, other_length in zip(*one, *other, strict=True):
        begin = max(start, other_start)
        common = min(start + length, other_start + other_length) - begin
        if common <= 0:
            return None
        offsets.append(begin)
        lengths.append(common)
    return Box(tuple(offsets), tuple(lengths))


def without(box: Box, part: Box) -> Iterator[Box]:
    """What is left of a box, two boxes a dimension at the most. ``part`` lies in it."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    for axis, (start, length) in enumerate(zip(*part, strict=True)):
        stop = offsets[axis] + lengths[axis]
        for begin, end in ((offsets[axis], start), (start + length, stop)):
            if begin < end:
                yield Box(replaced(offsets, axis, begin), replaced(lengths, axis, end - begin))
        offsets[axis], lengths[axis] = start, length


def copy_of(box: Box, target: Range | Block, source: Range | Block, shape: Shape) -> Copy:
    """The copy of a box that lies in both pieces. Elements are counted from the first one of each piece."""
    target_start, target_strides = within(box, target, shape)
    source_start, source_strides = within(box, source, shape)
    joined: list[tuple[int, int, int]] = []
    for length, into, out_of in zip(box.lengths, target_strides, source_strides, strict=True):
        if length == 1:
            continue
        if joined and joined[-1][1:] == (into * length, out_of * length):
            joined[-1] = (joined[-1][0] * length, into, out_of)
        else:
            joined.append((length, into, out_of))
    joined = joined or [(1, 1, 1)]
    lengths, into_strides, out_of_strides = (tuple(each[part] for each in joined) for part in range(3))
    return Copy(lengths, source_start, out_of_strides, target_start, into_strides)


def within(box: Box, piece: Range | Block, shape: Shape) -> tuple[int, Shape]:
    """Where a box begins in a piece, and the distance of its elements there along each dimension."""
    if isinstance(piece, Range):
        strides = strides_of(shape)
        return dot(box.offsets, strides) - piece.start, strides
    strides = strides_of(piece.lengths)
    return dot([a - b for a, b in zip(box.offsets, piece.offsets, strict=True)], strides), strides


def strides_of(shape: Shape) -> Shape:
    """The distance, in elements, of neighbours along each dimension."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def span(lengths: Shape, strides: Shape) -> int:
    """From the first element to behind the last one."""
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def dot(offsets: Sequence[int], strides: Sequence[int]) -> int:
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))


def replaced(values: Sequence[int], axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])
