"""How blocks are encoded and decoded in Numba, whatever their codes.

Compiled code works on whole blocks, in pieces for the threads that are granted. This module fills a last, short block
up with zeros. A block's ``x`` (see :mod:`tiercheck.kernels.reference.blocks`), if it is not the values themselves, and
its decoded values stay in the first-level cache.

A function for one block takes whole arrays, which are borrowed, and the block's position in each. With slices, Numba
would count references in atomic instructions, which cost as much as the arithmetic. Positions are unsigned, since Numba
checks a signed index for being negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, frozen, inlined
from tiercheck.kernels.reference.blocks import BLOCK, MULTIPLIED_MAX, MULTIPLIED_MIN, check_size
from tiercheck.kernels.reference.compaction import check_layout
from tiercheck.kernels.threads import run, split

__all__ = [
    "INFINITY",
    "LARGEST",
    "START",
    "STEP",
    "Encode",
    "decode_blocks",
    "encode_blocks",
    "finite_or_zero",
    "keep_lost",
    "largest_magnitude",
    "magnitude",
    "reciprocal",
    "take",
]

INFINITY = 0x7F800000
"""The fp32 pattern of infinity. Those of NaNs, without their signs, are larger."""

STEP, START = np.uint64(BLOCK), np.uint64(0)
"""The elements of a block of 256, and the position of a block in an array of its own, both unsigned."""

LARGEST = np.float32(3.4028234663852886e38)
"""The largest finite fp32 number."""

ABSENT = np.empty(0, np.float32)

Encode = Callable[[NDArray[Any], NDArray[Any], bool, NDArray[Any], NDArray[Any], NDArray[Any]], bool]
Decode = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]


def encode_blocks(
    encode: Encode,
    values: NDArray[np.float32],
    codes: NDArray[Any],
    scales: NDArray[Any],
    *,
    block: int,
    codes_per_block: int,
    before: NDArray[np.float32] | None,
    rooted: bool,
    residual: NDArray[np.float32] | None,
    threads: int,
    encode_short: Encode | None = None,
) -> bool:
    """Encode ``values`` by ``encode(values, before, rooted, residual, codes, scales)``, which is given whole blocks.

    ``encode_short`` (default: ``encode``) is given the last, short block, filled up with zeros. ``before`` and
    ``residual`` are empty arrays if there are none. Both return whether any x is not finite, and so does this.
    Errors: ``ValueError`` for arrays of other sizes or layouts.
    """
    for name, array in (("values", values), ("codes", codes), ("scales", scales)):
        check_layout(name, array, writable=array is not values)
    values, before = frozen(values), frozen(present("elements before", before, values.size))
    residual = present("residuals", residual, values.size)
    whole = values.size // block

    def piece(part: slice) -> bool:
        first, last = part.start // block, part.stop // block
        return encode(
            values[part],
            before[part],
            rooted,
            residual[part],
            codes[first * codes_per_block : last * codes_per_block],
            scales[first:last],
        )

    nonfinite = any(run(piece, split(whole * block, threads, unit=block))) if whole else False
    if whole * block < values.size:
        short, short_codes = slice(whole * block, None), codes[whole * codes_per_block :]
        block_values, block_before = frozen(padded(values[short], block)), frozen(padded(before[short], block))
        block_residual = padded(residual[short], block)
        block_codes = np.empty(codes_per_block, codes.dtype)
        nonfinite |= (encode_short or encode)(
            block_values, block_before, rooted, block_residual, block_codes, scales[whole:]
        )
        short_codes[:] = block_codes[: short_codes.size]
        residual[short] = block_residual[: residual[short].size]
    return nonfinite


def present(what: str, array: NDArray[np.float32] | None, size: int) -> NDArray[np.float32]:
    """The array, or an empty one for ``None``. Errors: ``ValueError`` if it has another size or layout."""
    if array is None:
        return ABSENT
    check_size(what, array, size, size)
    check_layout(what, array)
    return array


def padded(elements: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """A block of these elements, filled up with zeros. For no elements, an empty array."""
    if not elements.size:
        return ABSENT
    whole = np.zeros(block, np.float32)
    whole[: elements.size] = elements
    return whole


def decode_blocks(
    decode: Decode,
    codes: NDArray[Any],
    scales: NDArray[Any],
    size: int,
    *,
    block: int,
    codes_per_block: int,
    threads: int,
) -> NDArray[np.float32]:
    """The first ``size`` values, by ``decode(codes, scales, values)``, which is given whole blocks.

    The codes of a last, short block are filled up with zeros. Errors: ``ValueError`` for arrays of other layouts.
    """
    check_layout("codes", codes)
    check_layout("scales", scales)
    values = np.empty(size, np.float32)
    whole = size // block

    def piece(part: slice) -> None:
        first, last = part.start // block, part.stop // block
        some_codes = codes[first * codes_per_block : last * codes_per_block]
        decode(frozen(some_codes), frozen(scales[first:last]), values[part])

    run(piece, split(whole * block, threads, unit=block))
    if whole * block < size:
        short_codes = codes[whole * codes_per_block :]
        block_codes, block_values = np.zeros(codes_per_block, codes.dtype), np.empty(block, np.float32)
        block_codes[: short_codes.size] = short_codes
        decode(frozen(block_codes), frozen(scales[whole:]), block_values)
        values[whole * block :] = block_values[: size - whole * block]
    return values


@inlined
def take(
    values: NDArray[np.float32],
    before: NDArray[np.float32],
    rooted: bool,
    residual: NDArray[np.float32],
    at: Any,
    x: NDArray[np.float32],
) -> None:
    """Write a block's ``x``. Values plus residual, which is the case at every step, have a loop of their own here."""
    if rooted or before.size:
        take_change(values, before, rooted, residual, at, x)
    else:
        for i in range(np.uint64(x.size)):
            x[i] = values[at + i] + residual[at + i]


@compiled
def take_change(
    values: NDArray[np.float32],
    before: NDArray[np.float32],
    rooted: bool,
    residual: NDArray[np.float32],
    at: Any,
    x: NDArray[np.float32],
) -> None:
    has_before, has_residual = before.size != 0, residual.size != 0
    for i in range(np.uint64(x.size)):
        value = values[at + i]
        if rooted:
            value = np.sqrt(value)
        if has_before:
            value -= before[at + i]
        if has_residual:
            value += residual[at + i]
        x[i] = value


@inlined
def keep_lost(x: NDArray[np.float32], decoded: NDArray[np.float32], residual: NDArray[np.float32], at: Any) -> None:
    for i in range(np.uint64(x.size)):
        residual[at + i] = finite_or_zero(x[i] - decoded[i])


@compiled
def finite_or_zero(value: Any) -> Any:
    return value if abs(value) <= LARGEST else np.float32(0)


@compiled
def magnitude(value: Any) -> Any:
    """The pattern of ``value`` without its sign."""
    return np.uint32(np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF))


@inlined
def largest_magnitude(x: NDArray[np.float32], at: Any) -> Any:
    """The largest magnitude, as a pattern, in a block of 256."""
    largest = np.uint32(0)
    for i in range(STEP):
        one = np.uint32(magnitude(x[at + i]))
        largest = one if one > largest else largest
    return largest


@compiled
def reciprocal(scale: Any) -> Any:
    """The factor of the reference's ``quotients``: 0 for a scale of 0, NaN for a scale that x is divided by."""
    if scale == 0:
        return np.float32(0)
    if MULTIPLIED_MIN <= scale <= MULTIPLIED_MAX:
        return np.float32(1) / scale
    return np.float32(np.nan)
