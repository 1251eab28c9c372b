"""Adam and AdamW in NumPy, with the rounding of torch's fused CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.gradients import Gradient, dense

__all__ = ["fma", "replay_fused_adam"]

VECTOR = 8
"""fp32 lanes of a vector in torch's fused kernel, which has no AVX-512 variant."""


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

    All arrays are fp32, 1-D, contiguous, and of one size; there is one gradient for each step. A sparse gradient is
    +0.0 elsewhere. ``max_exp_avg_sq`` is given for amsgrad, and only then. Nothing is checked.

    ``contracted``: the compiler fused multiplications into additions (every x86 build with AVX2). Then the second
    moment of the last ``size % 8`` elements fuses the other product: ``fma(v, beta2, weight * g * g)``. ``exp_avg`` is
    a lerp in two branches, as in torch's ``lerp``.

    Source: Kingma and Ba, *Adam* (2015), algorithm 1; Loshchilov and Hutter, *Decoupled Weight Decay Regularization*
    (2019), algorithm 2; the order of operations is that of torch's ``FusedAdamKernel.cpp``.
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
    """Raise ``maximum`` to ``values``, in place. A NaN in either makes the maximum NaN. Behind the last whole vector,
    torch uses ``std::max``: there a NaN in ``values`` leaves the maximum as it is.
    """
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

    The product is exact in fp64. The sum is rounded to fp64 *to odd*: Knuth's TwoSum computes its error, and if that is
    not zero, the neighbour whose last bit is odd is taken. Rounding that number to fp32 gives the correct result.

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
