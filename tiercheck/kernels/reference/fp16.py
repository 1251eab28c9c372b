"""fp32 values as fp16 under one power-of-two scale, in NumPy. Without a scale, small gradients would become zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EXPONENT_MAX", "check_exponent", "check_halves", "from_half", "to_half"]

LARGEST = np.finfo(np.float32).max

EXPONENT_MAX = 15 + 149
"""The largest magnitude of a scale's exponent: that for the smallest denormal of fp32."""


def to_half(survivors: NDArray[np.float32], out: NDArray[np.float16]) -> int:
    """Write ``survivors * 2**exponent`` (fp32) to ``out`` (fp16), rounded once, half to even. Returns the exponent.

    The exponent brings the largest finite magnitude to [2**14, 2**15); it is 15 if no finite survivor is other than
    zero. So the error of a value is at most 2**-11 of itself, or 2**-39 of the largest. Infinities stay infinities;
    NaNs keep their upper bits and become quiet. Errors: ``ValueError`` if ``out`` has another size or dtype.
    """
    check_halves(survivors, out)
    largest = np.abs(survivors[np.isfinite(survivors)]).max(initial=0)
    exponent = 15 - int(np.frexp(largest)[1])
    with np.errstate(all="ignore"):
        out[:] = np.ldexp(survivors, exponent).astype(np.float16)
    return exponent


def from_half(halves: NDArray[np.float16], exponent: int) -> NDArray[np.float32]:
    """The values ``halves * 2**-exponent`` in fp32, rounded once. A finite value stays finite, clipped to the largest.

    (The largest numbers of fp32 round to 2**15 in fp16, which becomes 2**128 when it is scaled back.)
    Errors: ``ValueError`` if ``exponent`` is more than :data:`EXPONENT_MAX` away from zero.
    """
    check_exponent(exponent)
    with np.errstate(all="ignore"):
        values = np.ldexp(halves.astype(np.float32), -exponent)
    return np.clip(values, -LARGEST, LARGEST, out=values, where=np.isfinite(halves))


def check_halves(survivors: NDArray[np.float32], out: NDArray[np.float16]) -> None:
    if out.size != survivors.size or out.dtype != np.float16 or survivors.dtype != np.float32:
        raise ValueError(
            f"{survivors.size} {survivors.dtype} values do not go into {out.size} {out.dtype}: values must be float32, "
            "and the output float16 of the same size"
        )


def check_exponent(exponent: int) -> None:
    if not -EXPONENT_MAX <= exponent <= EXPONENT_MAX:
        raise ValueError(f"the exponent of a scale is within {EXPONENT_MAX} of zero, not {exponent}")
