"""The form in which a base carries its index.

A matrix takes 18 bytes and its name, and one to three bytes more if it is stored whole under its own name. Otherwise
each piece of it takes up to 14 bytes. So a rank that holds a piece of each of 10,000 parameters carries about 0.6 MB
with a base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tiercheck import schema
from tiercheck.errors import Corruption
from tiercheck.format.container import Shard
from tiercheck.format.header import NAME_BYTES_MAX, TENSORS_MAX, TensorSpec
from tiercheck.format.index.logical import (
    EXTRA,
    MASTER,
    Block,
    Lengths,
    LogicalIndex,
    LogicalTensor,
    Padding,
    Piece,
    Range,
    whole,
)
from tiercheck.schema import Count

__all__ = ["INDEX", "index_of", "plain_index", "read_index"]

INDEX = "index"
"""The object of a base that is its index."""

Name = Annotated[str, Meta(max_length=NAME_BYTES_MAX)]
Number = Annotated[int, Meta(ge=0, lt=TENSORS_MAX)]
"""A tensor's place in the list of tensors."""


class PieceMessage(msgspec.Struct, frozen=True, array_like=True):
    tensor: Annotated[int, Meta(ge=-1, lt=TENSORS_MAX)]
    """-1: padding."""
    start: Count | Lengths
    """Of a range, or by dimension those of a block."""
    length: Count | Lengths


@schema.ready
@dataclass(frozen=True)
class IndexMessage:
    """See :class:`~tiercheck.format.index.logical.LogicalIndex`."""

    tensors: Annotated[list[LogicalTensor], Meta(max_length=TENSORS_MAX)]
    masters: list[Number] = field(default_factory=list)
    """The tensors that are stored whole as the master of their name."""
    extras: list[Number] = field(default_factory=list)
    """The same, as an extra."""
    stored: dict[Name, list[PieceMessage]] = field(default_factory=dict)
    """Everything else."""
    aliases: dict[Name, Name] = field(default_factory=dict)


def plain_index(index: LogicalIndex) -> Any:
    """The index in dicts, lists and atoms."""
    numbers = {name: number for number, name in enumerate(index.tensors)}
    whole_of = {
        prefix: [
            number
            for name, number in numbers.items()
            if index.stored.get(prefix + name) == (whole(index.tensors[name]),)
        ]
        for prefix in (MASTER, EXTRA)
    }
    tensors = list(index.tensors.values())
    told = {prefix + tensors[number].name for prefix, each in whole_of.items() for number in each}
    stored = {
        name: [piece_message(piece, numbers) for piece in pieces]
        for name, pieces in index.stored.items()
        if name not in told
    }
    return schema.plain(IndexMessage(tensors, whole_of[MASTER], whole_of[EXTRA], stored, dict(index.aliases)))


def read_index(value: Any) -> LogicalIndex:
    """What :func:`plain_index` returned. Errors: ``ValueError`` saying what is wrong."""
    message = schema.read(IndexMessage, value)
    tensors = message.tensors
    try:
        stored: dict[str, tuple[Piece, ...]] = {}
        for prefix, numbers in ((MASTER, message.masters), (EXTRA, message.extras)):
            stored |= {prefix + tensors[number].name: (whole(tensors[number]),) for number in numbers}
        stored |= {name: tuple(piece_of(each, tensors) for each in pieces) for name, pieces in message.stored.items()}
    except IndexError:
        raise ValueError("the index speaks of a tensor that it does not have") from None
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise ValueError("the index has a tensor twice")
    return LogicalIndex(by_name, stored, message.aliases)


def index_of(shard: Shard, referred: Sequence[TensorSpec] = ()) -> LogicalIndex:
    """The index of a base. ``referred``: the tensors that it refers to. Errors: ``Corruption`` if it has none, or it
    speaks of other tensors."""
    try:
        index = read_index(shard.object(INDEX))
        index.check({spec.name: spec.shape for spec in (*shard.specs, *referred)})
    except KeyError:
        raise Corruption("the base has no index", tier=shard.tier, key=shard.key) from None
    except ValueError as error:
        raise Corruption(f"the base's index cannot be read: {error}", tier=shard.tier, key=shard.key) from error
    return index


def piece_message(piece: Piece, numbers: dict[str, int]) -> PieceMessage:
    match piece:
        case Padding():
            return PieceMessage(-1, 0, piece.length)
        case Range():
            return PieceMessage(numbers[piece.tensor], piece.start, piece.length)
        case Block():
            return PieceMessage(numbers[piece.tensor], piece.offsets, piece.lengths)


def piece_of(message: PieceMessage, tensors: list[LogicalTensor]) -> Piece:
    match message.start, message.length:
        case int() as start, int() as length:
            return Padding(length) if message.tensor < 0 else Range(tensors[message.tensor].name, start, length)
        case tuple() as offsets, tuple() as lengths if message.tensor >= 0:
            return Block(tensors[message.tensor].name, offsets, lengths)
    raise ValueError("the index has a piece that is neither a range, nor a block, nor padding")
