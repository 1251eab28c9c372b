"""Block quantisation in NumPy: codes, and a scale a block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "NONFINITE_CODE", "dequantise", "quantise_into"]

BLOCK = 256
"""Elements that share a scale in :func:`quantise_into`."""

NONFINITE_CODE = -128
"""The code of a NaN or an infinity."""

LARGEST = np.finfo(np.float32).max

INT8_MAX = np.float32(127)


def quantise_into(values: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    """Write 8-bit codes, and a scale for every block of 256: ``value ~ code * scale``, ``|error| <= scale / 2``.

    The scale is the block's largest finite magnitude / 127, rounded up where 127 scales would not reach it
    (denormals); codes round half to even. A value that is not finite gets the code -128, and leaves its block's
    scale alone. The bound on the error holds to 127 units in the last place of fp32.
    """
    blocks = -(-values.size // BLOCK)
    padded = np.zeros((blocks, BLOCK), np.float32)
    padded.reshape(-1)[: values.size] = values
    finite = np.isfinite(padded)
    largest = np.where(finite, np.abs(padded), np.float32(0)).max(axis=1, initial=0)
    scale = largest / INT8_MAX
    with np.errstate(over="ignore"):
        short = scale * INT8_MAX < largest
    scale = np.where(short, (scale.view(np.uint32) + np.uint32(1)).view(np.float32), scale)
    divisor = np.where(scale == 0, np.float32(1), scale)[:, None]
    rounded = np.where(finite, np.rint(np.where(finite, padded, np.float32(0)) / divisor), np.float32(NONFINITE_CODE))
    codes[:] = rounded.astype(np.int8).reshape(-1)[: values.size]
    scales[:] = scale


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values of codes and their blocks' scales (finite, not negative); NaN for the code -128."""
    spread = np.repeat(scales, BLOCK)[: codes.size]
    with np.errstate(over="ignore"):
        values = np.clip(codes.astype(np.float32) * spread, -LARGEST, LARGEST)
    return np.where(codes == NONFINITE_CODE, np.float32(np.nan), values)
