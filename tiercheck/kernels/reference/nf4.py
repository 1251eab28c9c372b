"""4-bit block quantisation in NumPy: NormalFloat-4, two codes in a byte, one scale for each block.

Source: QLoRA (Dettmers et al., 2023), section 3 and appendix E.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.blocks import BLOCK, check_size, in_blocks, keep_lost, quotients

__all__ = [
    "BOUNDARIES",
    "HALF",
    "LEVELS",
    "ZERO_CODE",
    "check_sizes",
    "dequantise_nf4",
    "quantise_nf4_into",
]

LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The values of the 16 codes, in units of the scale: quantiles of the normal distribution; -1, 0 and 1 are exact."""

BOUNDARIES = ((LEVELS[:-1].astype(np.float64) + LEVELS[1:]) / 2).astype(np.float32)
"""The midpoints of neighbouring levels, rounded to fp32. A code is the number of boundaries below the quotient."""

ZERO_CODE = 7

HALF = BLOCK // 2
"""Bytes of a block's codes. Byte j holds the code of element j in its low nibble, that of element j + 128 in the
high."""

POISONED = np.uint32(0x7FC00000)
"""The fp32 pattern of the scale of a block with a NaN or an infinity."""


def quantise_nf4_into(
    values: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    *,
    before: NDArray[np.float32] | None = None,
    rooted: bool = False,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> bool:
    """Write 128 bytes of codes and one scale for each block of 256: ``x ~ LEVELS[code] * scale``.

    The scale is the block's largest magnitude. The code is that of the level nearest to :func:`quotients` of x and the
    scale: the number of ``BOUNDARIES`` below it, so that a tie goes to the lower level. ``|error|`` is at most half of
    the widest gap between levels, 0.1519037 scales, plus 2**-22 scales, plus 2**-150 (denormals). A block with a NaN or
    an infinity is *poisoned*: its codes are those of zeros, its scale is NaN (0x7FC00000), all of its elements decode
    to NaN, and its residual is 0.

    ``codes`` has 128 bytes for each block, ``scales`` one element; ``before``, ``rooted`` and ``residual`` as in
    :mod:`tiercheck.kernels.reference.blocks`. Returns whether any x is not finite. Errors: ``ValueError`` for other
    sizes.
    """
    check_sizes(values.size, codes, scales)
    x = in_blocks(values, before, rooted, residual, BLOCK)
    poisoned: NDArray[np.bool_] = np.any(~np.isfinite(x), axis=1)
    x_or_zero = np.where(poisoned[:, None], np.float32(0), x)
    largest = np.abs(x_or_zero).max(axis=1, initial=0)
    nearest = np.searchsorted(BOUNDARIES, quotients(x_or_zero, largest), side="left").astype(np.uint8)
    codes[:] = (nearest[:, :HALF] | nearest[:, HALF:] << 4).reshape(-1)
    scales.view(np.uint32)[:] = np.where(poisoned, POISONED, largest.view(np.uint32))
    if residual is not None:
        keep_lost(x, dequantise_nf4(codes, scales, values.size), residual)
    return bool(poisoned.any())


def dequantise_nf4(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], size: int, *, threads: int = 1
) -> NDArray[np.float32]:
    """The first ``size`` values: ``LEVELS[code] * scale``, rounded once to fp32. Any codes and any scales decode.

    Errors: ``ValueError`` if codes and scales do not have the sizes that ``size`` values need.
    """
    check_sizes(size, codes, scales)
    rows = codes.reshape(-1, HALF)
    with np.errstate(invalid="ignore"):
        values = LEVELS[np.concatenate((rows & 15, rows >> 4), axis=1)] * scales[:, None]
    return values.reshape(-1)[:size].copy()


def check_sizes(size: int, codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    blocks = -(-size // BLOCK)
    check_size("bytes of codes", codes, blocks * HALF, size)
    check_size("scales", scales, blocks, size)
