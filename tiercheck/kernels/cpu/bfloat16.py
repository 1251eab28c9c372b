"""fp32 values as bf16, and back, in Numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import TILE, compiled, frozen
from tiercheck.kernels.reference.bfloat16 import check_pair
from tiercheck.kernels.threads import run, split

__all__ = ["is_bfloat16", "lose_bfloat16", "narrow_into", "round_bfloat16_into", "widen"]


def is_bfloat16(values: NDArray[np.float32]) -> bool:
    """As the reference. Reading ends with the first tile that has a value that bf16 cannot hold."""
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
    check_pair(values, out)
    upper_halves(frozen(values.view(np.uint32)), out)


@compiled
def upper_halves(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(bits.size):
        out[i] = np.uint16(bits[i] >> np.uint32(16))


def widen(patterns: NDArray[np.uint16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """As the reference."""
    values = np.empty(patterns.size, np.float32) if out is None else out
    check_pair(values, patterns)
    widen_into(frozen(patterns), values.view(np.uint32))
    return values


@compiled
def widen_into(patterns: NDArray[np.uint16], bits: NDArray[np.uint32]) -> None:
    for i in range(patterns.size):
        bits[i] = np.uint32(patterns[i]) << np.uint32(16)


def round_bfloat16_into(values: NDArray[np.float32], out: NDArray[np.uint16], *, threads: int = 1) -> None:
    """As the reference."""
    check_pair(values, out)
    bits = frozen(values.view(np.uint32))
    run(lambda piece: nearest_patterns(bits[piece], out[piece]), split(values.size, threads))


@compiled
def nearest_patterns(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(bits.size):
        half = np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))
        pattern = (bits[i] + half) >> np.uint32(16)
        nan = (bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(0x7FC0) if nan else np.uint16(pattern)


def lose_bfloat16(values: NDArray[np.float32], residual: NDArray[np.float32], *, threads: int = 1) -> None:
    """As the reference."""
    check_pair(values, residual)
    run(lambda piece: lose_rounding(frozen(values[piece]), residual[piece]), split(values.size, threads))


@compiled
def lose_rounding(values: NDArray[np.float32], residual: NDArray[np.float32]) -> None:
    bits = values.view(np.uint32)
    scratch = np.empty(TILE, np.uint32)
    rounded = scratch.view(np.float32)
    for start in range(0, values.size, TILE):
        tile, patterns, lost = values[start : start + TILE], bits[start : start + TILE], residual[start : start + TILE]
        for i in range(tile.size):
            half = np.uint32(0x7FFF) + ((patterns[i] >> np.uint32(16)) & np.uint32(1))
            scratch[i] = (patterns[i] + half) & np.uint32(0xFFFF0000)
        for i in range(tile.size):
            # The rounding of a NaN may overflow to a finite pattern, so the value itself is tested, too.
            largest = max(scratch[i] & np.uint32(0x7FFFFFFF), patterns[i] & np.uint32(0x7FFFFFFF))
            owed = lost[i] + (tile[i] - rounded[i])
            lost[i] = owed if largest < np.uint32(0x7F800000) else np.float32(0)
