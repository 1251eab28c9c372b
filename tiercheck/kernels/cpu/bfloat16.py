"""fp32 values that bf16 holds exactly, in Numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import TILE, compiled, frozen

__all__ = ["is_bfloat16", "narrow_into", "widen"]


def is_bfloat16(values: NDArray[np.float32]) -> bool:
    """As the reference, up to the first tile with a value that bf16 cannot hold."""
    return bool(low_halves_are_zero(frozen(values.view(np.uint32))))


@compiled
def low_halves_are_zero(bits: NDArray[np.uint32]) -> bool:
    for start in range(0, bits.size, TILE):
        tile = bits[start : start + TILE]
        lost = np.uint32(0)
        for i in range(tile.size):
            lost |= tile[i]
        if lost & np.uint32(0xFFFF):
            return False
    return True


def narrow_into(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """As the reference."""
    upper_halves(frozen(values.view(np.uint32)), out)


@compiled
def upper_halves(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(bits.size):
        out[i] = np.uint16(bits[i] >> np.uint32(16))


def widen(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """As the reference."""
    bits = np.empty(patterns.size, np.uint32)
    widen_into(frozen(patterns), bits)
    return bits.view(np.float32)


@compiled
def widen_into(patterns: NDArray[np.uint16], bits: NDArray[np.uint32]) -> None:
    for i in range(patterns.size):
        bits[i] = np.uint32(patterns[i]) << np.uint32(16)
