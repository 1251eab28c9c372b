"""Compaction in Numba: the values are read once.

Each thread has a contiguous range of them. The first one writes straight into the caller's buffers; the others write
into chunks of their own, which are put behind it in order once all counts are known. So the result does not depend on
the number of threads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compaction.threshold import select_threshold
from tiercheck.kernels.cpu.compiled import compiled
from tiercheck.kernels.cpu.simd import (
    GROUP,
    avx512,
    count_ones,
    gather,
    lane_bits,
    reach_one,
    reaching,
    source_of,
    trailing_zeros,
)
from tiercheck.kernels.reference.compaction import (
    Values,
    check_buffers,
    check_values,
    threshold_bits,
    widened,
)
from tiercheck.kernels.threads import run, split

__all__ = ["compact", "compact_into", "select_threshold"]

Words = NDArray[np.uint32]

CHUNK = 1 << 16
"""Survivors that a thread's private buffer holds; together half a MiB, so that it stays in the second cache."""

IDLE_CHUNKS = 64
"""Private buffers kept for the next call: fresh pages would cost more than what is written to them."""


@dataclass
class Chunk:
    """``count`` survivors of one thread's range, fp32 patterns, and their indices."""

    indices: Words
    survivors: Words
    count: int = 0


@dataclass(frozen=True)
class Task:
    """What there is to compact, as the compiled kernels take it."""

    source: NDArray[Any]
    residual: Words | None
    least: np.uint32


idle: deque[Chunk] = deque(maxlen=IDLE_CHUNKS)


def compact(
    values: Values, threshold: float, *, residual: NDArray[np.float32] | None = None, threads: int = 1
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """As the reference."""
    check_values(values, residual)
    task = task_of(values, threshold, residual)
    pieces = run(lambda piece: collected(task, piece, values.size), split(values.size, threads))
    chunks = [chunk for piece, _ in pieces for chunk in piece]
    indices = np.empty(sum(count for _, count in pieces), np.uint32)
    survivors = np.empty(indices.size, np.uint32)
    unload(chunks, indices, survivors, 0)
    return indices, survivors.view(np.float32)


def compact_into(
    values: Values,
    threshold: float,
    indices: NDArray[np.uint32],
    survivors: NDArray[np.float32],
    *,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> int:
    """As the reference."""
    check_buffers(indices, survivors)
    check_values(values, residual)
    task, found = task_of(values, threshold, residual), survivors.view(np.uint32)

    def one(piece: slice) -> tuple[list[Chunk], int]:
        return collected(task, piece, indices.size) if piece.start else ([], written(task, piece, indices, found))

    pieces = run(one, split(values.size, threads))
    chunks = [chunk for piece, _ in pieces for chunk in piece]
    unload(chunks, indices, found, pieces[0][1])
    return sum(count for _, count in pieces)


def task_of(values: Values, threshold: float, residual: NDArray[np.float32] | None) -> Task:
    least = threshold_bits(threshold)
    if residual is not None:
        return Task(source_of(values), residual.view(np.uint32), least)
    return Task(source_of(values), None, least_pattern(values.dtype, least))


def least_pattern(dtype: np.dtype[Any], least: np.uint32) -> np.uint32:
    """The least magnitude among the patterns of ``dtype`` whose value is that of the fp32 pattern ``least`` or more."""
    if dtype == np.float32:
        return least
    if dtype == np.uint16:
        return np.uint32((int(least) + 0xFFFF) >> 16)
    with np.errstate(over="ignore"):
        nearest = least.view(np.float32).astype(np.float16).reshape(1)
    short = widened(nearest).view(np.uint32)[0] < least
    return np.uint32(nearest.view(np.uint16)[0]) + np.uint32(short)


def collected(task: Task, piece: slice, limit: int) -> tuple[list[Chunk], int]:
    """The first ``limit`` survivors of the piece or a few more, and the number of all of them."""
    chunks: list[Chunk] = []
    position, count = piece.start, 0
    while position < piece.stop and count < limit:
        chunk = unused_chunk()
        position, chunk.count = collect(
            task.source, task.residual, task.least, position, piece.stop, chunk.indices, chunk.survivors
        )
        chunks.append(chunk)
        count += chunk.count
    return chunks, count + written(task, slice(position, piece.stop), *NOWHERE)


def unused_chunk() -> Chunk:
    try:
        return idle.pop()
    except IndexError:
        return Chunk(np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.uint32))


NOWHERE = np.empty(0, np.uint32), np.empty(0, np.uint32)


def written(task: Task, piece: slice, indices: Words, survivors: Words) -> int:
    """The number of all survivors of the piece; as many as the buffers hold are in them."""
    position, count = collect(task.source, task.residual, task.least, piece.start, piece.stop, indices, survivors)
    return int(fill(task.source, task.residual, task.least, position, piece.stop, indices, survivors, count))


def unload(chunks: list[Chunk], indices: Words, survivors: Words, start: int) -> None:
    """The chunks' content, one behind the other from ``start`` on, as far as there is room."""
    for chunk in chunks:
        count = min(chunk.count, max(0, indices.size - start))
        indices[start : start + count] = chunk.indices[:count]
        survivors[start : start + count] = chunk.survivors[:count]
        start += count
        idle.append(chunk)


@compiled
def collect(
    source: NDArray[Any], residual: Any, least: np.uint32, start: int, stop: int, indices: Words, survivors: Words
) -> tuple[int, int]:
    """Compact from ``start`` on while a whole group more has room; where it stopped, and how many were found.

    The count is unsigned: of a signed index, Numba looks whether it counts from the end.
    """
    kept: Any = np.uint64(0)
    position, room = start, np.uint64(max(0, indices.size - GROUP + 1))
    while kept < room and position + GROUP <= stop:
        mask = reaching(source, residual, position, least)
        kept = take(source, residual, position, mask, indices, survivors, kept)
        position += GROUP
    if kept < room:
        while position < stop:
            if reach_one(source, residual, position, least):
                indices[kept] = position
                survivors[kept] = lane_bits(source, residual, position)
                kept += np.uint64(1)
            position += 1
    return position, int(kept)


@compiled
def take(
    source: NDArray[Any], residual: Any, position: int, mask: Any, indices: Words, survivors: Words, kept: Any
) -> Any:
    """The survivors of one group; up to ``GROUP`` elements from ``kept`` on are written.

    The first two are written whether there or not: in groups of 64, and a hundredth of the elements kept, a
    branch on their number would be guessed wrong half the time, and one for a third is not.
    """
    none, one = np.uint64(0), np.uint64(1)
    second = mask & (mask - one)
    third = second & (second - one)
    first_lane = position + (trailing_zeros(mask) & 63)
    second_lane = position + (trailing_zeros(second) & 63)
    indices[kept] = first_lane
    survivors[kept] = lane_bits(source, residual, first_lane)
    indices[kept + one] = second_lane
    survivors[kept + one] = lane_bits(source, residual, second_lane)
    if third == none:
        return kept + np.uint64(mask != none) + np.uint64(second != none)
    if avx512():
        return gather(source, residual, position, mask, indices, survivors, kept)
    kept += one + one
    while third != none:
        lane = position + trailing_zeros(third)
        indices[kept] = lane
        survivors[kept] = lane_bits(source, residual, lane)
        kept += one
        third &= third - one
    return kept


@compiled
def fill(
    source: NDArray[Any],
    residual: Any,
    least: np.uint32,
    start: int,
    stop: int,
    indices: Words,
    survivors: Words,
    kept: int,
) -> int:
    """Compact from ``start`` to ``stop`` to the buffers' last element, and count what they do not hold."""
    position = start
    while position + GROUP <= stop:
        mask = reaching(source, residual, position, least)
        while mask != np.uint64(0) and kept < indices.size:
            lane = position + trailing_zeros(mask)
            indices[kept] = lane
            survivors[kept] = lane_bits(source, residual, lane)
            kept += 1
            mask &= mask - np.uint64(1)
        kept += int(count_ones(mask))
        position += GROUP
    while position < stop:
        if reach_one(source, residual, position, least):
            if kept < indices.size:
                indices[kept] = position
                survivors[kept] = lane_bits(source, residual, position)
            kept += 1
        position += 1
    return kept
