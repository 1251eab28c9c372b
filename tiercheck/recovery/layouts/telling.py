"""The messages in which new ranks tell each other what they have found of the ranks that saved (the old ranks).

Many old ranks have the same content, such as the list of the model's tensors. It is sent once: each new rank that has
read it sends a part of it. So all messages are short, and about equally long, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from tiercheck.format.index.outline import Outline

__all__ = ["Found", "ReachableVersions", "SharedParts", "Wholes", "differing", "part_of"]


@dataclass(frozen=True)
class ReachableVersions:
    """By old rank, the newest version that one new rank has found a way to: by the tiers that all see, and by all of
    its tiers together."""

    shared: dict[int, int]
    here: dict[int, int]
    last: int
    """The newest version of which there is anything."""


class Found(Struct, frozen=True, array_like=True):
    """What one new rank tells of an old one, of which it has read the index."""

    index: str
    """Its checksum: old ranks with the same index have the same pieces."""
    outline: Outline
    wholes: str
    """The checksum of :class:`Wholes`; empty if the old rank has no trained tensor whole."""


class Wholes(Struct, frozen=True, array_like=True):
    """The trained tensors that a base has whole: ranks that say the same of one base have the same values."""

    base: tuple[int, int]
    """Its generation and version."""
    held: dict[str, int]
    """By tensor, 32 bits of its checksum."""


class SharedParts(Struct, frozen=True, array_like=True):
    """One new rank's parts of the content that several new ranks have read."""

    parts: dict[str, bytes]
    """By the checksum of a content, this rank's part of it (:func:`part_of`)."""
    identity: Any = None
    """The identity of the first old rank, if this new rank has read it."""


def part_of(content: bytes, tellers: Sequence[int], rank: int) -> bytes:
    """The part of ``content`` that ``rank`` sends. All ``tellers`` have read it, and their parts, in the order of
    ``tellers``, are the whole."""
    place, of = tellers.index(rank), len(tellers)
    return content[len(content) * place // of : len(content) * (place + 1) // of]


def differing(wholes: Iterable[Wholes]) -> tuple[str, ...]:
    """The tensors of which there are several values in the same base."""
    held: dict[tuple[tuple[int, int], str], set[int]] = {}
    for each in wholes:
        for name, digest in each.held.items():
            held.setdefault((each.base, name), set()).add(digest)
    return tuple(sorted({name for (_, name), digests in held.items() if len(digests) > 1}))
