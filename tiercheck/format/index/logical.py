"""What the tensors of a shard mean: each is a row of pieces of the tensors that the model knows.

A shard stores a tensor as its rank holds it: a whole parameter, a block of one, or a flat partition that begins in the
middle of one parameter, holds some more, and ends in padding. A :class:`LogicalIndex` says which.

**The optimizer's tensors are not in the index.** One that has its master's shape, such as ``exp_avg``, lies as its
master does, element for element, and so does a residual, which is flat. Any other, such as a count of steps, belongs to
its master as a whole (:func:`lies_as_master`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from tiercheck.format.header import DIMENSIONS_MAX, TensorSpec
from tiercheck.schema import Count

__all__ = [
    "EXTRA",
    "MASTER",
    "Block",
    "LogicalIndex",
    "LogicalTensor",
    "Padding",
    "Piece",
    "Range",
    "Role",
    "Shape",
    "lies_as_master",
    "whole",
]

MASTER, EXTRA = "master/", "extra/"
"""How the names of tensors of a base begin (:mod:`tiercheck.streams.records.base`)."""

COUNT_OF_STEPS = "step"
"""The optimizer's tensor that belongs to its master as a whole even if both have no dimension."""

Shape = tuple[int, ...]
Lengths = Annotated[tuple[Count, ...], Meta(max_length=DIMENSIONS_MAX)]


class Role(IntEnum):
    """What a tensor is to its model. The numbers are part of the format."""

    PARAMETER = 0
    BUFFER = 1


class LogicalTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the model, as the model knows it. Errors: ``ValueError`` for an impossible one."""

    name: str
    """The same on all ranks, whatever the layout; of a pipeline, unique over its stages."""
    dtype: str
    """As the model has it, such as ``BF16``. A master is stored in a wider one."""
    shape: Lengths
    role: Role = Role.PARAMETER
    trained: bool = False
    """Whether an optimizer updates it."""
    slice_name: str = ""
    """Usually empty. Otherwise ranks hold different tensors under this name, and nobody knows how they make one: slices
    of tensor parallelism, or what each stage of a pipeline has for itself. This says which one it is, and ``shape`` is
    that one's. Only a rank with the same one can take it."""

    def __post_init__(self) -> None:
        TensorSpec(self.name, self.dtype, self.shape)  # what no shard could hold is no tensor

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from all other tensors of the job."""
        return (self.name, self.slice_name)


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive elements of a flattened tensor."""

    tensor: str
    start: int
    length: int

    @property
    def elements(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangular part of a tensor, its elements in their order in the tensor."""

    tensor: str
    offsets: Shape
    lengths: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements that belong to no tensor. What they hold means nothing."""

    length: int

    @property
    def elements(self) -> int:
        return self.length


Piece = Range | Block | Padding


def whole(tensor: LogicalTensor) -> Range:
    return Range(tensor.name, 0, tensor.elements)


@dataclass(frozen=True)
class LogicalIndex:
    """What one rank stores. Errors: ``ValueError`` for a piece that does not lie in its tensor."""

    tensors: Mapping[str, LogicalTensor]
    """By name, the model's tensors of which the rank has pieces."""
    stored: Mapping[str, tuple[Piece, ...]]
    """By the name in the shard (``master/NAME``, ``extra/NAME``), the pieces that a stored tensor consists of, in the
    order of its elements."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names under which the model knows a tensor (tied weights), and the name under which it is stored."""

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if name != tensor.name:
                raise ValueError(f"the tensor {tensor.name!r} is listed as {name!r}")
        if both := self.aliases.keys() & self.tensors.keys():
            raise ValueError(f"{min(both)!r} is a tensor, and another name of {self.aliases[min(both)]!r}")
        for name, pieces in self.stored.items():
            if not name.startswith((MASTER, EXTRA)):
                raise ValueError(f"{name!r} is neither a master nor an extra")
            for piece in pieces:
                check_piece(piece, self.tensors, name)

    @classmethod
    def of_whole(
        cls, tensors: Iterable[LogicalTensor], aliases: Mapping[str, str] = MappingProxyType({})
    ) -> LogicalIndex:
        """Of a rank that stores each tensor whole, under its own name: what is trained is a master."""
        by_name = {tensor.name: tensor for tensor in tensors}
        stored = {(MASTER if each.trained else EXTRA) + name: (whole(each),) for name, each in by_name.items()}
        return cls(by_name, stored, dict(aliases))

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Compare with the tensors of the shard, ``shapes`` by name: the pieces of each master and each extra cover it
        exactly once. Errors: ``ValueError`` naming the stored tensor."""
        expected = {name for name in shapes if name.startswith((MASTER, EXTRA))}
        if differing := sorted(expected ^ self.stored.keys()):
            there = "is not stored" if differing[0] in self.stored else "is not in the index"
            raise ValueError(f"{differing[0]!r} {there}")
        for name, pieces in self.stored.items():
            covered, elements = sum(piece.elements for piece in pieces), math.prod(shapes[name])
            if covered != elements:
                raise ValueError(f"the pieces of {name!r} have {covered} elements, and it has {elements}")


def lies_as_master(key: str, shape: Shape, master: Shape) -> bool:
    """Whether the optimizer's tensor ``key`` of a master lies as the master does, by their shapes. Otherwise it belongs
    to the master as a whole."""
    return shape == master and not (key == COUNT_OF_STEPS and not shape)


def check_piece(piece: Piece, tensors: Mapping[str, LogicalTensor], stored: str) -> None:
    """Errors: ``ValueError`` if it does not lie in its tensor."""
    if isinstance(piece, Padding):
        if piece.length < 0:
            raise ValueError(f"{stored!r} has a padding of {piece.length} elements")
        return
    if piece.tensor not in tensors:
        raise ValueError(f"{stored!r} has a piece of {piece.tensor!r}, which is not among the tensors")
    tensor = tensors[piece.tensor]
    if isinstance(piece, Range):
        inside = 0 <= piece.start <= piece.start + piece.length <= tensor.elements
    else:
        inside = len(piece.offsets) == len(piece.lengths) == len(tensor.shape) and all(
            0 <= offset <= offset + length <= size
            for offset, length, size in zip(piece.offsets, piece.lengths, tensor.shape, strict=True)
        )
    if not inside:
        raise ValueError(f"{stored!r} has {piece}, which does not lie in a tensor of {list(tensor.shape)}")
