"""Other names for what was saved: those that :class:`~tiercheck.streams.loading.Loading` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from tiercheck.errors import ConfigurationError
from tiercheck.format.index.logical import Block, LogicalIndex, LogicalTensor, Piece, Range
from tiercheck.types import shown

__all__ = ["names_given", "renamed_index", "renamed_tensors"]


def names_given(rename: Callable[[str], Any] | None, saved: Iterable[LogicalTensor]) -> dict[str, str]:
    """By each name that was saved, the one that it is given. Errors: ``ConfigurationError``."""
    given: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in dict.fromkeys(tensor.name for tensor in saved):
        try:
            new = name if rename is None else rename(name)
        except Exception as error:
            raise ConfigurationError(f"rename({name!r}) raised {type(error).__name__}: {error}") from error
        if not isinstance(new, str) or not new:
            raise ConfigurationError(f"rename({name!r}) must return a name, not {shown(new)}")
        if new in taken:
            raise ConfigurationError(f"rename gives {taken[new]} and {name} the same name {shown(new)}")
        taken[new], given[name] = name, new
    return given


def renamed_index(index: LogicalIndex, names: Mapping[str, str]) -> LogicalIndex:
    """The index with the model's tensors under other names. What is stored keeps its own. Errors:
    ``ConfigurationError`` for a name that no shard can hold."""

    def renamed(piece: Piece) -> Piece:
        match piece:
            case Range():
                return Range(names[piece.tensor], piece.start, piece.length)
            case Block():
                return Block(names[piece.tensor], piece.offsets, piece.lengths)
        return piece

    renamed_by_name = {each.name: each for each in renamed_tensors(index.tensors.values(), names)}
    stored = {name: tuple(map(renamed, pieces)) for name, pieces in index.stored.items()}
    return replace(index, tensors=renamed_by_name, stored=stored, aliases={})


def renamed_tensors(tensors: Iterable[LogicalTensor], names: Mapping[str, str]) -> list[LogicalTensor]:
    """Errors: ``ConfigurationError`` for a name that no shard can hold."""
    try:
        return [structs.replace(each, name=names[each.name]) for each in tensors]
    except ValueError as error:
        raise ConfigurationError(f"rename gives a name that no tensor can have: {error}") from error
