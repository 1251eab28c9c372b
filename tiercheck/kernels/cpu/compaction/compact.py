"""Compaction in Numba: the values are read once.

Each thread works on a contiguous range of the values. The first thread writes straight into the caller's buffers. The
others write into chunks of their own, which are copied behind it, in order, when all counts are known. So the result
does not depend on the number of threads.
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
"""Survivors in one of a thread's own buffers. Both arrays take half a MiB, so that they stay in the second-level
cache."""

IDLE_CHUNKS = 64
"""Buffers that are kept for the next call. Fresh pages would cost more than what is written to them."""


@dataclass
class Chunk:
    """``count`` survivors of one thread's range, as fp32 patterns, and their indices."""

    indices: Words
    survivors: Words
    count: int = 0


@dataclass(frozen=True)
class Task:
    """What is to be compacted, in the form that the compiled functions take."""

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
    """The smallest pattern of ``dtype`` whose magnitude is at least that of the fp32 pattern ``least``."""
    if dtype == np.float32:
        return least
    if dtype == np.uint16:
        return np.uint32((int(least) + 0xFFFF) >> 16)
    with np.errstate(over="ignore"):
        nearest = least.view(np.float32).astype(np.float16).reshape(1)
    short = widened(nearest).view(np.uint32)[0] < least
    return np.uint32(nearest.view(np.uint16)[0]) + np.uint32(short)


def collected(task: Task, piece: slice, limit: int) -> tuple[list[Chunk], int]:
    """The first ``limit`` survivors of the piece, or a few more, and the number of all its survivors."""
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
    """The number of survivors of the piece. The buffers hold the first of them, as many as they have room for."""
    position, count = collect(task.source, task.residual, task.least, piece.start, piece.stop, indices, survivors)
    return int(fill(task.source, task.residual, task.least, position, piece.stop, indices, survivors, count))


def unload(chunks: list[Chunk], indices: Words, survivors: Words, start: int) -> None:
    """Copy the chunks' survivors behind one another into the buffers, from ``start`` on, as far as there is room."""
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
    """Compact from ``start`` on, as long as the buffers have room for a whole group. Returns the position where it
    stopped, and the number of survivors.

    The count is unsigned, since Numba checks a signed index for being negative.
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
    """Write the survivors of one group. Up to ``GROUP`` elements of the buffers from ``kept`` on are overwritten.

    Two survivors are always written, even if there are fewer. If one element in a hundred survives, a branch on the
    number in a group of 64 is mispredicted half of the time; a branch on whether there is a third is not.
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
    """Compact from ``start`` to ``stop``, up to the buffers' last element. Returns the number of survivors, also of
    those that the buffers do not hold."""
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
