"""Weighted sums of tensors, in Numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import TILE, compiled, frozen
from tiercheck.kernels.reference.averages import check_weight
from tiercheck.kernels.reference.bfloat16 import check_pair
from tiercheck.kernels.threads import run, split

__all__ = ["accumulate"]


def accumulate(
    values: NDArray[np.float32] | NDArray[np.uint16], weight: float, total: NDArray[np.float32], *, threads: int = 1
) -> None:
    """As the reference."""
    check_weight(weight)
    check_pair(total, values)
    add = add_patterns if values.dtype == np.uint16 else add_values
    run(lambda piece: add(frozen(values[piece]), np.float32(weight), total[piece]), split(total.size, threads))


@compiled
def add_values(values: NDArray[np.float32], weight: np.float32, total: NDArray[np.float32]) -> None:
    for i in range(total.size):
        total[i] += weight * values[i]


@compiled
def add_patterns(patterns: NDArray[np.uint16], weight: np.float32, total: NDArray[np.float32]) -> None:
    bits = np.empty(TILE, np.uint32)
    wide = bits.view(np.float32)
    for start in range(0, total.size, TILE):
        tile, sums = patterns[start : start + TILE], total[start : start + TILE]
        for i in range(tile.size):
            bits[i] = np.uint32(tile[i]) << np.uint32(16)
        for i in range(tile.size):
            sums[i] += weight * wide[i]
