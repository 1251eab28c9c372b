"""fp32 values as fp16 under one power-of-two scale, in Numba.

The conversions use integer arithmetic: so they are vectorised on every instruction set, and give NumPy's patterns for
NaNs. A scale may be out of the range of fp32. So it is applied as two factors; the first product is exact for every
value that the second does not round to zero or infinity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import TILE, compiled, frozen
from tiercheck.kernels.reference.fp16 import LARGEST, check_exponent, check_halves

__all__ = ["from_half", "to_half"]


def to_half(survivors: NDArray[np.float32], out: NDArray[np.float16]) -> int:
    """As the reference."""
    check_halves(survivors, out)
    largest = int(largest_finite(frozen(survivors.view(np.uint32))))
    exponent = 15 - binary_exponent(largest)
    first, second = factors(exponent)
    narrow_scaled(frozen(survivors), first, second, out.view(np.uint16))
    return exponent


def from_half(halves: NDArray[np.float16], exponent: int) -> NDArray[np.float32]:
    """As the reference."""
    check_exponent(exponent)
    values = np.empty(halves.size, np.float32)
    first, second = factors(-exponent)
    widen_scaled(frozen(halves.view(np.uint16)), first, second, values)
    return values


def binary_exponent(magnitude: int) -> int:
    """The exponent e of ``frexp``: the value of the fp32 pattern is in [2**(e-1), 2**e). 0 for zero."""
    if magnitude < 1 << 23:
        return magnitude.bit_length() - 149 if magnitude else 0
    return (magnitude >> 23) - 126


def factors(exponent: int) -> tuple[np.float32, np.float32]:
    half = exponent // 2
    return np.float32(2.0**half), np.float32(2.0 ** (exponent - half))


@compiled
def largest_finite(bits: NDArray[np.uint32]) -> np.uint32:
    largest = np.uint32(0)
    for i in range(bits.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        largest = max(largest, magnitude if magnitude < np.uint32(0x7F800000) else np.uint32(0))
    return largest


@compiled
def narrow_scaled(values: NDArray[np.float32], first: np.float32, second: np.float32, out: NDArray[np.uint16]) -> None:
    """Write the fp16 patterns of ``values * first * second``. No finite product is above 2**15."""
    scaled = np.empty(TILE, np.float32)
    bits = scaled.view(np.uint32)
    for start in range(0, values.size, TILE):
        tile, target = values[start : start + TILE], out[start : start + TILE]
        for i in range(tile.size):
            scaled[i] = tile[i] * first * second
        for i in range(tile.size):
            magnitude = bits[i] & np.uint32(0x7FFFFFFF)
            even = (magnitude >> np.uint32(13)) & np.uint32(1)
            pattern = ((magnitude + np.uint32(0xFFF) + even) >> np.uint32(13)) - np.uint32((127 - 15) << 10)
            if magnitude < np.uint32(0x38800000):  # 2**-14: denormal, a multiple of 2**-24
                pattern = np.uint32(np.int32(np.rint(abs(scaled[i]) * np.float32(2.0**24))))
            if magnitude >= np.uint32(0x7F800000):
                pattern = np.uint32(0x7C00) | ((magnitude >> np.uint32(13)) & np.uint32(0x3FF))
            target[i] = np.uint16(pattern | ((bits[i] ^ magnitude) >> np.uint32(16)))


@compiled
def widen_scaled(halves: NDArray[np.uint16], first: np.float32, second: np.float32, out: NDArray[np.float32]) -> None:
    for start in range(0, halves.size, TILE):
        tile, values = halves[start : start + TILE], out[start : start + TILE]
        bits = values.view(np.uint32)
        for i in range(tile.size):
            magnitude = np.uint32(tile[i]) & np.uint32(0x7FFF)
            rebias = np.uint32(127 - 15) if magnitude < np.uint32(0x7C00) else np.uint32(255 - 31)
            sign = (np.uint32(tile[i]) & np.uint32(0x8000)) << np.uint32(16)
            bits[i] = sign | ((magnitude << np.uint32(13)) + (rebias << np.uint32(23)))
        for i in range(tile.size):
            magnitude = np.uint32(tile[i]) & np.uint32(0x7FFF)
            tiny = np.float32(np.int32(magnitude)) * np.float32(2.0**-24)
            signed = -tiny if tile[i] & np.uint16(0x8000) else tiny
            value = (signed if magnitude < np.uint32(0x400) else values[i]) * first * second
            within = min(max(value, -LARGEST), LARGEST)
            values[i] = within if magnitude < np.uint32(0x7C00) else value
