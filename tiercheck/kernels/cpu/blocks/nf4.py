"""4-bit block quantisation in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.blocks.blockwise import (
    INFINITY,
    START,
    STEP,
    decode_blocks,
    encode_blocks,
    keep_lost,
    largest_magnitude,
    reciprocal,
    take,
)
from tiercheck.kernels.cpu.compiled import LINE, aligned, borrowed, compiled, inlined, keep_alive
from tiercheck.kernels.cpu.simd import REGISTER, avx512, look_up
from tiercheck.kernels.reference.blocks import BLOCK
from tiercheck.kernels.reference.nf4 import BOUNDARIES, HALF, LEVELS, ZERO_CODE, check_sizes

__all__ = ["dequantise_nf4", "quantise_nf4_into"]

HALF_STEP = np.uint64(HALF)

B0, B1, B2, B3, B4, B5, B6, B7, B8, B9, B10, B11, B12, B13, B14 = (np.float32(boundary) for boundary in BOUNDARIES)
"""The boundaries as constants of the compiled code, which stay in registers. Elements of an array would not."""


def quantise_nf4_into(
    values: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    *,
    before: NDArray[np.float32] | None = None,
    rooted: bool = False,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> bool:
    """As the reference."""
    check_sizes(values.size, codes, scales)
    return encode_blocks(
        quantise_blocks,
        values,
        codes,
        scales,
        block=BLOCK,
        codes_per_block=HALF,
        before=before,
        rooted=rooted,
        residual=residual,
        threads=threads,
    )


@compiled
def quantise_blocks(
    values: NDArray[np.float32],
    before: NDArray[np.float32],
    rooted: bool,
    residual: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
) -> Any:
    plain = not (rooted or before.size or residual.size)
    room, room_decoded = np.empty(BLOCK + LINE, np.float32), np.empty(BLOCK + LINE, np.float32)
    x, decoded, levels = aligned(room), aligned(room_decoded), np.empty(16, np.float32)
    nonfinite = np.zeros(1, np.bool_)
    values, before, residual, codes = borrowed(values), borrowed(before), borrowed(residual), borrowed(codes)
    for block in range(np.uint64(scales.size)):
        here, codes_here = block * STEP, block * HALF_STEP
        if plain:
            scales[block] = quantise_block(values, here, codes, codes_here, nonfinite)
        else:
            take(values, before, rooted, residual, here, x)
            scales[block] = quantise_block(x, START, codes, codes_here, nonfinite)
        if residual.size:
            dequantise_block(codes, codes_here, scales[block], levels, decoded, START)
            keep_lost(x, decoded, residual, here)
    keep_alive(room)
    keep_alive(room_decoded)
    return nonfinite[0]


@inlined
def quantise_block(
    x: NDArray[np.float32], at: Any, codes: NDArray[np.uint8], to: Any, nonfinite: NDArray[np.bool_]
) -> Any:
    largest = np.uint32(largest_magnitude(x, at))
    if largest >= np.uint32(INFINITY):
        nonfinite[0] = True
        for j in range(HALF_STEP):
            codes[to + j] = np.uint8(ZERO_CODE << 4 | ZERO_CODE)
        return np.float32(np.nan)
    scale = largest.view(np.float32)
    factor = reciprocal(scale)
    if factor == factor:
        encode_products(x, at, factor, codes, to)
    else:
        divided = np.empty(BLOCK, np.float32)
        for i in range(STEP):
            divided[i] = x[at + i] / scale
        encode_products(divided, START, np.float32(1), codes, to)
    return scale


@inlined
def encode_products(x: NDArray[np.float32], at: Any, factor: Any, codes: NDArray[np.uint8], to: Any) -> None:
    for j in range(HALF_STEP):
        low, high = nearest(x[at + j] * factor), nearest(x[at + HALF_STEP + j] * factor)
        codes[to + j] = np.uint8(low | high << np.uint32(4))


@compiled
def nearest(y: Any) -> Any:
    """The number of boundaries less than ``y``: a binary search without branches, so that the loop is vectorised."""
    eights = y > B7
    fours = y > (B11 if eights else B3)
    low = B5 if fours else B1
    high = B13 if fours else B9
    twos = y > (high if eights else low)
    first, second = (B2 if twos else B0), (B6 if twos else B4)
    third, fourth = (B10 if twos else B8), (B14 if twos else B12)
    low = second if fours else first
    high = fourth if fours else third
    ones = y > (high if eights else low)
    return (
        np.uint32(eights) << np.uint32(3)
        | np.uint32(fours) << np.uint32(2)
        | np.uint32(twos) << np.uint32(1)
        | np.uint32(ones)
    )


def dequantise_nf4(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], size: int, *, threads: int = 1
) -> NDArray[np.float32]:
    """As the reference."""
    check_sizes(size, codes, scales)
    return decode_blocks(dequantise_blocks, codes, scales, size, block=BLOCK, codes_per_block=HALF, threads=threads)


@compiled
def dequantise_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    levels = np.empty(16, np.float32)
    for block in range(np.uint64(scales.size)):
        dequantise_block(codes, block * HALF_STEP, scales[block], levels, values, block * STEP)


@inlined
def dequantise_block(
    codes: NDArray[np.uint8], at: Any, scale: Any, levels: NDArray[np.float32], values: NDArray[np.float32], to: Any
) -> None:
    for code in range(np.uint64(16)):
        levels[code] = LEVELS[code] * scale
    if avx512():  # the compiler would fetch each level from memory
        for j in range(np.uint64(0), HALF_STEP, np.uint64(REGISTER)):
            look_up(levels, codes, at + j, np.uint32(0), values, to + j)
            look_up(levels, codes, at + j, np.uint32(4), values, to + HALF_STEP + j)
    else:
        for j in range(HALF_STEP):
            byte = np.uint64(codes[at + j])
            values[to + j] = levels[byte & np.uint64(15)]
            values[to + HALF_STEP + j] = levels[byte >> np.uint64(4)]
