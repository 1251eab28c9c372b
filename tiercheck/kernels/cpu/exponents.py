"""Lossless coding of exponents in few bits, in Numba."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, frozen
from tiercheck.kernels.cpu.planes import part_16, part_32
from tiercheck.kernels.cpu.simd import (
    GROUP,
    avx512_bytes,
    count_ones,
    far_below,
    gather_bytes,
    spread_bytes,
    trailing_zeros,
)
from tiercheck.kernels.reference.exponents import (
    CODE_BYTES,
    CODED,
    EXPONENT_BLOCK,
    STORED,
    blocks_of,
    check_packed,
    check_room,
    check_stored,
)
from tiercheck.kernels.reference.planes import check_rest, planes_of

__all__ = ["pack_exponents", "split_and_pack_exponents", "unpack_exponents"]

BLOCK_STEP, CODES_STEP, GROUP_STEP = np.uint64(EXPONENT_BLOCK), np.uint64(CODE_BYTES), np.uint64(GROUP)
GROUPS = BLOCK_STEP // GROUP_STEP

Planes = tuple[NDArray[np.uint8], ...]


def pack_exponents(exponents: NDArray[np.uint8], packed: NDArray[np.uint8]) -> int:
    """As the reference."""
    check_room(exponents.size, packed)
    parts = parts_of(exponents.size, packed)
    return int(pack_blocks(frozen(exponents), (), *parts)) + fixed_bytes(exponents.size)


def split_and_pack_exponents(
    patterns: NDArray[np.uint16] | NDArray[np.uint32], rest: NDArray[np.uint8], packed: NDArray[np.uint8]
) -> int:
    """As the reference, in one pass: a block's exponents stay in the first-level cache."""
    check_rest(patterns, rest)
    check_room(patterns.size, packed)
    parts = parts_of(patterns.size, packed)
    planes = tuple(planes_of(rest, patterns))
    return int(pack_blocks(frozen(patterns), planes, *parts)) + fixed_bytes(patterns.size)


def unpack_exponents(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> None:
    """As the reference."""
    check_packed(blocks_of(exponents.size), packed)
    highest, codes, stored = parts_of(exponents.size, frozen(packed))
    check_stored(int(unpack_blocks(highest, codes, stored, exponents)), stored.size)


def fixed_bytes(size: int) -> int:
    """Bytes of ``size`` packed exponents without the stored ones, whose number is not known beforehand."""
    return blocks_of(size) * (1 + CODE_BYTES)


def parts_of(size: int, packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Views of ``packed``: the blocks' highest exponents, the codes, and the stored exponents."""
    blocks, fixed = blocks_of(size), fixed_bytes(size)
    return packed[:blocks], packed[blocks:fixed], packed[fixed:]


@compiled
def pack_blocks(
    source: NDArray[Any],
    others: Planes,
    highest: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    stored: NDArray[np.uint8],
) -> Any:
    """Pack the exponents of ``source``, which holds either exponents (uint8) or patterns. All other bits of patterns
    are written to the planes ``others``. Returns how many exponents are stored."""
    block, code = np.empty(EXPONENT_BLOCK, np.uint8), np.empty(EXPONENT_BLOCK, np.uint8)
    count = np.uint64(0)
    for index in range(np.uint64(highest.size)):
        at = index * BLOCK_STEP
        here = min(np.uint64(source.size) - at, BLOCK_STEP)
        load(source, others, at, here, block)
        for i in range(here, BLOCK_STEP):
            block[i] = block[here - np.uint64(1)]
        largest = np.uint8(0)
        for i in range(EXPONENT_BLOCK):
            largest = max(largest, block[i])
        chosen, fewest, above = largest, number_below(block, largest, CODED), 0
        for lower in range(1, CODED):
            candidate = np.uint8(largest - np.uint8(lower))
            above += EXPONENT_BLOCK - number_below(block, np.uint8(candidate + np.uint8(1)), 1)
            if above >= fewest:  # no lower candidate can be better; mostly the first one ends the search
                break
            number = number_below(block, candidate, CODED)
            if number < fewest:
                chosen, fewest = candidate, number
        highest[index] = chosen
        for i in range(EXPONENT_BLOCK):
            code[i] = min(np.uint8(chosen - block[i]), np.uint8(STORED))
        pack_codes(code, codes, index * CODES_STEP)
        for group in range(GROUPS):
            start = np.int64(group * GROUP_STEP)
            left = far_below(block, start, chosen, np.uint8(CODED))
            if avx512_bytes():  # without a branch on the count, which is mispredicted half of the time
                gather_bytes(block, group * GROUP_STEP, left, stored, count)
                count += np.uint64(count_ones(left))
                left = np.uint64(0)
            while left:
                stored[count] = block[start + trailing_zeros(left)]
                count += np.uint64(1)
                left &= left - np.uint64(1)
    return count


def load(source: NDArray[Any], others: Planes, start: Any, count: Any, block: NDArray[np.uint8]) -> None:
    """Write the exponents of the ``count`` elements from ``start`` on, and their other bits to ``others``."""
    raise NotImplementedError("compiled, by the source's dtype")


@cast(Any, overload(load))  # type: ignore[untyped-decorator]
def load_of(source: NDArray[Any], others: Planes, start: Any, count: Any, block: NDArray[np.uint8]) -> Any:
    return {types.uint8: load_exponents, types.uint16: load_16, types.uint32: load_32}[cast(Any, source.dtype)]


def load_exponents(source: NDArray[Any], others: Planes, start: Any, count: Any, block: NDArray[np.uint8]) -> None:
    for i in range(count):
        block[i] = source[start + i]


def load_16(source: NDArray[Any], others: Planes, start: Any, count: Any, block: NDArray[np.uint8]) -> None:
    part_16(source, start, count, block, others[0])


def load_32(source: NDArray[Any], others: Planes, start: Any, count: Any, block: NDArray[np.uint8]) -> None:
    part_32(source, start, count, block, others[0], others[1], others[2])


@compiled
def number_below(block: NDArray[np.uint8], highest: np.uint8, distance: int) -> Any:
    """How many exponents of the block are ``distance`` or more below ``highest``, modulo 256. With the distance
    :data:`CODED` these are the ones without a code; with 1, all that are not equal to ``highest``."""
    number = 0
    for start in range(0, EXPONENT_BLOCK, GROUP):
        number += count_ones(far_below(block, start, highest, np.uint8(distance)))
    return number


@compiled
def pack_codes(code: NDArray[np.uint8], packed: NDArray[np.uint8], at: Any) -> None:
    for j in range(np.uint64(64)):
        low = np.uint8(0)
        for k in range(4):
            low |= np.uint8((code[j + np.uint64(64 * k)] & np.uint8(3)) << np.uint8(2 * k))
        packed[at + j] = low
    for j in range(np.uint64(32)):
        high = np.uint8(0)
        for k in range(8):
            high |= np.uint8((code[j + np.uint64(32 * k)] >> np.uint8(2)) << np.uint8(k))
        packed[at + np.uint64(64) + j] = high


@compiled
def unpack_blocks(
    highest: NDArray[np.uint8], codes: NDArray[np.uint8], stored: NDArray[np.uint8], exponents: NDArray[np.uint8]
) -> Any:
    """Write the exponents. Returns how many codes stand for stored ones; if that is more than there are in ``packed``,
    the rest of the output is unspecified, and nothing beyond either array was read or written."""
    code = np.empty(EXPONENT_BLOCK, np.uint8)
    size, count = np.uint64(exponents.size), np.uint64(0)
    for index in range(np.uint64(highest.size)):
        unpack_codes(codes, index * CODES_STEP, code)
        at = index * BLOCK_STEP
        here = min(size - at, BLOCK_STEP)
        for i in range(here):
            exponents[at + i] = highest[index] - code[i]
        for group in range(GROUPS):
            start, stop = np.int64(group * GROUP_STEP), (group + np.uint64(1)) * GROUP_STEP
            left = far_below(code, start, np.uint8(CODED - 1), np.uint8(CODED))  # the codes equal to STORED
            if avx512_bytes() and stop <= here and count + GROUP_STEP <= np.uint64(stored.size):
                spread_bytes(stored, count, left, exponents, at + group * GROUP_STEP)
                count += np.uint64(count_ones(left))
                left = np.uint64(0)
            while left:
                position = np.uint64(start + trailing_zeros(left))
                if position < here and count < np.uint64(stored.size):
                    exponents[at + position] = stored[count]
                count += np.uint64(1)
                left &= left - np.uint64(1)
    return count


@compiled
def unpack_codes(packed: NDArray[np.uint8], at: Any, code: NDArray[np.uint8]) -> None:
    for j in range(np.uint64(64)):
        low = packed[at + j]
        for k in range(4):
            code[j + np.uint64(64 * k)] = (low >> np.uint8(2 * k)) & np.uint8(3)
    for j in range(np.uint64(32)):
        high = packed[at + np.uint64(64) + j]
        for k in range(8):
            code[j + np.uint64(32 * k)] |= ((high >> np.uint8(k)) & np.uint8(1)) << np.uint8(2)
