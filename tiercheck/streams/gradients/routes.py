"""The way of tensors from a device to host memory, worked out once for tensors of the same shapes: which elements go
into which chunk of the ring, and from there to which bytes of the target.

A model may have hundreds of gradients. To work this out at each step would take the thread that trains longer than all
else that it does for a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.format.header import round_up
from tiercheck.streams.codecs import Part
from tiercheck.streams.codecs.blocks import BlockCodec
from tiercheck.streams.device.reading import CHUNK_NBYTES
from tiercheck.streams.tensors.as_bytes import NAMES

__all__ = ["Chunk", "Copy", "DeviceCodec", "Landing", "Piece", "Route", "parts_of", "route_of"]


class DeviceCodec(Protocol):
    """By what a device encodes."""

    @property
    def block(self) -> int:
        """Elements that are not parted."""
        ...

    def parts(self, elements: int, /) -> tuple[Part, ...]:
        """What is made of so many, from a block's beginning on."""
        ...


@dataclass(frozen=True)
class Landing:
    """Where one tensor goes: each of its parts begins so many bytes after the beginning of the target."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[int, ...]
    codec: DeviceCodec | None = None
    """``None``: it is copied as it is, or narrowed."""
    narrows: bool = False
    """From fp32 to the bf16 numbers that one scale has multiplied."""

    @property
    def elements(self) -> int:
        return self.shape.numel()

    @property
    def is_plain(self) -> bool:
        """Whether it is copied as it is."""
        return self.codec is None and not self.narrows

    def nbytes(self, elements: int) -> tuple[int, ...]:
        """Of each part, for so many elements from a block's beginning on."""
        if self.narrows:
            return (elements * torch.bfloat16.itemsize,)
        if self.codec is None:
            return (elements * self.dtype.itemsize,)
        return tuple(part.nbytes for part in self.codec.parts(elements))

    @property
    def block(self) -> int:
        """Elements that are not parted."""
        return 1 if self.codec is None else self.codec.block


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor, and where their parts lie in the chunk."""

    index: int
    """Of the tensor, among those that are sent."""
    landing: Landing
    start: int
    stop: int
    places: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.landing.elements

    def nbytes(self) -> tuple[int, ...]:
        return self.landing.nbytes(self.stop - self.start)


@dataclass(frozen=True)
class Copy:
    """From the chunk to the target."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    pieces: tuple[Piece, ...]
    copies: tuple[Copy, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class Route:
    chunks: tuple[Chunk, ...]
    gaps: NDArray[np.int64]
    """The bytes of the target, up to the end of the last part, that are in no part. Copies may write to them."""


def route_of(landings: Sequence[Landing], chunk_nbytes: int) -> Route:
    """The tensors, in order, in as few chunks as hold them."""
    chunks = tuple(map(chunk_of, pieces_by_chunk(landings, chunk_nbytes)))
    return Route(chunks, bytes_between(landings))


def bytes_between(landings: Sequence[Landing]) -> NDArray[np.int64]:
    gaps: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    end = 0
    for landing in landings:
        for start, nbytes in zip(landing.parts, landing.nbytes(landing.elements), strict=True):
            if nbytes:
                gaps.append(np.arange(end, start, dtype=np.int64))
                end = start + nbytes
    return np.concatenate(gaps)


def pieces_by_chunk(landings: Sequence[Landing], chunk_nbytes: int) -> Iterator[list[Piece]]:
    pieces: list[Piece] = []
    at = 0
    for index, landing in enumerate(landings):
        start, size = 0, landing.elements
        while start < size:
            stop = fitting(landing, start, size, chunk_nbytes - at)
            if stop == start:
                yield pieces
                pieces, at = [], 0
                continue
            places = []
            for nbytes in landing.nbytes(stop - start):
                places.append(at)
                at += round_up(nbytes)
            pieces.append(Piece(index, landing, start, stop, tuple(places)))
            start = stop
    if pieces:
        yield pieces


def fitting(landing: Landing, start: int, size: int, room: int) -> int:
    """The end of those elements from ``start`` on whose parts fit into the room."""

    def taken(elements: int) -> int:
        return sum(map(round_up, landing.nbytes(elements)))

    if taken(size - start) <= room:
        return size
    blocks = room // max(1, sum(landing.nbytes(landing.block)))
    while blocks > 0 and taken(blocks * landing.block) > room:
        blocks -= 1 + blocks // 1024
    return start + max(0, blocks) * landing.block


def chunk_of(pieces: Sequence[Piece]) -> Chunk:
    """Parts that lie behind one another in the chunk as in the target are copied together, and what lies between them
    with them."""
    parts = [
        Copy(place, begin + before, nbytes)
        for piece in pieces
        for place, begin, before, nbytes in zip(
            piece.places, piece.landing.parts, piece.landing.nbytes(piece.start), piece.nbytes(), strict=True
        )
    ]
    joined: list[Copy] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and part.target - last.target == part.source - last.source:
            joined[-1] = Copy(last.source, last.target, part.source + part.nbytes - last.source)
        else:
            joined.append(part)
    end = max((each.source + each.nbytes for each in joined), default=0)
    return Chunk(tuple(pieces), tuple(short for each in joined for short in cut(each)), end)


def cut(copy: Copy) -> Iterator[Copy]:
    """As bases are copied, so that the device serves other streams in between."""
    for start in range(0, copy.nbytes, CHUNK_NBYTES):
        nbytes = min(CHUNK_NBYTES, copy.nbytes - start)
        yield Copy(copy.source + start, copy.target + start, nbytes)


def parts_of(tensor: torch.Tensor, codec: BlockCodec | None, *, narrows: bool) -> tuple[Part, ...]:
    """What the device makes of a gradient: codes, bf16 numbers, or its own."""
    if codec is not None:
        return codec.parts(tensor.numel())
    return (Part("", "BF16" if narrows else NAMES[tensor.dtype], tuple(tensor.shape)),)
