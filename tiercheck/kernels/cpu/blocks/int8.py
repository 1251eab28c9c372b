"""8-bit block quantisation in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.blocks.blockwise import (
    INFINITY,
    LARGEST,
    START,
    STEP,
    decode_blocks,
    encode_blocks,
    finite_or_zero,
    largest_magnitude,
    magnitude,
    reciprocal,
    take,
)
from tiercheck.kernels.cpu.compiled import LINE, aligned, borrowed, compiled, inlined, keep_alive
from tiercheck.kernels.reference.blocks import BLOCK, check_sizes

__all__ = ["dequantise", "quantise_into"]

DECODED_AS_IT_IS = np.uint32(0x7F000000)
"""The pattern of 2**127. If a block's magnitudes are all below, no product of code and scale overflows."""

ROUNDING = np.float32(1.5 * 2**23)
"""Added to a number below 2**22, it leaves no bits for a fraction: the sum is rounded half to even, and its low bits
are the integer."""


def quantise_into(
    values: NDArray[np.float32],
    codes: NDArray[np.int8],
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
        codes_per_block=BLOCK,
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
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
) -> Any:
    plain = not (rooted or before.size or residual.size)
    room, nonfinite = np.empty(BLOCK + LINE, np.float32), np.zeros(1, np.bool_)
    values, before, residual, codes, x = (
        borrowed(values),
        borrowed(before),
        borrowed(residual),
        borrowed(codes),
        aligned(room),
    )
    for block in range(np.uint64(scales.size)):
        here = block * STEP
        if plain:
            scales[block] = quantise_block(values, here, codes, here, residual, nonfinite)
        else:
            take(values, before, rooted, residual, here, x)
            scales[block] = quantise_block(x, START, codes, here, residual, nonfinite)
    keep_alive(room)
    return nonfinite[0]


@inlined
def quantise_block(
    x: NDArray[np.float32],
    at: Any,
    codes: NDArray[np.int8],
    to: Any,
    residual: NDArray[np.float32],
    nonfinite: NDArray[np.bool_],
) -> Any:
    """Write the codes of the block at ``at``, and its residual if there is one. Returns the scale. Sets
    ``nonfinite[0]`` if an x is not finite."""
    largest = np.uint32(largest_magnitude(x, at))
    ordinary = largest < DECODED_AS_IT_IS
    if largest >= np.uint32(INFINITY):
        nonfinite[0] = True
        largest = np.uint32(largest_finite_magnitude(x, at))
    scale = scale_reaching(np.uint32(largest).view(np.float32))
    factor = reciprocal(scale)
    if not (ordinary and factor == factor):
        quantise_carefully(x, at, scale, factor, codes, to, residual)
    elif residual.size:
        for i in range(STEP):
            rounded = np.float32(x[at + i] * factor + ROUNDING)
            codes[to + i] = np.int8(rounded.view(np.int32))
            residual[to + i] = x[at + i] - (rounded - ROUNDING) * scale
    else:
        for i in range(STEP):
            codes[to + i] = np.int8(np.float32(x[at + i] * factor + ROUNDING).view(np.int32))
    return scale


@compiled
def largest_finite_magnitude(x: NDArray[np.float32], at: Any) -> Any:
    largest = np.uint32(0)
    for i in range(STEP):
        one = np.uint32(magnitude(x[at + i]))
        largest = one if largest < one < np.uint32(INFINITY) else largest
    return largest


@compiled
def scale_reaching(largest: Any) -> Any:
    scale = np.float32(largest / np.float32(127))
    if scale * np.float32(127) < largest:
        return np.uint32(scale.view(np.uint32) + np.uint32(1)).view(np.float32)
    return scale


@compiled
def quantise_carefully(
    x: NDArray[np.float32],
    at: Any,
    scale: Any,
    factor: Any,
    codes: NDArray[np.int8],
    to: Any,
    residual: NDArray[np.float32],
) -> None:
    """For a block with an x that is not finite, or above 2**127, or whose scale has no normal reciprocal."""
    for i in range(STEP):
        value = x[at + i]
        if magnitude(value) >= np.uint32(INFINITY):
            codes[to + i] = np.int8(-128)
        else:
            quotient = value * factor if factor == factor else value / scale
            codes[to + i] = np.int8(np.float32(quotient + ROUNDING).view(np.int32))
        if residual.size:
            residual[to + i] = finite_or_zero(value - decoded(codes[to + i], scale))


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
    """As the reference."""
    check_sizes(codes.size, codes, scales)
    return decode_blocks(
        dequantise_blocks, codes, scales, codes.size, block=BLOCK, codes_per_block=BLOCK, threads=threads
    )


@compiled
def dequantise_blocks(codes: NDArray[np.int8], scales: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    for block in range(np.uint64(scales.size)):
        dequantise_block(codes, block * STEP, scales[block], values, block * STEP)


@compiled
def dequantise_block(codes: NDArray[np.int8], at: Any, scale: Any, values: NDArray[np.float32], to: Any) -> None:
    for i in range(STEP):
        values[to + i] = decoded(codes[at + i], scale)


@compiled
def decoded(code: Any, scale: Any) -> Any:
    value = np.float32(code) * scale
    value = LARGEST if value > LARGEST else value
    value = -LARGEST if value < -LARGEST else value
    return np.float32(np.nan) if code == np.int8(-128) else value
