"""1-bit block quantisation in NumPy: the signs, and one bf16 scale for each block.

Source: 1-bit stochastic gradient descent (Seide et al., 2014), with the mean magnitude of a block as its scale
(signSGD with error feedback: Karimireddy et al., 2019).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.blocks import check_size, in_blocks, keep_lost

__all__ = [
    "LARGEST_PATTERN",
    "ONEBIT_BLOCK",
    "POISONED_PATTERN",
    "SIGN_BYTES",
    "check_sizes",
    "dequantise_onebit",
    "quantise_onebit_into",
]

ONEBIT_BLOCK = 128
"""Elements that share a scale in :func:`quantise_onebit_into`."""

SIGN_BYTES = ONEBIT_BLOCK // 8
"""Bytes of a block's signs."""

POISONED_PATTERN = 0x7FC0
"""The bf16 pattern of the scale of a block with a NaN or an infinity."""

LARGEST_PATTERN = 0x7F7F
"""The bf16 pattern of the largest finite number. No scale of finite values is above it."""


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
    """Write 16 bytes of signs and one bf16 scale for each block of 128: ``x ~ scale``, or ``-scale`` if the bit is set.

    Bit j % 8 of byte j // 8 is the sign bit of element j, also that of a zero. The scale is the block's
    :func:`mean_magnitudes`, rounded to bf16 (half to even), and at most the largest finite number. A block with a NaN
    or an infinity is *poisoned*: no bit is set, its scale is NaN (0x7FC0), all of its elements decode to NaN, and its
    residual is 0.

    ``bits`` has 16 bytes for each block, ``scales`` one bf16 pattern; ``before``, ``rooted`` and ``residual`` as in
    :mod:`tiercheck.kernels.reference.blocks`. Returns whether any x is not finite. Errors: ``ValueError`` for other
    sizes.
    """
    check_sizes(values.size, bits, scales)
    x = in_blocks(values, before, rooted, residual, ONEBIT_BLOCK)
    poisoned: NDArray[np.bool_] = np.any(~np.isfinite(x), axis=1)
    x_or_zero = np.where(poisoned[:, None], np.float32(0), x)
    bits[:] = np.packbits(np.signbit(x_or_zero), axis=1, bitorder="little").reshape(-1)
    means = mean_magnitudes(x_or_zero, values.size)
    scales[:] = np.where(poisoned, np.uint16(POISONED_PATTERN), rounded_to_bfloat16(means))
    if residual is not None:
        keep_lost(x, dequantise_onebit(bits, scales, values.size), residual)
    return bool(poisoned.any())


def mean_magnitudes(x: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """The mean magnitude of each row of ``x``. There are ``size`` elements in all; those beyond are zeros.

    Every magnitude is multiplied by 2**-7, so that no sum overflows (a product below 2**-126 may be rounded). Then
    element j of the first half is added to element j of the second half, again and again, until one is left: 64 sums,
    32, 16, 8, 4, 2, 1, each rounded to fp32. The sum of a last, short block is multiplied by 128 / elements (rounded to
    fp32), which may overflow.
    """
    sums = np.abs(x) * np.float32(1 / ONEBIT_BLOCK)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    means = sums[:, 0]
    if size % ONEBIT_BLOCK:
        with np.errstate(over="ignore"):
            means[-1] *= np.float32(ONEBIT_BLOCK / (size % ONEBIT_BLOCK))
    return means


def rounded_to_bfloat16(magnitudes: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bf16 patterns, half to even; that of the largest finite number for larger magnitudes."""
    bits = magnitudes.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    limited: NDArray[np.uint32] = np.minimum(rounded, np.uint32(LARGEST_PATTERN))
    return limited.astype(np.uint16)


def dequantise_onebit(
    bits: NDArray[np.uint8], scales: NDArray[np.uint16], size: int, *, threads: int = 1
) -> NDArray[np.float32]:
    """The first ``size`` values in fp32: the scale, with its sign bit flipped if the bit is set. Any input decodes.

    Errors: ``ValueError`` if bits and scales do not have the sizes that ``size`` values need.
    """
    check_sizes(size, bits, scales)
    signs = np.unpackbits(bits, count=size, bitorder="little").astype(np.uint32) << np.uint32(31)
    magnitudes = np.repeat(scales.astype(np.uint32) << np.uint32(16), ONEBIT_BLOCK)[:size]
    values: NDArray[np.uint32] = magnitudes ^ signs
    return values.view(np.float32)


def check_sizes(size: int, bits: NDArray[np.uint8], scales: NDArray[np.uint16]) -> None:
    blocks = -(-size // ONEBIT_BLOCK)
    check_size("bytes of signs", bits, blocks * SIGN_BYTES, size)
    check_size("scales", scales, blocks, size)
