"""Adam and AdamW in Numba, with the rounding of optimizers on a GPU.

As in :mod:`tiercheck.kernels.cpu.replay.adam`, all steps are applied to a tile of the state while it is in the
first-level cache, and the next tile is prefetched. Each scheme has its own loops, in which every fused operation is
written as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.cpu.compiled import (
    LINE,
    aligned,
    borrowed,
    compiled,
    elements_to_line,
    inlined,
    keep_alive,
    multiply_add,
    multiply_add_wide,
    pointer,
)
from tiercheck.kernels.cpu.prefetch import BLOCK, block_between_requests, lines_wanted, prefetch_lines
from tiercheck.kernels.cpu.replay.sources import sources_of, take_block, untake_block
from tiercheck.kernels.gpu_adam import COUPLED, DECAYS, SMALL, Fused, Powers, Rounding, Scheme, check_steps, rows_of
from tiercheck.kernels.gradients import Gradient

__all__ = ["replay_gpu_adam"]

TILE = 2048
"""Elements to which all steps are applied before the next tile."""

EXPLICIT, OPERATIONS = int(Scheme.EXPLICIT), int(Scheme.OPERATIONS)
MOMENT, GRADIENT, NEITHER = int(Fused.MOMENT), int(Fused.GRADIENT), int(Fused.NEITHER)

Array = NDArray[np.float32]
Row = Any  # a record of ROW

PLAN = np.dtype(
    [("scheme", np.int64), ("wide", np.bool_), ("first", np.int64), ("second", np.int64), ("reciprocal", np.bool_)],
    align=True,
)
"""A candidate, as the loops read it."""


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
    """As the reference. The scheme ``FAST`` is refused: a processor has no approximation that a GPU has."""
    if rounding.scheme is Scheme.FAST:
        raise ConfigurationError(f"{rounding.name} divides by the device's approximations, which no processor has")
    check_steps(rounding, steps, amsgrad=max_exp_avg_sq is not None)
    rows = rows_of(rounding, tuple(steps), powers)
    plan = np.zeros(1, PLAN)
    for name in ("scheme", "wide", "first", "second", "reciprocal"):
        plan[name] = getattr(rounding, name)
    largest = np.empty(0, np.float32) if max_exp_avg_sq is None else max_exp_avg_sq
    sources, streams = sources_of([param, exp_avg, exp_avg_sq, largest], gradients)
    apply_steps(param, exp_avg, exp_avg_sq, largest, sources, streams, rows, plan)


@compiled
def apply_steps(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    max_exp_avg_sq: Array,
    sources: NDArray[np.void],
    streams: NDArray[np.uintp],
    steps: NDArray[np.void],
    plans: NDArray[np.void],
) -> None:
    size, plan = param.size, plans[0]
    zeros, scratch = np.zeros(BLOCK + LINE, np.float32), np.empty(BLOCK + LINE, np.float32)
    scattered, prepared, params = aligned(zeros), aligned(scratch), borrowed(param)
    moments1, moments2, largest = borrowed(exp_avg), borrowed(exp_avg_sq), borrowed(max_exp_avg_sq)
    block = block_between_requests(streams.size, steps.size)
    wanted = lines_wanted(streams.size, steps.size, block)
    start, stop = 0, min(elements_to_line(param), size)
    while start < size:
        lines = max(0, min(TILE, size - stop)) // LINE
        fetched = 0
        for index in range(steps.size):
            for first in range(start, stop, block):
                prefetch_lines(streams, stop, lines, fetched, fetched + wanted)
                fetched += wanted
                last = min(first + block, stop)
                p, m, v = params[first:last], moments1[first:last], moments2[first:last]
                x = largest[first:last] if largest.size else largest
                if sources[index].sparse:
                    taken = take_block(sources, index, first, last, scattered)
                    step_block(p, m, v, x, scattered[: last - first], prepared, steps[index], plan)
                    untake_block(sources, index, first, taken, scattered)
                else:
                    g = carray(pointer(sources[index].values), (size,), np.float32)[first:last]
                    step_block(p, m, v, x, g, prepared, steps[index], plan)
        start, stop = stop, min(stop + TILE, size)
    keep_alive(zeros)
    keep_alive(scratch)


@inlined
def step_block(p: Array, m: Array, v: Array, x: Array, g: Array, prepared: Array, step: Row, plan: Row) -> None:
    """Take one step with a block."""
    multiplier = step.multiplier
    for i in range(p.size):
        prepared[i] = g[i] * multiplier
    if plan.scheme == OPERATIONS:
        decay_by_factor(p, prepared, step)
        lerp(m, prepared, step)
        add_squares(v, prepared, step, plan.second)
        second = v
        if x.size:
            raise_maximum(x, v)
            second = x
        move_by_operations(p, m, second, step, plan.reciprocal)
    else:
        if plan.wide:
            decay_wide(p, prepared, step, plan.first != NEITHER)
            average_wide(m, v, prepared, step, plan)
        else:
            decay(p, prepared, step, plan.first != NEITHER)
            average(m, v, prepared, step, plan)
        second = v
        if x.size:
            for i in range(p.size):
                x[i] = v[i] if x[i] < v[i] else x[i]
            second = x
        move(p, m, second, step, plan.wide)


@compiled
def decay(p: Array, g: Array, step: Row, contracts: bool) -> None:
    """L2 decay into the gradient, or the parameter's own."""
    share = np.float32(step.decay)
    if step.flags & COUPLED:
        if contracts:
            for i in range(p.size):
                g[i] = multiply_add(p[i], share, g[i])
        else:
            for i in range(p.size):
                g[i] = p[i] * share + g[i]
    elif step.flags & DECAYS:
        if contracts:
            for i in range(p.size):
                p[i] = multiply_add(-share, p[i], p[i])
        else:
            for i in range(p.size):
                p[i] = p[i] - share * p[i]


@compiled
def decay_wide(p: Array, g: Array, step: Row, contracts: bool) -> None:
    share = step.decay
    if step.flags & COUPLED:
        if contracts:
            for i in range(p.size):
                g[i] = np.float32(multiply_add_wide(np.float64(p[i]), share, np.float64(g[i])))
        else:
            for i in range(p.size):
                g[i] = np.float32(np.float64(p[i]) * share + np.float64(g[i]))
    elif step.flags & DECAYS:
        if contracts:
            for i in range(p.size):
                p[i] = np.float32(multiply_add_wide(-share, np.float64(p[i]), np.float64(p[i])))
        else:
            for i in range(p.size):
                p[i] = np.float32(np.float64(p[i]) - share * np.float64(p[i]))


@compiled
def average(m: Array, v: Array, g: Array, step: Row, plan: Row) -> None:
    """Both moments."""
    beta1, beta2 = np.float32(step.beta1), np.float32(step.beta2)
    weight1, weight2 = np.float32(step.weight1), np.float32(step.weight2)
    if plan.scheme == EXPLICIT:
        for i in range(m.size):
            square = g[i] * g[i]
            m[i] = multiply_add(beta1, m[i], multiply_add(-beta1, g[i], g[i]))
            v[i] = multiply_add(beta2, v[i], multiply_add(-beta2, square, square))
        return
    if plan.first == MOMENT:
        for i in range(m.size):
            m[i] = multiply_add(beta1, m[i], weight1 * g[i])
    elif plan.first == GRADIENT:
        for i in range(m.size):
            m[i] = multiply_add(weight1, g[i], beta1 * m[i])
    else:
        for i in range(m.size):
            m[i] = beta1 * m[i] + weight1 * g[i]
    if plan.second == MOMENT:
        for i in range(m.size):
            v[i] = multiply_add(beta2, v[i], weight2 * g[i] * g[i])
    elif plan.second == GRADIENT:
        for i in range(m.size):
            v[i] = multiply_add(weight2 * g[i], g[i], beta2 * v[i])
    else:
        for i in range(m.size):
            v[i] = beta2 * v[i] + weight2 * g[i] * g[i]


@compiled
def average_wide(m: Array, v: Array, gradient: Array, step: Row, plan: Row) -> None:
    beta1, beta2, weight1, weight2 = step.beta1, step.beta2, step.weight1, step.weight2
    if plan.scheme == EXPLICIT:
        for i in range(m.size):
            g, square = np.float64(gradient[i]), np.float64(gradient[i] * gradient[i])
            first = multiply_add_wide(beta1, np.float64(m[i]), multiply_add_wide(-beta1, g, g))
            second = multiply_add_wide(beta2, np.float64(v[i]), multiply_add_wide(-beta2, square, square))
            m[i], v[i] = np.float32(first), np.float32(second)
        return
    if plan.first == MOMENT:
        for i in range(m.size):
            m[i] = np.float32(multiply_add_wide(beta1, np.float64(m[i]), weight1 * np.float64(gradient[i])))
    elif plan.first == GRADIENT:
        for i in range(m.size):
            m[i] = np.float32(multiply_add_wide(weight1, np.float64(gradient[i]), beta1 * np.float64(m[i])))
    else:
        for i in range(m.size):
            m[i] = np.float32(beta1 * np.float64(m[i]) + weight1 * np.float64(gradient[i]))
    if plan.second == MOMENT:
        for i in range(m.size):
            g = np.float64(gradient[i])
            v[i] = np.float32(multiply_add_wide(beta2, np.float64(v[i]), weight2 * g * g))
    elif plan.second == GRADIENT:
        for i in range(m.size):
            g = np.float64(gradient[i])
            v[i] = np.float32(multiply_add_wide(weight2 * g, g, beta2 * np.float64(v[i])))
    else:
        for i in range(m.size):
            g = np.float64(gradient[i])
            v[i] = np.float32(beta2 * np.float64(v[i]) + weight2 * g * g)


@compiled
def move(p: Array, m: Array, v: Array, step: Row, wide: bool) -> None:
    root, step_size, eps = step.root, step.step_size, step.eps
    if wide:
        for i in range(p.size):
            denominator = np.float32(np.float64(np.sqrt(v[i]) / root) + eps)
            p[i] = p[i] - (step_size * m[i]) / denominator
    else:
        narrow = np.float32(eps)
        for i in range(p.size):
            p[i] = p[i] - (step_size * m[i]) / (np.sqrt(v[i]) / root + narrow)


@compiled
def decay_by_factor(p: Array, g: Array, step: Row) -> None:
    factor = np.float32(step.decay)
    if step.flags & COUPLED:
        for i in range(p.size):
            g[i] = multiply_add(factor, p[i], g[i])
    elif step.flags & DECAYS:
        for i in range(p.size):
            p[i] = p[i] * factor


@compiled
def lerp(m: Array, g: Array, step: Row) -> None:
    weight = np.float32(step.weight1)
    if step.flags & SMALL:
        for i in range(m.size):
            m[i] = multiply_add(weight, g[i] - m[i], m[i])
    else:
        for i in range(m.size):
            m[i] = multiply_add(weight, g[i] - m[i], g[i])


@compiled
def add_squares(v: Array, g: Array, step: Row, fused: int) -> None:
    beta2, weight = np.float32(step.beta2), np.float32(step.weight2)
    if fused == GRADIENT:
        for i in range(v.size):
            v[i] = multiply_add(weight * g[i], g[i], v[i] * beta2)
    else:
        for i in range(v.size):
            v[i] = multiply_add(weight, g[i] * g[i], v[i] * beta2)


@compiled
def raise_maximum(x: Array, v: Array) -> None:
    """A NaN in either makes the maximum NaN."""
    for i in range(x.size):
        x[i] = x[i] if x[i] > v[i] or x[i] != x[i] else v[i]


@compiled
def move_by_operations(p: Array, m: Array, v: Array, step: Row, multiplies: bool) -> None:
    root, reciprocal, eps, step_size = step.root, step.reciprocal, np.float32(step.eps), step.step_size
    if multiplies:
        for i in range(p.size):
            p[i] = multiply_add(step_size, m[i] / (np.sqrt(v[i]) * reciprocal + eps), p[i])
    else:
        for i in range(p.size):
            p[i] = multiply_add(step_size, m[i] / (np.sqrt(v[i]) / root + eps), p[i])
