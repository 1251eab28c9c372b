"""Block quantisation in NumPy: 8-bit codes, and a scale a block; and what the encoders of blocks share.

An encoder encodes ``x``, which is ``values``, or their square roots, correctly rounded, where ``rooted``; less
``before`` (fp32, one a value), one fp32 subtraction an element, where that is given; plus the ``residual`` (fp32, one a
value, writable), one fp32 addition an element, where that is given. A last, short block is one that ends in zeros.

In a residual it leaves what the codes lose: ``x - decoded``, one fp32 subtraction, or 0 where that is not finite. Added
to the next values, it is sent then (error feedback: Seide et al. 2014, "1-bit stochastic gradient descent", section 3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK",
    "MULTIPLIED_MAX",
    "MULTIPLIED_MIN",
    "NONFINITE_CODE",
    "check_size",
    "dequantise",
    "in_blocks",
    "keep_lost",
    "quantise_into",
    "quotients",
]

BLOCK = 256
"""Elements that share a scale in :func:`quantise_into`."""

NONFINITE_CODE = -128
"""The code of a NaN or an infinity."""

LARGEST = np.finfo(np.float32).max

INT8_MAX = np.float32(127)

MULTIPLIED_MIN, MULTIPLIED_MAX = np.float32(2.0**-126), np.float32(2.0**126)
"""Between these, a scale and its reciprocal are both normal numbers, and :func:`quotients` multiplies."""


def quantise_into(
    values: NDArray[np.float32],
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    *,
    before: NDArray[np.float32] | None = None,
    rooted: bool = False,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> bool:
    """Write 8-bit codes, and a scale for every block of 256: ``x ~ code * scale``, ``|error| <= scale / 2``.

    The scale is the block's largest finite magnitude / 127, rounded up where 127 scales would not reach it
    (denormals); the code is :func:`quotients` of x and the scale, rounded half to even. A value that is not finite
    gets the code -128, and leaves its block's scale alone. The bound on the error holds to 127 units in the last
    place of fp32 at the scale: ``|error| <= scale * (1/2 + 127 * 2**-22)``, of which the reciprocal takes a third,
    the product another and the product of decoding the last, with as much to spare.

    ``codes`` has as many elements as ``values``, ``scales`` one a block. Returns whether any x is not
    finite. Errors: ``ValueError`` for other sizes.
    """
    check_sizes(values.size, codes, scales)
    x = in_blocks(values, before, rooted, residual, BLOCK)
    finite = np.isfinite(x)
    x_or_zero = np.where(finite, x, np.float32(0))
    scales[:] = scales_reaching(np.abs(x_or_zero).max(axis=1, initial=0))
    rounded = np.where(finite, np.rint(quotients(x_or_zero, scales)), np.float32(NONFINITE_CODE))
    codes[:] = rounded.astype(np.int8).reshape(-1)[: values.size]
    if residual is not None:
        keep_lost(x, dequantise(codes, scales), residual)
    return bool(not finite.all())


def scales_reaching(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """``largest / 127``, or the next number up where 127 times that falls short of ``largest``."""
    scales = largest / INT8_MAX
    with np.errstate(over="ignore"):
        short = scales * INT8_MAX < largest
    return np.where(short, (scales.view(np.uint32) + np.uint32(1)).view(np.float32), scales)


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
    """``code * scale`` in fp32, within the finite numbers; NaN for the code -128, and where the scale makes it NaN.

    Any codes and any scales decode; an encoder's scales are finite and not negative.
    Errors: ``ValueError`` unless there is one scale a block.
    """
    check_sizes(codes.size, codes, scales)
    spread = np.repeat(scales, BLOCK)[: codes.size]
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.clip(codes.astype(np.float32) * spread, -LARGEST, LARGEST)
    return np.where(codes == NONFINITE_CODE, np.float32(np.nan), values)


def check_sizes(size: int, codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    check_size("codes", codes, size, size)
    check_size("scales", scales, -(-size // BLOCK), size)


def check_size(what: str, array: NDArray[np.generic], needed: int, size: int) -> None:
    """``ValueError`` unless ``array`` has the elements that ``size`` values need."""
    if array.size != needed:
        raise ValueError(f"{size} values need {needed} {what}, not {array.size}")


def in_blocks(
    values: NDArray[np.float32],
    before: NDArray[np.float32] | None,
    rooted: bool,
    residual: NDArray[np.float32] | None,
    block: int,
) -> NDArray[np.float32]:
    """``x`` as rows of ``block`` elements, the last one filled up with zeros.

    Errors: ``ValueError`` where there is not one ``before``, or one residual, a value.
    """
    rows = np.zeros((-(-values.size // block), block), np.float32)
    x = rows.reshape(-1)[: values.size]
    x[:] = values
    with np.errstate(over="ignore", invalid="ignore"):
        if rooted:
            np.sqrt(x, out=x)
        if before is not None:
            check_size("elements before", before, values.size, values.size)
            x -= before
        if residual is not None:
            check_size("residuals", residual, values.size, values.size)
            x += residual
    return rows


def quotients(x: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of finite ``x`` over their finite scales (one a row): what is rounded to a code.

    ``x * (1 / scale)``, the reciprocal and the product each rounded to fp32, where the scale lies in
    [2**-126, 2**126], so that neither it nor its reciprocal is a denormal; elsewhere ``x / scale``, rounded once;
    and 0 where the scale is 0.
    """
    divisors = np.where(scales == 0, np.float32(1), scales)[:, None]
    multiplied = (divisors >= MULTIPLIED_MIN) & (divisors <= MULTIPLIED_MAX)
    reciprocals = np.float32(1) / np.where(multiplied, divisors, np.float32(1))
    return np.where(multiplied, x * reciprocals, x / divisors)


def keep_lost(x: NDArray[np.float32], decoded: NDArray[np.float32], residual: NDArray[np.float32]) -> None:
    """Leave ``x - decoded`` in ``residual``, and 0 where that is not finite. ``x`` as :func:`in_blocks` gave it."""
    with np.errstate(invalid="ignore"):
        lost = x.reshape(-1)[: residual.size] - decoded
    residual[:] = np.where(np.isfinite(lost), lost, np.float32(0))
