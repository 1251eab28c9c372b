"""fp32 values as fp16 under one power-of-two scale, in NumPy: without a scale, small gradients flush to zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EXPONENT_MAX", "check_exponent", "check_halves", "from_half", "to_half"]

LARGEST = np.finfo(np.float32).max

EXPONENT_MAX = 15 + 149
"""No scale shifts further: that of the smallest denormal of fp32."""


def to_half(survivors: NDArray[np.float32], out: NDArray[np.float16]) -> int:
    """Write ``survivors * 2**exponent`` in fp16, rounded once, to nearest even; returns the exponent.

    It brings the largest finite magnitude to [2**14, 2**15); it is 15 where there is none but zero. So a value is off
    by at most 2**-11 of itself, or by 2**-39 of the largest. Infinities stay, NaNs keep their upper bits, quieted.
    Errors: ``ValueError`` where ``out`` has another size.
    """
    check_halves(survivors, out)
    largest = np.abs(survivors[np.isfinite(survivors)]).max(initial=0)
    exponent = 15 - int(np.frexp(largest)[1])
    with np.errstate(all="ignore"):
        out[:] = np.ldexp(survivors, exponent).astype(np.float16)
    return exponent


def from_half(halves: NDArray[np.float16], exponent: int) -> NDArray[np.float32]:
    """``halves * 2**-exponent`` in fp32, rounded once; what is finite stays so, if need be as the largest number.

    (The largest numbers of fp32 round to 2**15 in fp16, which is 2**128 when scaled back.)
    Errors: ``ValueError`` for an exponent that no scale has.
    """
    check_exponent(exponent)
    with np.errstate(all="ignore"):
        values = np.ldexp(halves.astype(np.float32), -exponent)
    return np.clip(values, -LARGEST, LARGEST, out=values, where=np.isfinite(halves))


def check_halves(survivors: NDArray[np.float32], out: NDArray[np.float16]) -> None:
    if out.size != survivors.size or out.dtype != np.float16 or survivors.dtype != np.float32:
        raise ValueError(
            f"{survivors.size} {survivors.dtype} values do not go into {out.size} {out.dtype}: they are float32, "
            "and float16 come out, one each"
        )


def check_exponent(exponent: int) -> None:
    if not -EXPONENT_MAX <= exponent <= EXPONENT_MAX:
        raise ValueError(f"the exponent of a scale is within {EXPONENT_MAX} of zero, not {exponent}")
