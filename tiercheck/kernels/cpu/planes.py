"""Floating-point patterns in two parts, exponents and the rest, in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, frozen, inlined
from tiercheck.kernels.reference.planes import check_planes, planes_of
from tiercheck.kernels.threads import run, split

__all__ = ["join_exponents", "part_16", "part_32", "split_exponents"]


def split_exponents(
    patterns: NDArray[np.uint16] | NDArray[np.uint32],
    exponents: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    *,
    threads: int = 1,
) -> None:
    """As the reference."""
    check_planes(patterns, exponents, rest)
    planes = planes_of(rest, patterns)
    kernel: Any = split_16 if patterns.dtype == np.uint16 else split_32

    def piece(part: slice) -> None:
        kernel(frozen(patterns[part]), exponents[part], *(plane[part] for plane in planes))

    run(piece, split(patterns.size, threads))


@compiled
def split_16(patterns: NDArray[np.uint16], exponents: NDArray[np.uint8], rest: NDArray[np.uint8]) -> None:
    part_16(patterns, np.uint64(0), np.uint64(patterns.size), exponents, rest)


@compiled
def split_32(
    patterns: NDArray[np.uint32],
    exponents: NDArray[np.uint8],
    lowest: NDArray[np.uint8],
    middle: NDArray[np.uint8],
    highest: NDArray[np.uint8],
) -> None:
    part_32(patterns, np.uint64(0), np.uint64(patterns.size), exponents, lowest, middle, highest)


@inlined
def part_16(
    patterns: NDArray[np.uint16], start: Any, count: Any, exponents: NDArray[np.uint8], rest: NDArray[np.uint8]
) -> None:
    """Split ``count`` patterns from ``start`` on. The exponents are written to the front of ``exponents``, the other
    bits to ``rest`` from ``start`` on."""
    for i in range(count):
        pattern = np.uint32(patterns[start + i])
        exponents[i] = np.uint8(pattern >> np.uint32(7))
        rest[start + i] = np.uint8((pattern >> np.uint32(8)) & np.uint32(0x80) | pattern & np.uint32(0x7F))


@inlined
def part_32(
    patterns: NDArray[np.uint32],
    start: Any,
    count: Any,
    exponents: NDArray[np.uint8],
    lowest: NDArray[np.uint8],
    middle: NDArray[np.uint8],
    highest: NDArray[np.uint8],
) -> None:
    """As :func:`part_16`, with three planes for the other bits."""
    for i in range(count):
        pattern = patterns[start + i]
        exponents[i] = np.uint8(pattern >> np.uint32(23))
        lowest[start + i] = np.uint8(pattern)
        middle[start + i] = np.uint8(pattern >> np.uint32(8))
        highest[start + i] = np.uint8(
            (pattern >> np.uint32(24)) & np.uint32(0x80) | (pattern >> np.uint32(16)) & np.uint32(0x7F)
        )


def join_exponents(
    exponents: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    patterns: NDArray[np.uint16] | NDArray[np.uint32],
    *,
    threads: int = 1,
) -> None:
    """As the reference."""
    check_planes(patterns, exponents, rest)
    planes = planes_of(rest, patterns)
    kernel: Any = join_16 if patterns.dtype == np.uint16 else join_32

    def piece(part: slice) -> None:
        kernel(frozen(exponents[part]), *(frozen(plane[part]) for plane in planes), patterns[part])

    run(piece, split(patterns.size, threads))


@compiled
def join_16(exponents: NDArray[np.uint8], rest: NDArray[np.uint8], patterns: NDArray[np.uint16]) -> None:
    for i in range(patterns.size):
        other = np.uint32(rest[i])
        patterns[i] = np.uint16(
            (other & np.uint32(0x80)) << np.uint32(8)
            | np.uint32(exponents[i]) << np.uint32(7)
            | other & np.uint32(0x7F)
        )


@compiled
def join_32(
    exponents: NDArray[np.uint8],
    lowest: NDArray[np.uint8],
    middle: NDArray[np.uint8],
    highest: NDArray[np.uint8],
    patterns: NDArray[np.uint32],
) -> None:
    for i in range(patterns.size):
        top = np.uint32(highest[i])
        patterns[i] = np.uint32(
            (top & np.uint32(0x80)) << np.uint32(24)
            | np.uint32(exponents[i]) << np.uint32(23)
            | (top & np.uint32(0x7F)) << np.uint32(16)
            | np.uint32(middle[i]) << np.uint32(8)
            | np.uint32(lowest[i])
        )
