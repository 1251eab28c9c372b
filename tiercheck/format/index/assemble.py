"""What another layout takes from whom: a plan over the indexes of all the ranks that saved.

:class:`Holdings` is made once, of what N old ranks stored. :func:`assemble` asks it for one new rank: which elements of
which stored tensor of which old rank belong where, and what nobody has. It finds pieces by name, and then by bisection,
so that it looks at those that overlap, and not at all pieces of a tensor.

The plan is of masters and extras. It holds for the optimizer's tensors and the residuals too: those that lie as their
masters do (:func:`~tiercheck.format.index.logical.lies_as_master`) are copied in the same way, by their own
names. What else belongs to a master goes with any element of it.

Copies in several ranks are copies: one of them is chosen, the new rank's own number if it is among them, so that the
work is spread. A buffer is taken from the rank's own number, or else from the lowest one that has it: it may differ
between ranks (running statistics).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from tiercheck.format.index.boxes import Box, Copy, as_range, boxes_of, copy_of, meet, without
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Padding, Range, Role, Shape

__all__ = ["Assembly", "Holdings", "Missing", "Transfer", "assemble"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements of the stored tensor ``source`` of the old rank ``rank``, for the stored tensor ``target`` of the new
    one."""

    rank: int
    source: str
    target: str
    copy: Copy


@dataclass(frozen=True, slots=True)
class Missing:
    """A part of a tensor of the model that no old rank has."""

    target: str
    piece: Range | Block
    shape: Shape | None
    """The tensor's shape in the old ranks, if it is another one there."""

    def __str__(self) -> str:
        tensor = f"{self.piece.tensor} (for {self.target})"
        if self.shape is not None:
            return f"{tensor}, which has the shape {list(self.shape)} in the checkpoint"
        if isinstance(self.piece, Range):
            return f"{tensor}, elements {self.piece.start} to {self.piece.start + self.piece.length - 1}"
        return f"{tensor}, {list(self.piece.lengths)} elements from {list(self.piece.offsets)}"


@dataclass(frozen=True)
class Assembly:
    """How one new rank gets what it wants."""

    transfers: tuple[Transfer, ...]
    missing: tuple[Missing, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The old ranks whose shards are needed."""
        return tuple(sorted({each.rank for each in self.transfers}))


class Holdings:
    """What the old ranks have, by rank. Errors: ``ValueError`` if they do not agree on a tensor's shape."""

    def __init__(self, indexes: Mapping[int, LogicalIndex]) -> None:
        self._held: dict[tuple[str, str], _HeldTensor] = {}
        self.aliases: dict[str, str] = {}
        """Other names of tensors, on any rank."""
        for rank, index in sorted(indexes.items()):
            self.aliases |= index.aliases
            for stored in index.stored:
                self._add(rank, stored, index)

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """Every tensor of which any rank has a piece."""
        return tuple(held.tensor for held in self._held.values())

    def find(self, tensor: LogicalTensor) -> _HeldTensor | None:
        return self._held.get(tensor.key)

    def _add(self, rank: int, stored: str, index: LogicalIndex) -> None:
        start = 0
        for piece in index.stored[stored]:
            if not isinstance(piece, Padding):
                tensor = index.tensors[piece.tensor]
                held = self._held.get(tensor.key)
                if held is None:
                    held = self._held[tensor.key] = _HeldTensor(tensor)
                if held.tensor.shape != tensor.shape:
                    raise ValueError(
                        f"{tensor.name} has the shape {list(tensor.shape)} on rank {rank}, and "
                        f"{list(held.tensor.shape)} on another rank"
                    )
                held.add(piece, _Copy(rank, stored, start))
            start += piece.elements


def assemble(wanted: LogicalIndex, holdings: Holdings, *, rank: int = 0) -> Assembly:
    """The plan for the new rank ``rank``, which wants what ``wanted`` says. Padding is left as it is."""
    transfers: list[Transfer] = []
    missing: list[Missing] = []
    for target, pieces in wanted.stored.items():
        start = 0
        for piece in pieces:
            if not isinstance(piece, Padding):
                tensor = wanted.tensors[piece.tensor]
                held = holdings.find(tensor)
                if held is None or held.tensor.shape != tensor.shape:
                    missing.append(Missing(target, piece, None if held is None else held.tensor.shape))
                else:
                    found, lacking = held.fetch(piece, rank)
                    transfers += [
                        Transfer(one.rank, one.stored, target, shifted(copy, one.start, start)) for one, copy in found
                    ]
                    missing += [Missing(target, each, None) for each in lacking]
            start += piece.elements
    return Assembly(tuple(transfers), tuple(missing))


def shifted(copy: Copy, source: int, target: int) -> Copy:
    return Copy(
        copy.lengths, copy.source_start + source, copy.source_strides, copy.target_start + target, copy.target_strides
    )


class _Copy(NamedTuple):
    """A piece of a tensor in an old rank: it begins at the element ``start`` of a stored tensor."""

    rank: int
    stored: str
    start: int


class _Entry(NamedTuple):
    box: Box
    piece: Range | Block
    copies: Sequence[_Copy]


class _HeldTensor:
    """The pieces of one tensor in all old ranks."""

    def __init__(self, tensor: LogicalTensor) -> None:
        self.tensor = tensor
        self._copies: dict[Range | Block, list[_Copy]] = {}
        """Of each piece, by rank."""
        self._ranges_only = True
        self._lookups: dict[bool, _Lookup] = {}

    def add(self, piece: Range | Block, copy: _Copy) -> None:
        piece = as_range(piece, self.tensor.shape)
        self._ranges_only &= isinstance(piece, Range)
        self._copies.setdefault(piece, []).append(copy)
        self._lookups.clear()

    def fetch(self, piece: Range | Block, rank: int) -> tuple[list[tuple[_Copy, Copy]], list[Range | Block]]:
        """Copies for ``piece``, counted from the first element of the pieces, and the parts of it that nobody has."""
        piece = as_range(piece, self.tensor.shape)
        flat = self._ranges_only and isinstance(piece, Range)
        shape = (self.tensor.elements,) if flat else self.tensor.shape
        if flat not in self._lookups:
            entries = [_Entry(box, each, at) for each, at in self._copies.items() for box in boxes_of(each, shape)]
            self._lookups[flat] = _Lookup(entries, len(shape))
        found: list[tuple[_Copy, Copy]] = []
        missing: list[Range | Block] = []
        for box in boxes_of(piece, shape):
            lacking = [box]
            for entry in self._lookups[flat].near(box):
                left: list[Box] = []
                for each in lacking:
                    if (common := meet(each, entry.box)) is None:
                        left.append(each)
                        continue
                    found.append((self._choose(entry.copies, rank), copy_of(common, piece, entry.piece, shape)))
                    left += without(each, common)
                lacking = left
                if not lacking:
                    break
            missing += [piece_of(each, piece.tensor, flat=flat) for each in lacking]
        return found, missing

    def _choose(self, copies: Sequence[_Copy], rank: int) -> _Copy:
        own = bisect_left(copies, rank, key=attrgetter("rank"))
        if own < len(copies) and copies[own].rank == rank:
            return copies[own]
        return copies[0 if self.tensor.role is Role.BUFFER else rank % len(copies)]


class _Lookup:
    """Boxes, found by bisection along the dimension that tells most of them apart."""

    def __init__(self, entries: Sequence[_Entry], dimensions: int) -> None:
        apart = [len({entry.box.offsets[axis] for entry in entries}) for axis in range(dimensions)]
        self._axis = axis = apart.index(max(apart))
        self._entries = sorted(entries, key=lambda entry: entry.box.offsets[axis])
        self._starts = [entry.box.offsets[axis] for entry in self._entries]
        self._reach = list(accumulate((e.box.offsets[axis] + e.box.lengths[axis] for e in self._entries), max))
        """How far the boxes up to each one reach."""

    def near(self, box: Box) -> Iterator[_Entry]:
        """All that overlap with ``box``, and perhaps others."""
        start = box.offsets[self._axis]
        first = bisect_right(self._reach, start)
        last = bisect_left(self._starts, start + box.lengths[self._axis])
        return (self._entries[index] for index in range(first, last))


def piece_of(box: Box, tensor: str, *, flat: bool) -> Range | Block:
    return Range(tensor, box.offsets[0], box.lengths[0]) if flat else Block(tensor, *box)
