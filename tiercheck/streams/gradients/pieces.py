"""What of the tensors that recur, those of a record or a base, is copied and hashed in one go, while it is in the
processor's cache; and by how many threads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.format.checksums import BLOCK_NBYTES, checksum_of_blocks
from tiercheck.format.copying import CACHED_BYTES, copy_with_xxh3
from tiercheck.format.header import TensorSpec
from tiercheck.format.recurring import Recurring
from tiercheck.kernels.reference.gathering import bytes_at
from tiercheck.kernels.threads import run
from tiercheck.streams.gradients.scales import Scale

__all__ = [
    "Piece",
    "Stored",
    "as_they_are",
    "blocks_of",
    "checksums_of",
    "copy_all",
    "hash_all",
    "look_at_all",
    "pieces_of",
]

THREAD_NBYTES_MIN = 4 << 20
"""Starting a thread takes as long as copying a tenth of that."""


@dataclass(frozen=True)
class Stored:
    """How each of some tensors is stored: as it is, its upper halves (``narrowed``), or divided by a scale."""

    sizes: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    narrowed: NDArray[np.bool_]
    scaled: NDArray[np.bool_]


def as_they_are(specs: Collection[TensorSpec]) -> Stored:
    """By their bytes."""
    nbytes = np.array([spec.nbytes for spec in specs], np.int64)
    none = np.zeros(len(specs), np.bool_)
    return Stored(nbytes, nbytes, none, none)


@dataclass(frozen=True)
class Piece:
    """Consecutive tensors of few bytes, or a block of one that has many."""

    places: slice
    """Which tensors."""
    offset: int
    """The block begins so many bytes after its tensor."""
    digests: slice
    """Where its digests go: one for each tensor, or one for the block."""
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    """Where each lies in the memory of all."""
    copied: NDArray[np.intp] | slice
    """Which of the piece are copied, perhaps narrowed; the others are ``scaled``."""
    copied_nbytes: NDArray[np.int64]
    narrowed: NDArray[np.bool_]
    """Of those that are copied."""
    scaled: NDArray[np.intp]
    scaled_sizes: NDArray[np.int64]
    is_plain: bool
    """Whether it is a block that is stored as it is."""

    @property
    def nbytes(self) -> int:
        return int(self.stops[-1] - self.starts[0])


def pieces_of(tensors: Recurring, stored: Stored) -> Iterator[Piece]:
    """All of it, in order. A block of a checksum is one piece; digests are numbered in order."""
    number = 0
    for places in runs_of(tensors):
        starts, stops = (np.array(each[places], np.int64) for each in (tensors.starts, tensors.stops))
        length = int(stops[-1] - starts[0])
        if len(starts) > 1 or length <= BLOCK_NBYTES:
            digests = slice(number, number + len(starts))
            yield piece(stored, places, digests, starts, stops, 0, stored.nbytes[places], stored.sizes[places])
            number = digests.stop
            continue
        # Of each stored byte, so many bytes of the tensor.
        ratio = int(stored.nbytes[places.start]) // length
        itemsize = int(stored.nbytes[places.start] // stored.sizes[places.start])
        for at in range(0, length, BLOCK_NBYTES):
            nbytes = min(BLOCK_NBYTES, length - at)
            first, last = (np.array([int(starts[0]) + each], np.int64) for each in (at, at + nbytes))
            of_tensor = np.array([nbytes * ratio], np.int64)
            digests = slice(number, number + 1)
            yield piece(stored, places, digests, first, last, at * ratio, of_tensor, of_tensor // itemsize)
            number += 1


def piece(
    stored: Stored,
    places: slice,
    digests: slice,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    offset: int,
    nbytes: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> Piece:
    is_scaled, is_narrowed = stored.scaled[places], stored.narrowed[places]
    scaled, copied = np.flatnonzero(is_scaled), np.flatnonzero(~is_scaled)
    is_long = len(starts) == 1 and int(stops[0] - starts[0]) > CACHED_BYTES
    return Piece(
        places=places,
        offset=offset,
        digests=digests,
        starts=starts,
        stops=stops,
        copied=copied if scaled.size else slice(None),
        copied_nbytes=nbytes[copied],
        narrowed=is_narrowed[copied],
        scaled=scaled,
        scaled_sizes=sizes[scaled],
        is_plain=is_long and not (is_narrowed | is_scaled).any(),
    )


def runs_of(tensors: Recurring) -> Iterator[slice]:
    """Tensors that lie behind one another, together no longer than what stays in the processor's cache."""
    first = 0
    for index, stop in enumerate(tensors.stops):
        if index > first and stop - tensors.starts[first] > CACHED_BYTES:
            yield slice(first, index)
            first = index
    if first < len(tensors.stops):
        yield slice(first, len(tensors.stops))


def copy_all(
    pieces: Sequence[Piece],
    addresses: NDArray[np.int64],
    scale: Scale | None,
    memory: memoryview,
    *,
    few: bool,
    threads: int,
) -> NDArray[np.uint64]:
    """Copy the tensors at these addresses, which the caller holds, to where they lie in ``memory``. Returns the pieces'
    digests. ``few``: NumPy does it. At most ``threads`` run, the caller's included."""
    digests = np.empty(pieces[-1].digests.stop if pieces else 0, np.uint64)
    shares = shares_of([each.nbytes for each in pieces], threads)

    def copy(share: slice) -> None:
        for each in pieces[share]:
            digests[each.digests] = copied(each, addresses, scale, memory, few, len(shares) > 1)

    run(copy, shares)
    return digests


def hash_all(pieces: Sequence[Piece], memory: memoryview, *, threads: int) -> NDArray[np.uint64]:
    """The pieces' digests, of tensors that lie in ``memory``. At most ``threads`` run, the caller's included."""
    digests = np.empty(pieces[-1].digests.stop if pieces else 0, np.uint64)
    held = np.frombuffer(memory, np.uint8)

    def look(share: slice) -> None:
        for each in pieces[share]:
            digests[each.digests] = kernels.hash_each.reference(held, each.starts, each.stops)

    run(look, shares_of([each.nbytes for each in pieces], threads))
    return digests


def look_at_all(
    look: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]],
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    *,
    threads: int,
) -> NDArray[np.bool_]:
    """What a kernel finds of fp32 tensors, by their addresses and numbers of elements. At most ``threads`` run."""
    shares = shares_of((4 * sizes).tolist(), threads)
    return np.concatenate(run(lambda share: look(addresses[share], sizes[share]), shares))


def copied(
    piece: Piece, addresses: NDArray[np.int64], scale: Scale | None, memory: memoryview, few: bool, shared: bool
) -> NDArray[np.uint64] | int:
    where = addresses[piece.places] + piece.offset
    if piece.is_plain:
        into = memory[int(piece.starts[0]) : int(piece.stops[0])]
        source = bytes_at(int(where[0]), len(into))
        return copy_beside_others(into, source) if shared else copy_with_xxh3(into, source.data)
    out = np.frombuffer(memory, np.uint8)
    gather_into = kernels.gather_into.reference if few else kernels.gather_into
    gather_into(where[piece.copied], piece.copied_nbytes, piece.narrowed, piece.starts[piece.copied], out)
    if scale is not None and piece.scaled.size:
        gather_scaled_into = kernels.gather_scaled_into.reference if few else kernels.gather_scaled_into
        starts = piece.starts[piece.scaled]
        gather_scaled_into(where[piece.scaled], piece.scaled_sizes, scale.value, scale.fp16, starts, out)
    hash_each = kernels.hash_each.reference if few else kernels.hash_each
    return hash_each(out, piece.starts, piece.stops)


def copy_beside_others(into: memoryview, source: NDArray[np.uint8]) -> int:
    """As :func:`copy_with_xxh3`, but without Python's lock also while it copies: other threads do the same."""
    digest, target = xxhash.xxh3_64(), np.frombuffer(into, np.uint8)
    for start in range(0, len(source), CACHED_BYTES):
        part = target[start : start + CACHED_BYTES]
        np.copyto(part, source[start : start + CACHED_BYTES])
        digest.update(part.data)
    return int(digest.intdigest())


def shares_of(nbytes: Sequence[int], threads: int) -> list[slice]:
    """Consecutive pieces of these lengths in at most so many shares, of about as many bytes each."""
    ends = np.cumsum(nbytes)
    whole = int(ends[-1]) if len(nbytes) else 0
    count = max(1, min(threads, whole // THREAD_NBYTES_MIN))
    edges = [0, *(int(np.searchsorted(ends, whole * each // count)) + 1 for each in range(1, count)), len(nbytes)]
    return [slice(start, max(start, stop)) for start, stop in pairwise(edges)]


def blocks_of(pieces: Sequence[Piece], digests: NDArray[np.uint64]) -> dict[int, bytes]:
    """The digests of the blocks of each tensor that has several, one behind the other, by the tensor's place."""
    ranges: dict[int, slice] = {}
    for each in pieces:
        if each.offset:
            first = ranges.get(each.places.start, slice(each.digests.start - 1, 0)).start
            ranges[each.places.start] = slice(first, each.digests.stop)
    return {place: digests[of_blocks].astype(">u8").tobytes() for place, of_blocks in ranges.items()}


def checksums_of(pieces: Sequence[Piece], digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The checksum of each tensor: the digest, or that of its blocks' digests."""
    if not (blocks := blocks_of(pieces, digests)):
        return digests
    inner = np.zeros(len(digests), np.bool_)
    for each in pieces:
        inner[each.digests] = each.offset > 0
    found = digests[~inner]
    for place, of_blocks in blocks.items():
        found[place] = int(checksum_of_blocks(of_blocks), 16)
    return found
