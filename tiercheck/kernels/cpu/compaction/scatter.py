"""Writing survivors into a dense array, in Numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, frozen
from tiercheck.kernels.reference.scatter import check_pairs

__all__ = ["scatter", "scatter_add", "settle"]


def scatter(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """As the reference."""
    check_pairs(indices, out, values)
    out[:] = 0
    put(frozen(indices), frozen(values), out)


def scatter_add(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """As the reference."""
    check_pairs(indices, out, values)
    add(frozen(indices), frozen(values), out)


def settle(
    residual: NDArray[np.float32],
    indices: NDArray[np.uint32],
    survivors: NDArray[np.float32],
    decoded: NDArray[np.float32],
) -> None:
    """As the reference."""
    check_pairs(indices, residual, survivors, decoded)
    put_lost(frozen(indices), frozen(survivors), frozen(decoded), residual)


@compiled
def put(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(indices.size):
        out[indices[i]] = values[i]


@compiled
def add(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(indices.size):
        out[indices[i]] += values[i]


@compiled
def put_lost(
    indices: NDArray[np.uint32],
    survivors: NDArray[np.float32],
    decoded: NDArray[np.float32],
    residual: NDArray[np.float32],
) -> None:
    for i in range(indices.size):
        lost = survivors[i] - decoded[i]
        residual[indices[i]] = lost if np.isfinite(lost) else np.float32(0)
