"""fp32 values that bf16 holds exactly, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["is_bfloat16", "narrow_into", "widen"]


def is_bfloat16(values: NDArray[np.float32]) -> bool:
    """Whether bf16 holds every fp32 value exactly: its low 16 bits are zero."""
    return not np.any(values.view(np.uint32) & np.uint32(0xFFFF))


def narrow_into(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """Write the upper 16 bits of fp32 values: their bf16 patterns, where :func:`is_bfloat16`."""
    out[:] = values.view(np.uint32) >> np.uint32(16)


def widen(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The fp32 values of bf16 patterns; every bit survives."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
