"""Block quantisation in NumPy: 8-bit codes with one scale for each block; and what all encoders of blocks share.

Every encoder (``quantise_*_into``) encodes ``x``, which it computes from ``values`` in this order:

- ``rooted``: the square roots of the values, correctly rounded, instead of the values;
- ``before`` (fp32, one for each value), if given, is subtracted: one fp32 subtraction an element;
- ``residual`` (fp32, one for each value, writable), if given, is added: one fp32 addition an element.

A last, short block is filled up with zeros. In ``residual`` the encoder leaves what the codes lose: ``x - decoded``,
one fp32 subtraction, or 0 if that is not finite. The caller passes it with the next values, which then carry it (error
feedback).

Source: Dettmers et al., *8-bit Optimizers via Block-wise Quantization* (2022), section 2.1, with linear codes; error
feedback: Seide et al., *1-bit stochastic gradient descent* (2014), section 3.
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
"""If a scale is in this range, it and its reciprocal are normal numbers, and :func:`quotients` multiplies."""


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
    """Write 8-bit codes, and one scale for each block of 256: ``x ~ code * scale``, ``|error| <= scale / 2``.

    The scale is the block's largest finite magnitude / 127, or the next number up if 127 scales do not reach that
    magnitude (denormals). The code is :func:`quotients` of x and the scale, rounded half to even. An x that is not
    finite has the code -128 and does not affect the scale.

    With rounding, ``|error| <= scale * (1/2 + 127 * 2**-22)``: the reciprocal, the product and the product of decoding
    each add at most ``127 * 2**-24`` scales.

    ``codes`` has as many elements as ``values``, ``scales`` one for each block; ``before``, ``rooted`` and ``residual``
    as in the module's description. Returns whether any x is not finite. Errors: ``ValueError`` for other sizes.
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
    """``largest / 127``, or the next number up if 127 times that is less than ``largest``."""
    scales = largest / INT8_MAX
    with np.errstate(over="ignore"):
        short = scales * INT8_MAX < largest
    return np.where(short, (scales.view(np.uint32) + np.uint32(1)).view(np.float32), scales)


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32], *, threads: int = 1) -> NDArray[np.float32]:
    """The fp32 values ``code * scale``, clipped to the finite numbers; NaN for the code -128 or a scale that is NaN.

    Any codes and any scales decode; those of an encoder are finite and not negative.
    Errors: ``ValueError`` if there is not one scale for each block of codes.
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
    """Errors: ``ValueError`` if ``array`` has not ``needed`` elements, which ``size`` values need."""
    if array.size != needed:
        raise ValueError(f"{size} values need {needed} {what}, not {array.size}")


def in_blocks(
    values: NDArray[np.float32],
    before: NDArray[np.float32] | None,
    rooted: bool,
    residual: NDArray[np.float32] | None,
    block: int,
) -> NDArray[np.float32]:
    """``x`` (see the module's description) as rows of ``block`` elements, the last one filled up with zeros.

    Errors: ``ValueError`` if ``before`` or ``residual`` is given and has another size than ``values``.
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
    """Rows of finite ``x`` divided by their finite scales, one for each row: codes are made of these quotients.

    If the scale is in [2**-126, 2**126], so that neither it nor its reciprocal is a denormal, the quotient is
    ``x * (1 / scale)``, with the reciprocal and the product each rounded to fp32. Else it is ``x / scale``, rounded
    once, or 0 if the scale is 0.
    """
    divisors = np.where(scales == 0, np.float32(1), scales)[:, None]
    multiplied = (divisors >= MULTIPLIED_MIN) & (divisors <= MULTIPLIED_MAX)
    reciprocals = np.float32(1) / np.where(multiplied, divisors, np.float32(1))
    return np.where(multiplied, x * reciprocals, x / divisors)


def keep_lost(x: NDArray[np.float32], decoded: NDArray[np.float32], residual: NDArray[np.float32]) -> None:
    """Write ``x - decoded`` to ``residual``, or 0 if that is not finite. ``x`` is what :func:`in_blocks` returned."""
    with np.errstate(invalid="ignore"):
        lost = x.reshape(-1)[: residual.size] - decoded
    residual[:] = np.where(np.isfinite(lost), lost, np.float32(0))
