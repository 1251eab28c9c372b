"""1-bit block quantisation in Numba."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.blocks.blockwise import (
    INFINITY,
    START,
    Encode,
    decode_blocks,
    encode_blocks,
    keep_lost,
    take,
)
from tiercheck.kernels.cpu.compiled import LINE, aligned, borrowed, compiled, inlined, keep_alive
from tiercheck.kernels.cpu.simd import GROUP, read_signs, write_signs
from tiercheck.kernels.reference.onebit import (
    LARGEST_PATTERN,
    ONEBIT_BLOCK,
    POISONED_PATTERN,
    SIGN_BYTES,
    check_sizes,
)

__all__ = ["dequantise_onebit", "quantise_onebit_into"]

ONEBIT_STEP, BYTES_STEP = np.uint64(ONEBIT_BLOCK), np.uint64(SIGN_BYTES)
GROUP_STEP, GROUP_BYTES = np.uint64(GROUP), np.uint64(GROUP // 8)

LANES = ONEBIT_BLOCK // 8
"""Sums that are computed side by side, in one vector register."""


def quantise_onebit_into(
    values: NDArray[np.float32],
    bits: NDArray[np.uint8],
    scales: NDArray[np.uint16],
    *,
    before: NDArray[np.float32] | None = None,
    rooted: bool = False,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> bool:
    """As the reference."""
    check_sizes(values.size, bits, scales)

    def encode_with(elements: int) -> Encode:
        return partial(quantise_blocks, np.float32(ONEBIT_BLOCK / elements))

    return encode_blocks(
        encode_with(ONEBIT_BLOCK),
        values,
        bits,
        scales,
        block=ONEBIT_BLOCK,
        codes_per_block=SIGN_BYTES,
        before=before,
        rooted=rooted,
        residual=residual,
        threads=threads,
        encode_short=encode_with(values.size % ONEBIT_BLOCK or ONEBIT_BLOCK),
    )


@compiled
def quantise_blocks(
    share: np.float32,
    values: NDArray[np.float32],
    before: NDArray[np.float32],
    rooted: bool,
    residual: NDArray[np.float32],
    bits: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> Any:
    """``share``: the elements of a whole block divided by those of these blocks; 1 but for a last, short block."""
    plain = not (rooted or before.size or residual.size)
    room, room_decoded = np.empty(ONEBIT_BLOCK + LINE, np.float32), np.empty(ONEBIT_BLOCK + LINE, np.float32)
    x, decoded, sums = aligned(room), aligned(room_decoded), np.empty(LANES, np.float32)
    nonfinite = np.zeros(1, np.bool_)
    values, before, residual, bits = borrowed(values), borrowed(before), borrowed(residual), borrowed(bits)
    for block in range(np.uint64(scales.size)):
        here, bits_here = block * ONEBIT_STEP, block * BYTES_STEP
        if plain:
            scales[block] = quantise_block(values, here, share, sums, bits, bits_here, nonfinite)
        else:
            take(values, before, rooted, residual, here, x)
            scales[block] = quantise_block(x, START, share, sums, bits, bits_here, nonfinite)
        if residual.size:
            dequantise_block(bits, bits_here, scales[block], decoded, START)
            keep_lost(x, decoded, residual, here)
    keep_alive(room)
    keep_alive(room_decoded)
    return nonfinite[0]


@inlined
def quantise_block(
    x: NDArray[np.float32],
    at: Any,
    share: Any,
    sums: NDArray[np.float32],
    bits: NDArray[np.uint8],
    to: Any,
    nonfinite: NDArray[np.bool_],
) -> Any:
    total = np.float32(sum_of_magnitudes(x, at, sums))
    if np.uint32(total.view(np.uint32)) >= np.uint32(INFINITY):  # no finite values have such a sum
        nonfinite[0] = True
        for i in range(BYTES_STEP):
            bits[to + i] = np.uint8(0)
        return np.uint16(POISONED_PATTERN)
    pack_signs(x, at, bits, to)
    mean = np.float32(total * share).view(np.uint32)
    rounded = np.uint32(np.uint32(mean + np.uint32(0x7FFF) + ((mean >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return np.uint16(min(rounded, np.uint32(LARGEST_PATTERN)))


@inlined
def sum_of_magnitudes(x: NDArray[np.float32], at: Any, sums: NDArray[np.float32]) -> Any:
    """The sum of the magnitudes / 128, in the reference's order: halves are added to halves. The first three additions
    of halves sum eight elements in every lane."""
    for j in range(LANES):
        fourth_0 = share_of(x, at, j) + share_of(x, at, j + 4 * LANES)
        fourth_1 = share_of(x, at, j + LANES) + share_of(x, at, j + 5 * LANES)
        fourth_2 = share_of(x, at, j + 2 * LANES) + share_of(x, at, j + 6 * LANES)
        fourth_3 = share_of(x, at, j + 3 * LANES) + share_of(x, at, j + 7 * LANES)
        sums[j] = (fourth_0 + fourth_2) + (fourth_1 + fourth_3)
    first, second = (sums[0] + sums[8]) + (sums[4] + sums[12]), (sums[1] + sums[9]) + (sums[5] + sums[13])
    third, fourth = (sums[2] + sums[10]) + (sums[6] + sums[14]), (sums[3] + sums[11]) + (sums[7] + sums[15])
    return (first + third) + (second + fourth)


@compiled
def share_of(x: NDArray[np.float32], at: Any, index: int) -> Any:
    return abs(x[at + np.uint64(index)]) * np.float32(1 / ONEBIT_BLOCK)


@inlined
def pack_signs(x: NDArray[np.float32], at: Any, bits: NDArray[np.uint8], to: Any) -> None:
    for group in range(ONEBIT_STEP // GROUP_STEP):
        write_signs(x, at + group * GROUP_STEP, bits, to + group * GROUP_BYTES)


def dequantise_onebit(
    bits: NDArray[np.uint8], scales: NDArray[np.uint16], size: int, *, threads: int = 1
) -> NDArray[np.float32]:
    """As the reference."""
    check_sizes(size, bits, scales)
    return decode_blocks(
        dequantise_blocks, bits, scales, size, block=ONEBIT_BLOCK, codes_per_block=SIGN_BYTES, threads=threads
    )


@compiled
def dequantise_blocks(bits: NDArray[np.uint8], scales: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
    for block in range(np.uint64(scales.size)):
        dequantise_block(bits, block * BYTES_STEP, scales[block], values, block * ONEBIT_STEP)


@inlined
def dequantise_block(bits: NDArray[np.uint8], at: Any, scale: Any, values: NDArray[np.float32], to: Any) -> None:
    magnitude = np.uint32(np.uint32(scale) << np.uint32(16)).view(np.float32)
    for group in range(ONEBIT_STEP // GROUP_STEP):
        read_signs(bits, at + group * GROUP_BYTES, magnitude, values, to + group * GROUP_STEP)
