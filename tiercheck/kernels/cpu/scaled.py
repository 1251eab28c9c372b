"""fp32 values that are half-precision numbers times one fp32 number, in Numba.

Conversions to and from fp16 use integer arithmetic, so that they are vectorised on every instruction set.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import TILE, compiled, frozen, pointer
from tiercheck.kernels.reference.bfloat16 import check_pair
from tiercheck.kernels.reference.gathering import check_lengths
from tiercheck.kernels.reference.scaled import Halves, check_halves, check_scale

__all__ = ["are_scaled", "gather_scaled_into", "narrow_scaled_into", "widen_scaled"]


def narrow_scaled_into(values: NDArray[np.float32], scale: float, out: Halves) -> bool:
    """As the reference."""
    check_scale(scale)
    check_halves(values, out)
    return bool(narrow_all(frozen(values), np.float32(scale), out.dtype == np.float16, out.view(np.uint16)))


def widen_scaled(halves: Halves, scale: float, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """As the reference."""
    check_scale(scale)
    values = np.empty(halves.size, np.float32) if out is None else out
    check_pair(values, halves.view(np.uint16))
    widen_all(frozen(halves.view(np.uint16)), np.float32(scale), halves.dtype == np.float16, values)
    return values


def are_scaled(addresses: NDArray[np.int64], sizes: NDArray[np.int64], scale: float, fp16: bool) -> NDArray[np.bool_]:
    """As the reference. Reading ends with the first tile that has a value that is not given back."""
    check_scale(scale)
    check_lengths(addresses, sizes)
    found = np.empty(addresses.size, np.bool_)
    look_at_each(addresses, sizes, np.float32(scale), fp16, found)
    return found


def gather_scaled_into(
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    scale: float,
    fp16: bool,
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """As the reference."""
    check_scale(scale)
    check_lengths(addresses, sizes, starts)
    narrow_each(addresses, sizes, np.float32(scale), fp16, starts, out)


@compiled
def widen_tile(patterns: NDArray[np.uint16], fp16: bool, values: NDArray[np.float32], bits: NDArray[np.uint32]) -> None:
    """Write the numbers to ``values``, of which ``bits`` is a view."""
    if not fp16:
        for i in range(patterns.size):
            bits[i] = np.uint32(patterns[i]) << np.uint32(16)
        return
    for i in range(patterns.size):
        magnitude = np.uint32(patterns[i]) & np.uint32(0x7FFF)
        rebias = np.uint32(127 - 15) if magnitude < np.uint32(0x7C00) else np.uint32(255 - 31)
        sign = (np.uint32(patterns[i]) & np.uint32(0x8000)) << np.uint32(16)
        bits[i] = sign | ((magnitude << np.uint32(13)) + (rebias << np.uint32(23)))
    for i in range(patterns.size):
        magnitude = np.uint32(patterns[i]) & np.uint32(0x7FFF)
        tiny = np.float32(np.int32(magnitude)) * np.float32(2.0**-24)
        signed = -tiny if patterns[i] & np.uint16(0x8000) else tiny
        values[i] = signed if magnitude < np.uint32(0x400) else values[i]


@compiled
def round_tile(
    values: NDArray[np.float32],
    scale: np.float32,
    fp16: bool,
    patterns: NDArray[np.uint16],
    numbers: NDArray[np.float32],
) -> None:
    """Write the patterns next to the values by the scale. ``numbers`` is scratch."""
    inverse, bits = np.float32(1) / scale, numbers.view(np.uint32)
    for i in range(values.size):
        numbers[i] = values[i] * inverse
    if not fp16:
        for i in range(values.size):
            even = (bits[i] >> np.uint32(16)) & np.uint32(1)
            patterns[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + even) >> np.uint32(16))
        return
    for i in range(values.size):
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        even = (magnitude >> np.uint32(13)) & np.uint32(1)
        pattern = ((magnitude + np.uint32(0xFFF) + even) >> np.uint32(13)) - np.uint32((127 - 15) << 10)
        if magnitude < np.uint32(0x38800000):  # 2**-14: denormal, a multiple of 2**-24
            pattern = np.uint32(np.int32(np.rint(abs(numbers[i]) * np.float32(2.0**24))))
        if magnitude >= np.uint32(0x47800000):  # 2**16: too large, and no product
            pattern = np.uint32(0x7C00)
        patterns[i] = np.uint16(pattern | ((bits[i] ^ magnitude) >> np.uint32(16)))


@compiled
def is_given_back(
    values: NDArray[np.float32], scale: np.float32, numbers: NDArray[np.float32], products: NDArray[np.float32]
) -> bool:
    """Whether the numbers times the scale are the values, and none is subnormal, infinite or NaN. ``products`` is
    scratch."""
    wanted, bits, given = values.view(np.uint32), numbers.view(np.uint32), products.view(np.uint32)
    for i in range(values.size):
        products[i] = numbers[i] * scale
    lost, most, least = np.uint32(0), np.uint32(0), np.uint32(0xFFFFFFFF)
    for i in range(values.size):
        lost |= given[i] ^ wanted[i]
        value, number = wanted[i] & np.uint32(0x7FFFFFFF), bits[i] & np.uint32(0x7FFFFFFF)
        most = max(most, value)
        least = min(least, np.uint32(value - np.uint32(1)))  # of zero it is the largest
        least = min(least, np.uint32(number - np.uint32(1)))
    return bool(lost == 0 and most < np.uint32(0x7F800000) and least >= np.uint32(0x007FFFFF))


@compiled
def narrow_tile(
    values: NDArray[np.float32],
    scale: np.float32,
    fp16: bool,
    patterns: NDArray[np.uint16],
    numbers: NDArray[np.float32],
    products: NDArray[np.float32],
) -> bool:
    """Write the patterns of one tile; returns whether they give all values back. The last two arrays are scratch."""
    round_tile(values, scale, fp16, patterns, numbers)
    widen_tile(patterns, fp16, numbers, numbers.view(np.uint32))
    return is_given_back(values, scale, numbers, products)


@compiled
def narrow_all(values: NDArray[np.float32], scale: np.float32, fp16: bool, out: NDArray[np.uint16]) -> bool:
    numbers, products = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    all_given_back = True
    for start in range(0, values.size, TILE):
        tile, patterns = values[start : start + TILE], out[start : start + TILE]
        size = tile.size
        if narrow_tile(tile, scale, fp16, patterns, numbers[:size], products[:size]):
            continue
        all_given_back = False
        for i in range(size):
            if not is_given_back(tile[i : i + 1], scale, numbers[i : i + 1], products[i : i + 1]):
                patterns[i] = np.uint16(0)
    return all_given_back


@compiled
def widen_all(patterns: NDArray[np.uint16], scale: np.float32, fp16: bool, values: NDArray[np.float32]) -> None:
    for start in range(0, patterns.size, TILE):
        tile = values[start : start + TILE]
        widen_tile(patterns[start : start + TILE], fp16, tile, tile.view(np.uint32))
        for i in range(tile.size):
            tile[i] *= scale


@compiled
def look_at_each(
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    scale: np.float32,
    fp16: bool,
    found: NDArray[np.bool_],
) -> None:
    numbers, products, patterns = np.empty(TILE, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.uint16)
    for i in range(addresses.size):
        found[i] = sizes[i] > 0
        if sizes[i] == 0:
            continue
        values = carray(pointer(np.uintp(addresses[i])), (sizes[i],), np.float32)
        for start in range(0, values.size, TILE):
            tile = values[start : start + TILE]
            size = tile.size
            if not narrow_tile(tile, scale, fp16, patterns[:size], numbers[:size], products[:size]):
                found[i] = False
                break


@compiled
def narrow_each(
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    scale: np.float32,
    fp16: bool,
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    numbers = np.empty(TILE, np.float32)
    for i in range(addresses.size):
        if sizes[i] == 0:
            continue
        values = carray(pointer(np.uintp(addresses[i])), (sizes[i],), np.float32)
        halves = out[starts[i] : starts[i] + 2 * sizes[i]].view(np.uint16)
        for start in range(0, values.size, TILE):
            tile = values[start : start + TILE]
            round_tile(tile, scale, fp16, halves[start : start + TILE], numbers[: tile.size])
