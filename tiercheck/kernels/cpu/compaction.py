"""Compaction in Numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import TILE, compiled, frozen
from tiercheck.kernels.reference.compaction import threshold_bits

__all__ = ["compact"]

GROUP = 64
"""Elements :func:`compact` tests at once."""


def compact(values: NDArray[np.float32], threshold: float) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """As the reference. One pass counts, one collects; both skip groups without a survivor."""
    bits, least = frozen(values.view(np.uint32)), threshold_bits(threshold)
    indices = np.empty(count_at_least(bits, least), np.uint32)
    survivors = np.empty(indices.size, np.uint32)
    collect_at_least(bits, least, indices, survivors)
    return indices, survivors.view(np.float32)


@compiled
def count_at_least(bits: NDArray[np.uint32], least: np.uint32) -> int:
    count = 0
    for start in range(0, bits.size, TILE):
        tile = bits[start : start + TILE]
        found = np.uint32(0)
        for i in range(tile.size):
            found += np.uint32((tile[i] & np.uint32(0x7FFFFFFF)) >= least)
        count += int(found)
    return count


@compiled
def collect_at_least(
    bits: NDArray[np.uint32], least: np.uint32, indices: NDArray[np.uint32], survivors: NDArray[np.uint32]
) -> None:
    kept = 0
    for start in range(0, bits.size, GROUP):
        group = bits[start : start + GROUP]
        if any_at_least(group, least) == 0:
            continue
        for i in range(group.size):
            if (group[i] & np.uint32(0x7FFFFFFF)) >= least:
                indices[kept] = start + i
                survivors[kept] = group[i]
                kept += 1


@compiled
def any_at_least(group: NDArray[np.uint32], least: np.uint32) -> np.uint32:
    found = np.uint32(0)
    for i in range(group.size):
        found |= np.uint32((group[i] & np.uint32(0x7FFFFFFF)) >= least)
    return found
