"""The floats that codecs encode, as fp32 and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.streams.codecs.checks import flat_array

__all__ = ["KERNELS_USED", "from_float32", "lose_rounding", "rounded", "to_float32"]

KERNELS_USED = (kernels.widen, kernels.round_bfloat16_into, kernels.lose_bfloat16)
"""What the functions of this module call."""

SLICE_ELEMENTS = 1 << 14
"""Elements that NumPy works on at a time: what it makes in between stays in the cache."""


def to_float32(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The values, 1-D and contiguous; a copy only if they are not so already."""
    flat = flat_array(array, dtype)
    return kernels.widen(flat) if dtype == "BF16" else flat.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], dtype: str, *, threads: int = 1) -> NDArray[Any]:
    """The values in ``dtype`` (of ``FLOATS``), rounded to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    out = np.empty(values.size, np.uint16)
    kernels.round_bfloat16_into(values, out, threads=threads)
    return out


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """The values as ``dtype`` holds them, in fp32."""
    return values if dtype == "F32" else to_float32(from_float32(values, dtype), dtype)


def lose_rounding(residual: NDArray[np.float32], decoded: NDArray[np.float32], dtype: str, *, threads: int = 1) -> None:
    """Add to ``residual`` what ``decoded`` loses on its way into ``dtype``; zero if it is not finite there."""
    if dtype == "BF16":
        kernels.lose_bfloat16(decoded, residual, threads=threads)
    if dtype != "F16":
        return
    for start in range(0, decoded.size, SLICE_ELEMENTS):
        part, lost = decoded[start : start + SLICE_ELEMENTS], residual[start : start + SLICE_ELEMENTS]
        held = rounded(part, dtype)
        with np.errstate(invalid="ignore"):
            lost[:] = np.where(np.isfinite(held), lost + (part - held), np.float32(0))
