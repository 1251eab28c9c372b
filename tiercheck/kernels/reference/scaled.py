"""fp32 values that are half-precision numbers times one fp32 number, in NumPy.

Clipping and unscaling multiply gradients that hold bf16 or fp16 numbers by one fp32 number, the *scale*. Each of them
can be had back: a product that is no subnormal number is within 2**-24 of the true one, and half-precision numbers are
2**-11 apart, or more. Whether it is the right one is not believed, but multiplied and compared.

Half-precision numbers are fp16, or bf16 patterns as uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.bfloat16 import check_pair, widen
from tiercheck.kernels.reference.gathering import check_lengths, words_at

__all__ = [
    "SCALE_MAX",
    "SCALE_MIN",
    "Halves",
    "are_scaled",
    "check_halves",
    "check_scale",
    "gather_scaled_into",
    "narrow_scaled_into",
    "widen_scaled",
]

Halves = NDArray[Any]
"""Of float16 or uint16."""

SCALE_MIN, SCALE_MAX = 2.0**-96, 2.0**96
"""A scale's inverse is a normal number, too."""


def narrow_scaled_into(values: NDArray[np.float32], scale: float, out: Halves) -> bool:
    """Write the half-precision numbers next to ``values * (1 / scale)``, each operation rounded to fp32. Returns
    whether :func:`widen_scaled` gives every value back, bit for bit.

    It must do so however the processor treats subnormal numbers. So a value that is subnormal, infinite or NaN counts
    as one that it does not give back, and so does one for which a bf16 number is subnormal. For these zero is written.
    Errors: ``ValueError`` for a scale outside of :data:`SCALE_MIN` to :data:`SCALE_MAX`; an ``out`` of another size or
    dtype.
    """
    check_scale(scale)
    check_halves(values, out)
    multiplier = np.float32(scale)
    with np.errstate(all="ignore"):
        numbers = values * (np.float32(1) / multiplier)
        if out.dtype == np.float16:
            patterns = numbers.astype(np.float16).view(np.uint16)
        else:
            bits = numbers.view(np.uint32)
            patterns = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
        widened = numbers_of(patterns.view(out.dtype))
        given_back = (widened * multiplier).view(np.uint32) == values.view(np.uint32)
    exact = given_back & are_regular(values) & are_regular(widened)
    out.view(np.uint16)[:] = np.where(exact, patterns, np.uint16(0))
    return bool(exact.all())


def widen_scaled(halves: Halves, scale: float, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The half-precision numbers times ``scale``, in ``out``, or as a new array: one fp32 multiplication each. Errors:
    ``ValueError`` for a scale outside of :data:`SCALE_MIN` to :data:`SCALE_MAX`, or if ``out`` has another size."""
    check_scale(scale)
    values = np.empty(halves.size, np.float32) if out is None else out
    check_pair(values, halves.view(np.uint16))
    with np.errstate(all="ignore"):
        return np.multiply(numbers_of(halves), np.float32(scale), out=values)


def are_scaled(addresses: NDArray[np.int64], sizes: NDArray[np.int64], scale: float, fp16: bool) -> NDArray[np.bool_]:
    """Of contiguous fp32 tensors in host memory, by address and number of elements: whether :func:`narrow_scaled_into`
    says so of every value, and there is one. ``fp16``: the numbers are fp16, and not bf16.

    The addresses are believed: whoever calls keeps the tensors alive. Errors: ``ValueError``, also if not every tensor
    has both.
    """
    check_scale(scale)
    check_lengths(addresses, sizes)
    found = np.zeros(addresses.size, np.bool_)
    for index, (address, size) in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
        room = np.empty(size, np.float16 if fp16 else np.uint16)
        found[index] = size > 0 and narrow_scaled_into(words_at(address, size).view(np.float32), scale, room)
    return found


def gather_scaled_into(
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    scale: float,
    fp16: bool,
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Write what :func:`narrow_scaled_into` does of contiguous fp32 tensors in host memory to where each one ``starts``
    in ``out``. That :func:`are_scaled` says so of each is believed, and that ``out`` has room. Arguments and errors: as
    there."""
    check_scale(scale)
    check_lengths(addresses, sizes, starts)
    for address, size, start in zip(addresses.tolist(), sizes.tolist(), starts.tolist(), strict=True):
        halves = out[start : start + 2 * size].view(np.float16 if fp16 else np.uint16)
        narrow_scaled_into(words_at(address, size).view(np.float32), scale, halves)


def numbers_of(halves: Halves) -> NDArray[np.float32]:
    return halves.astype(np.float32) if halves.dtype == np.float16 else widen(halves.view(np.uint16))


def are_regular(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which are normal numbers or zero."""
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    regular: NDArray[np.bool_] = (magnitudes == 0) | ((magnitudes >= 0x00800000) & (magnitudes < 0x7F800000))
    return regular


def check_scale(scale: float) -> None:
    if not SCALE_MIN <= scale <= SCALE_MAX or float(np.float32(scale)) != scale:
        raise ValueError(f"a scale is a number of fp32 from {SCALE_MIN:g} to {SCALE_MAX:g}, not {scale!r}")


def check_halves(values: NDArray[np.float32], out: Halves) -> None:
    if out.size != values.size or out.dtype not in (np.float16, np.uint16) or values.dtype != np.float32:
        raise ValueError(
            f"{values.size} {values.dtype} values do not go into {out.size} {out.dtype}: values must be float32, and "
            "the output float16 or uint16 of the same size"
        )
