"""The threshold of a compaction, estimated from samples, in Numba.

Many tensors are small; for these, sampling is most of the cost of a compaction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, frozen
from tiercheck.kernels.cpu.prefetch import prefetch
from tiercheck.kernels.cpu.simd import GROUP, lane_bits, reaching, source_of, trailing_zeros
from tiercheck.kernels.reference.compaction import (
    INFINITY,
    SAMPLED_TOGETHER,
    SAMPLES,
    Values,
    check_ratio,
    check_values,
    sample_keys,
    wanted_of,
)

__all__ = ["select_threshold"]

Words = NDArray[np.uint32]

AHEAD = 32 * SAMPLED_TOGETHER
"""How many samples ahead memory is prefetched."""


def select_threshold(
    values: Values, ratio: float, seed: int, *, residual: NDArray[np.float32] | None = None, threads: int = 1
) -> float:
    """As the reference."""
    check_ratio(ratio)
    check_values(values, residual)
    samples = min(values.size, SAMPLES)
    if not samples:
        return float(np.uint32(1).view(np.float32))
    positions, magnitudes = np.empty(samples, np.uint32), np.empty(samples, np.uint32)
    if values.size > SAMPLES:
        draw(np.uint64(values.size), *sample_keys(seed), positions)
    else:
        positions[:] = np.arange(samples, dtype=np.uint32)
    look(source_of(values), None if residual is None else frozen(residual), positions, magnitudes)
    chosen = int(select(magnitudes, wanted_of(samples, ratio), positions))
    return float(np.uint32(min(max(chosen, 1), int(INFINITY))).view(np.float32))


@compiled
def draw(size: Any, first: Any, second: Any, positions: Words) -> None:
    runs, together = np.uint64(SAMPLES // SAMPLED_TOGETHER), np.uint64(SAMPLED_TOGETHER)
    places = size // together
    for run in range(runs):
        hashed = np.uint32(run) ^ first
        hashed = np.uint32((hashed ^ (hashed >> np.uint32(16))) * np.uint32(0x7FEB352D))
        hashed = np.uint32((hashed ^ (hashed >> np.uint32(15)) ^ second) * np.uint32(0x846CA68B))
        hashed ^= hashed >> np.uint32(16)
        start = (run * places + (np.uint64(hashed) * places >> np.uint64(32))) // runs * together
        for i in range(together):
            positions[run * together + i] = np.uint32(start + i)


@compiled
def look(source: NDArray[Any], residual: Any, positions: Words, magnitudes: Words) -> None:
    """Write the magnitudes, as fp32 patterns, of the elements at these positions, which are runs of neighbours.

    Lines are prefetched long before they are needed. Most lie in different pages, and a page walk takes longer than a
    read.
    """
    exact = magnitudes.view(np.float32)
    last, whole = positions.size - 1, positions.size // SAMPLED_TOGETHER * SAMPLED_TOGETHER
    for start in range(0, whole, SAMPLED_TOGETHER):
        position, coming = np.int64(positions[start]), np.uintp(positions[min(start + AHEAD, last)])
        prefetch(np.uintp(source.ctypes.data) + np.uintp(source.itemsize) * coming)
        for i in range(SAMPLED_TOGETHER):
            magnitudes[start + i] = lane_bits(source, None, position + i)
        if residual is not None:
            prefetch(np.uintp(residual.ctypes.data) + np.uintp(4) * coming)
            for i in range(SAMPLED_TOGETHER):
                exact[start + i] += residual[position + i]
    for i in range(whole, positions.size):
        magnitudes[i] = lane_bits(source, None, np.int64(positions[i]))
        if residual is not None:
            exact[i] += residual[positions[i]]
    for i in range(magnitudes.size):
        magnitudes[i] &= np.uint32(0x7FFFFFFF)


@compiled
def select(magnitudes: Words, wanted: int, scratch: Words) -> Any:
    """The ``wanted``-th largest magnitude, found bit by bit: the largest number that so many magnitudes reach.

    The time does not depend on how many are equal. After the exponent and three more bits, only the magnitudes that
    agree in these are looked at.
    """
    coarse = np.uint32(20)
    least = refined(magnitudes, np.uint32(0), np.uint32(31), coarse, wanted)
    beyond = np.uint32(least + (np.uint32(1) << coarse))
    kept = within(magnitudes, least, beyond, scratch)
    return refined(scratch[:kept], least, coarse, np.uint32(0), wanted - count_reaching(magnitudes, beyond))


@compiled
def within(magnitudes: Words, least: Any, beyond: Any, out: Words) -> int:
    """Write the magnitudes from ``least`` up to, and without, ``beyond`` to ``out``. Returns their number."""
    kept, whole = 0, magnitudes.size // GROUP * GROUP
    for start in range(0, whole, GROUP):
        mask = reaching(magnitudes, None, start, least)
        while mask != np.uint64(0):
            magnitude = magnitudes[start + trailing_zeros(mask)]
            if magnitude < beyond:
                out[kept] = magnitude
                kept += 1
            mask &= mask - np.uint64(1)
    for i in range(whole, magnitudes.size):
        if least <= magnitudes[i] and magnitudes[i] < beyond:
            out[kept] = magnitudes[i]
            kept += 1
    return kept


@compiled
def refined(magnitudes: Words, least: Any, upper: Any, lower: Any, wanted: int) -> Any:
    """The largest number that at least ``wanted`` magnitudes reach, among those that differ from ``least`` only in the
    bits below ``upper``, down to ``lower``."""
    bit = upper
    while bit > lower:
        bit = np.uint32(bit - np.uint32(1))
        higher = np.uint32(least | (np.uint32(1) << bit))
        if count_reaching(magnitudes, higher) >= wanted:
            least = higher
    return least


@compiled
def count_reaching(magnitudes: Words, least: Any) -> int:
    count = np.uint32(0)
    for i in range(magnitudes.size):
        count += np.uint32(magnitudes[i] >= least)
    return int(count)
