"""Floating-point patterns in two parts, in NumPy: the exponents, which compress well, and the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.blocks import check_size

__all__ = ["check_planes", "check_rest", "join_exponents", "planes_of", "split_exponents"]


def split_exponents(
    patterns: NDArray[np.uint16] | NDArray[np.uint32],
    exponents: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    *,
    threads: int = 1,
) -> None:
    """Write the eight bits below the sign bit to ``exponents``, and all other bits to ``rest``. Nothing is lost.

    For bf16 (uint16) and fp32 (uint32) the eight bits are the exponent; for fp16 (uint16) they are the exponent and the
    first three bits of the fraction. The other bits, the sign first, are one byte for an element of uint16, and three
    for one of uint32. Each byte has a plane of its own in ``rest``: the lowest bytes of all elements, then the middle
    ones, then the highest. ``rest`` may also have the shape (planes, elements), with only the last one contiguous.

    Errors: ``ValueError`` if ``exponents`` has not as many elements as ``patterns``, or ``rest`` not one or three times
    as many; ``TypeError`` for patterns of another dtype.
    """
    check_planes(patterns, exponents, rest)
    width = patterns.dtype.itemsize * 8
    fraction_bits = width - 9
    exponents[:] = patterns >> fraction_bits & 0xFF
    others = patterns >> (width - 1) << fraction_bits | patterns & ((1 << fraction_bits) - 1)
    for index, plane in enumerate(planes_of(rest, patterns)):
        plane[:] = others >> (8 * index) & 0xFF


def join_exponents(
    exponents: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    patterns: NDArray[np.uint16] | NDArray[np.uint32],
    *,
    threads: int = 1,
) -> None:
    """The inverse of :func:`split_exponents`: write to ``patterns``. Any bytes make patterns. Errors: as there."""
    check_planes(patterns, exponents, rest)
    width = patterns.dtype.itemsize * 8
    fraction_bits = width - 9
    dtype: Any = patterns.dtype
    others = np.zeros(patterns.size, dtype)
    for index, plane in enumerate(planes_of(rest, patterns)):
        others |= plane.astype(dtype) << (8 * index)
    signs = others >> fraction_bits << (width - 1)
    fractions = others & ((1 << fraction_bits) - 1)
    patterns[:] = signs | exponents.astype(dtype) << fraction_bits | fractions


def planes_of(rest: NDArray[np.uint8], patterns: NDArray[Any]) -> NDArray[np.uint8]:
    """``rest`` with the shape (planes, elements), the same memory."""
    return rest.reshape(patterns.dtype.itemsize - 1, patterns.size)


def check_planes(patterns: NDArray[Any], exponents: NDArray[np.uint8], rest: NDArray[np.uint8]) -> None:
    check_rest(patterns, rest)
    check_size("exponents", exponents, patterns.size, patterns.size)


def check_rest(patterns: NDArray[Any], rest: NDArray[np.uint8]) -> None:
    if patterns.dtype not in (np.uint16, np.uint32):
        raise TypeError(f"patterns are uint16 or uint32, not {patterns.dtype}")
    planes = patterns.dtype.itemsize - 1
    check_size("bytes of the rest", rest, patterns.size * planes, patterns.size)
    if rest.ndim != 1 and rest.shape != (planes, patterns.size):
        raise ValueError(f"the rest of {patterns.size} values is {planes} planes of as many bytes, not {rest.shape}")
