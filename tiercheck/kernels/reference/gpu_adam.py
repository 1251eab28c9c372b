"""Adam and AdamW in NumPy, with the rounding of optimizers on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gpu_adam import Fused, Powers, Rounding, Scalars, Scheme, check_steps, scalars_of
from tiercheck.kernels.gradients import Gradient, dense
from tiercheck.kernels.reference.adam import fma

__all__ = ["fma_wide", "replay_gpu_adam"]

Array = NDArray[np.float32]
Wide = NDArray[np.float64]

SPLITTER = float((1 << 27) + 1)
"""Veltkamp's, for the halves of an fp64 significand."""


def replay_gpu_adam(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    gradients: Sequence[Gradient],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: Array | None = None,
    rounding: Rounding,
    powers: Powers,
) -> None:
    """Apply the steps in order, in place, with the rounding of a candidate (:mod:`tiercheck.kernels.gpu_adam`, which
    names the sources).

    All arrays are fp32, 1-D, contiguous, and of one size; there is one gradient for each step. A sparse gradient is
    +0.0 elsewhere. ``max_exp_avg_sq`` is given for amsgrad, and only then. No element's result depends on its position.
    Of the scheme ``FAST`` this is the formula with IEEE arithmetic: only a GPU has the approximations.

    Raises:
        ConfigurationError: ``powers`` lacks one, or the steps do not fit the state; nothing was changed.
    """
    check_steps(rounding, steps, amsgrad=max_exp_avg_sq is not None)
    scalars = [scalars_of(rounding, step, powers) for step in steps]
    take = {Scheme.OPERATIONS: take_operations, Scheme.FAST: take_fast}.get(rounding.scheme, take_fused)
    state = State(param, exp_avg, exp_avg_sq, max_exp_avg_sq)
    with np.errstate(all="ignore"):
        for gradient, each in zip(gradients, scalars, strict=True):
            take(state, dense(gradient, param.size) * each.multiplier, each, rounding)


@dataclass(frozen=True)
class State:
    param: Array
    exp_avg: Array
    exp_avg_sq: Array
    max_exp_avg_sq: Array | None


def take_fused(state: State, g: Array, s: Scalars, rounding: Rounding) -> None:
    p, m, v = state.param, state.exp_avg, state.exp_avg_sq
    a = Arithmetic(rounding)
    if s.coupled:
        g = a.stored(a.product_plus(p, s.decay, g))
    elif s.decays:
        p[:] = a.stored(a.product_plus(-a.number(s.decay), p, p))
    if rounding.scheme is Scheme.EXPLICIT:
        square = g * g
        m[:] = a.stored(a.fma(s.beta1, m, a.fma(-s.beta1, g, g)))
        v[:] = a.stored(a.fma(s.beta2, v, a.fma(-s.beta2, square, square)))
    else:
        m[:] = a.stored(a.weighted(s.beta1, m, s.weight1, g, rounding.first))
        v[:] = a.stored(a.weighted(s.beta2, v, a.number(s.weight2) * a.numbers(g), g, rounding.second))
    second = v
    if state.max_exp_avg_sq is not None:  # std::max: a NaN leaves the maximum as it is
        second = state.max_exp_avg_sq
        second[:] = np.where(second < v, v, second)
    denominator = a.stored(a.numbers(np.sqrt(second) / s.root) + a.number(s.eps))
    p -= (s.step_size * m) / denominator


def take_operations(state: State, g: Array, s: Scalars, rounding: Rounding) -> None:
    p, m, v = state.param, state.exp_avg, state.exp_avg_sq
    weight1, weight2 = np.float32(s.weight1), np.float32(s.weight2)
    if s.coupled:
        g = fma(np.float32(s.decay), p, g)
    elif s.decays:
        p *= np.float32(s.decay)
    m[:] = fma(weight1, g - m, m if s.small else g)
    v *= np.float32(s.beta2)
    v[:] = fma(weight2 * g, g, v) if rounding.second is Fused.GRADIENT else fma(weight2, g * g, v)
    second = v
    if state.max_exp_avg_sq is not None:
        second = state.max_exp_avg_sq
        np.maximum(second, v, out=second)
    root: Array = np.sqrt(second)
    denominator = (root * s.reciprocal if rounding.reciprocal else root / s.root) + np.float32(s.eps)
    quotient: Any = m / denominator
    p[:] = fma(s.step_size, quotient, p)


def take_fast(state: State, g: Array, s: Scalars, rounding: Rounding) -> None:
    p, m, v = state.param, state.exp_avg, state.exp_avg_sq
    a, decay = Arithmetic(rounding), np.float32(s.decay)
    if s.coupled:
        g = a.product_plus(decay, p, g)
    m[:] = a.weighted(s.beta1, m, s.weight1, g, rounding.first)
    v[:] = a.weighted(s.beta2, v, np.float32(s.weight2) * g, g, rounding.second)
    update = (m / s.first) / (np.sqrt(v / s.root) + np.float32(s.eps))
    if s.decays:
        update = a.product_plus(decay, p, update)
    p[:] = a.product_plus(-s.step_size, update, p)


class Arithmetic:
    """The operations of a value and a scalar: in fp32, or in fp64 and rounded when they are stored."""

    def __init__(self, rounding: Rounding) -> None:
        self.contracts = rounding.contracts
        self.number: Any = np.float64 if rounding.wide else np.float32
        self.fma: Any = fma_wide if rounding.wide else lambda a, b, c: fma(np.float32(a), b, c)

    def numbers(self, values: Any) -> NDArray[Any]:
        return np.asarray(values, self.number)

    def stored(self, values: Any) -> Array:
        return np.asarray(values, np.float32)

    def product_plus(self, a: Any, b: Any, c: Any) -> NDArray[Any]:
        """``a * b + c``, contracted if the compiler does so."""
        if self.contracts:
            return np.asarray(self.fma(a, b, c))
        return np.asarray(np.asarray(a, self.number) * np.asarray(b, self.number) + np.asarray(c, self.number))

    def weighted(self, beta: Any, moment: Any, weight: Any, g: Any, fused: Fused) -> NDArray[Any]:
        """``beta * moment + weight * g``."""
        beta, moment, weight, g = (np.asarray(each, self.number) for each in (beta, moment, weight, g))
        if fused is Fused.MOMENT:
            return np.asarray(self.fma(beta, moment, weight * g))
        if fused is Fused.GRADIENT:
            return np.asarray(self.fma(weight, g, beta * moment))
        return np.asarray(beta * moment + weight * g)


def fma_wide(a: Any, b: Any, c: Any) -> Wide:
    """``a * b + c`` in fp64, rounded once, unless a part of it is beyond the range of fp64 or below that of its
    normal numbers: what comes of fp32 numbers is not.

    The product is the exact sum of two numbers (Dekker, with Veltkamp's halves), and so are the sums of its lower part
    and c, and of its upper part and that (Knuth). What is left over is added to odd. The last sum then rounds as the
    exact one.

    Source: Boldo and Melquiond, *Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd*
    (2008), figure 5 and theorem 5; Dekker, *A floating-point technique for extending the available precision* (1971).
    """
    a, b, c = np.broadcast_arrays(*(np.asarray(each, np.float64) for each in (a, b, c)))
    with np.errstate(all="ignore"):
        high, low = exact_product(a, b)
        carried, rest = exact_sum(c, low)
        upper, between = exact_sum(high, carried)
        result = upper + odd_sum(rest, between)
        plain = a * b + c  # right for what is not finite, and for the sign of a zero
        return np.where(np.isfinite(plain) & np.isfinite(result) & (result != 0), result, plain)


def exact_product(a: Wide, b: Wide) -> tuple[Wide, Wide]:
    (a1, a2), (b1, b2) = halves(a), halves(b)
    product = a * b
    return product, a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)


def halves(a: Wide) -> tuple[Wide, Wide]:
    scaled = a * SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def exact_sum(a: Wide, b: Wide) -> tuple[Wide, Wide]:
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def odd_sum(a: Wide, b: Wide) -> Wide:
    """The sum, rounded to odd: if it is not exact, the neighbour whose last bit is odd."""
    total, error = exact_sum(a, b)
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & (error != 0)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, odd, total)
