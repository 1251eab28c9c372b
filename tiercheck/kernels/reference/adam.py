"""Adam and AdamW in NumPy, with the rounding of torch's fused CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.gradients import Gradient, dense

__all__ = ["fma", "replay_fused_adam"]

VECTOR = 8
"""Lanes of the vectors in torch's fused kernel; it has no AVX-512 variant."""


def replay_fused_adam(
    param: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradients: Sequence[Gradient],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: NDArray[np.float32] | None = None,
    contracted: bool,
) -> None:
    """Apply the steps in order, in place, with the rounding of torch's fused CPU kernel.

    ``contracted``: its compiler fused multiplications into additions (every x86 build with AVX2). There the second
    moment of the last ``size % 8`` elements is contracted the other way round. ``exp_avg`` is a lerp in two
    branches, as in torch's ``lerp``. ``max_exp_avg_sq`` is there for amsgrad. A sparse gradient is +0.0 elsewhere.
    """
    multiply_add = fma if contracted else multiply_then_add
    vectors = param.size - param.size % VECTOR
    for gradient, step in zip(gradients, steps, strict=True):
        c = Coefficients.of(step)
        g = dense(gradient, param.size)
        with np.errstate(all="ignore"):
            if c.multiplier != 1:
                g = g * c.multiplier
            if c.decays and c.decoupled:
                param *= c.decay
            elif c.decays:
                g = multiply_add(param, c.decay, g)
            small = c.weight1 < np.float32(0.5)
            weight, start = (c.weight1, exp_avg) if small else (c.weight1 - np.float32(1), g)
            exp_avg[:] = multiply_add(weight, g - exp_avg, start)
            scaled = c.weight2 * g
            exp_avg_sq[:vectors] = multiply_add(scaled[:vectors], g[:vectors], exp_avg_sq[:vectors] * c.beta2)
            if contracted:
                last = fma(exp_avg_sq[vectors:], c.beta2, scaled[vectors:] * g[vectors:])
            else:
                last = multiply_then_add(scaled[vectors:], g[vectors:], exp_avg_sq[vectors:] * c.beta2)
            exp_avg_sq[vectors:] = last
            second = exp_avg_sq
            if max_exp_avg_sq is not None:
                raise_maximum(max_exp_avg_sq, exp_avg_sq, vectors)
                second = max_exp_avg_sq
            denominator = np.sqrt(second) / c.root_correction + c.eps
            param += (c.negative_step_size * exp_avg) / denominator


def raise_maximum(maximum: NDArray[np.float32], values: NDArray[np.float32], vectors: int) -> None:
    """In place; a NaN stays or comes in, but behind the last whole vector none comes in: there it is ``std::max``."""
    kept = maximum[vectors:].copy()
    np.maximum(maximum, values, out=maximum)
    maximum[vectors:] = np.where(np.isnan(values[vectors:]), kept, maximum[vectors:])


def multiply_then_add(
    a: NDArray[np.float32] | np.float32, b: NDArray[np.float32] | np.float32, c: NDArray[np.float32]
) -> NDArray[np.float32]:
    return a * b + c


def fma(
    a: NDArray[np.float32] | np.float32, b: NDArray[np.float32] | np.float32, c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """``a * b + c`` in fp32, rounded once.

    The product is exact in fp64. The sum is rounded there *to odd*: its error (Knuth's TwoSum) says whether it is
    inexact, and then the neighbour with the odd last bit is taken, from which rounding to fp32 cannot err twice.

    Source: Boldo and Melquiond, *Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd* (2008), theorem 2.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0)
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(inexact & even, odd, total).astype(np.float32)
