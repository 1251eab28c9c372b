"""fp32 values as bf16, and back, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_pair", "is_bfloat16", "lose_bfloat16", "narrow_into", "round_bfloat16_into", "widen"]

NAN = np.uint16(0x7FC0)

INFINITY = np.uint16(0x7F80)


def is_bfloat16(values: NDArray[np.float32]) -> bool:
    """Whether bf16 holds every value exactly, that is, whether the low 16 bits of each are zero."""
    return not np.any(values.view(np.uint32) & np.uint32(0xFFFF))


def narrow_into(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """Write the upper 16 bits of fp32 values. If :func:`is_bfloat16`, these are their bf16 patterns.

    Errors: ``ValueError`` if ``out`` has another size.
    """
    check_pair(values, out)
    out[:] = values.view(np.uint32) >> np.uint32(16)


def widen(patterns: NDArray[np.uint16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The fp32 values of bf16 patterns, in ``out``, or as a new array. Every bit survives.

    Errors: ``ValueError`` if ``out`` has another size.
    """
    values = (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if out is None:
        return values
    check_pair(out, patterns)
    out.view(np.uint32)[:] = values.view(np.uint32)
    return out


def round_bfloat16_into(values: NDArray[np.float32], out: NDArray[np.uint16], *, threads: int = 1) -> None:
    """Write the pattern of the nearest bf16 of each value, ties to even; 0x7FC0 for every NaN.

    Errors: ``ValueError`` if ``out`` has another size.
    """
    check_pair(values, out)
    bits = values.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    out[:] = np.where(np.isnan(values), NAN, ((bits + half) >> np.uint32(16)).astype(np.uint16))


def lose_bfloat16(values: NDArray[np.float32], residual: NDArray[np.float32], *, threads: int = 1) -> None:
    """Add to ``residual``, in place, what ``values`` lose when they are rounded to bf16.

    That is ``residual + (values - rounded)``, an fp32 subtraction and an fp32 addition; 0 if the rounded value is not
    finite. Errors: ``ValueError`` if ``residual`` has another size.
    """
    check_pair(values, residual)
    patterns = np.empty(values.size, np.uint16)
    round_bfloat16_into(values, patterns)
    finite = (patterns & np.uint16(0x7FFF)) < INFINITY
    with np.errstate(invalid="ignore", over="ignore"):
        residual[:] = np.where(finite, residual + (values - widen(patterns)), np.float32(0))


def check_pair(values: NDArray[np.float32], other: NDArray[np.uint16] | NDArray[np.float32]) -> None:
    if other.size != values.size:
        raise ValueError(f"{values.size} values need an output of as many elements, not {other.size}")
