"""Adam and AdamW in Numba, with the bits of torch's fused CPU kernel.

All steps are applied to a tile of the state while it is in the first-level cache, block by block. Meanwhile the next
tile is prefetched. :func:`step_contracted` does nearly all of the work, with one square root and one division an
element. :func:`step_in_parts` takes the same step in several loops, for the rare cases: another instruction set,
amsgrad, the end of a tensor, or a bias correction for which :func:`tiercheck.kernels.division.reciprocal` is not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.cpu.compiled import (
    LINE,
    aligned,
    borrowed,
    compiled,
    elements_to_line,
    inlined,
    keep_alive,
    multiply_add,
    pointer,
)
from tiercheck.kernels.cpu.prefetch import BLOCK, block_between_requests, lines_wanted, prefetch_lines
from tiercheck.kernels.cpu.replay.sources import sources_of, take_block, untake_block
from tiercheck.kernels.division import parts_of
from tiercheck.kernels.gradients import Gradient

__all__ = ["STEP", "move_by_roots", "prepare", "replay_fused_adam", "rows_of", "update_moments"]

TILE = 2048
"""Elements to which all steps are applied before the next tile. Their state stays in the first-level cache."""

STEP = np.dtype(
    [
        (name, np.float32)
        for name in (
            *("decay", "l2_decay", "multiplier", "weight1", "weight2", "beta2"),
            *("root_correction", "reciprocal_high", "reciprocal_low", "eps", "negative_step_size"),
        )
    ]
    + [(name, np.bool_) for name in ("small_weight1", "divides", "coupled", "prepares")],
    align=True,
)
"""A step's scalars. ``divides``: the bias correction needs a division, since its reciprocal is not exact."""

Array = NDArray[np.float32]
Row = Any  # a record of STEP


@lru_cache(maxsize=16)
def rows_of(steps: tuple[AdamStep, ...]) -> NDArray[np.void]:
    """A record of :data:`STEP` for each step. Read-only and cached, since every tensor takes the same steps."""
    rows = np.zeros(len(steps), STEP)
    for row, step in zip(rows, steps, strict=True):
        c = Coefficients.of(step)
        high, low, divides = parts_of(c.root_correction)
        row["decay"] = c.decay if c.decays and c.decoupled else 1
        row["l2_decay"] = c.decay if step.coupled else 0
        row["multiplier"] = c.multiplier
        row["small_weight1"] = c.weight1 < np.float32(0.5)
        row["weight1"] = c.weight1 if row["small_weight1"] else c.weight1 - np.float32(1)
        row["weight2"], row["beta2"], row["root_correction"] = c.weight2, c.beta2, c.root_correction
        row["eps"], row["negative_step_size"] = c.eps, c.negative_step_size
        row["divides"] = divides
        if not divides:
            row["reciprocal_high"], row["reciprocal_low"] = high, low
        row["coupled"] = step.coupled
        row["prepares"] = step.coupled or c.multiplier != 1
    rows.flags.writeable = False
    return rows


def replay_fused_adam(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    gradients: Sequence[Gradient],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: Array | None = None,
    contracted: bool,
) -> None:
    """As the reference: torch's fused CPU kernel, bit for bit."""
    largest = np.empty(0, np.float32) if max_exp_avg_sq is None else max_exp_avg_sq
    sources, streams = sources_of([param, exp_avg, exp_avg_sq, largest], gradients)
    apply_steps(param, exp_avg, exp_avg_sq, largest, sources, streams, rows_of(tuple(steps)), contracted)


@compiled
def apply_steps(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    max_exp_avg_sq: Array,
    sources: NDArray[np.void],
    streams: NDArray[np.uintp],
    steps: NDArray[np.void],
    contracted: bool,
) -> None:
    size, vectorised = param.size, param.size - param.size % 8
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
                vectors = max(0, min(last, vectorised) - first)
                p, m, v = params[first:last], moments1[first:last], moments2[first:last]
                x = largest[first:last] if largest.size else largest
                if sources[index].sparse:
                    taken = take_block(sources, index, first, last, scattered)
                    step_block(p, m, v, x, scattered[: last - first], prepared, steps[index], vectors, contracted)
                    untake_block(sources, index, first, taken, scattered)
                else:
                    g = carray(pointer(sources[index].values), (size,), np.float32)[first:last]
                    step_block(p, m, v, x, g, prepared, steps[index], vectors, contracted)
        start, stop = stop, min(stop + TILE, size)
    keep_alive(zeros)
    keep_alive(scratch)


@inlined
def step_block(
    p: Array, m: Array, v: Array, x: Array, g: Array, prepared: Array, step: Row, vectors: int, contracted: bool
) -> None:
    """Take one step with a block. torch computes the first ``vectors`` elements in vectors; the others end the
    tensor."""
    if step.prepares:
        prepare(p, g, prepared, step, contracted)
        g = prepared[: p.size]
    if contracted and vectors and x.size == 0 and not step.divides:
        step_contracted(p[:vectors], m[:vectors], v[:vectors], g[:vectors], step)
        if vectors < p.size:
            step_in_parts(p[vectors:], m[vectors:], v[vectors:], x, g[vectors:], step, 0, contracted)
    else:
        step_in_parts(p, m, v, x, g, step, vectors, contracted)


@compiled
def step_in_parts(p: Array, m: Array, v: Array, x: Array, g: Array, step: Row, vectors: int, contracted: bool) -> None:
    """Take one step in several loops. Behind the last whole vector, torch's compiler fused the other product of the
    second moment, and ``std::max`` keeps the maximum if the new value is a NaN."""
    update_moments(m[:vectors], v[:vectors], g[:vectors], step, contracted)
    if contracted:
        update_last_moments(m[vectors:], v[vectors:], g[vectors:], step)
    else:
        update_moments(m[vectors:], v[vectors:], g[vectors:], step, contracted)
    if x.size:
        for i in range(p.size):
            x[i] = x[i] if x[i] > v[i] or x[i] != x[i] or (i >= vectors and v[i] != v[i]) else v[i]
        move(p, m, x, step)
    else:
        move(p, m, v, step)


@inlined
def step_contracted(p: Array, m: Array, v: Array, g: Array, step: Row) -> None:
    """A whole step, with multiplications fused into additions as torch's compiler did.

    The quotient by the bias correction is computed from the reciprocal's two parts, with the bits of the division: see
    :mod:`tiercheck.kernels.division`. In ``root * low``, the root is bounded, since an infinite one would give a NaN.
    """
    decay, weight1, small, weight2, beta2 = step.decay, step.weight1, step.small_weight1, step.weight2, step.beta2
    high, low, eps, negative_step_size = step.reciprocal_high, step.reciprocal_low, step.eps, step.negative_step_size
    for i in range(p.size):
        gradient = g[i]
        first = multiply_add(weight1, gradient - m[i], m[i] if small else gradient)
        second = multiply_add(weight2 * gradient, gradient, v[i] * beta2)
        m[i] = first
        v[i] = second
        root = np.sqrt(second)
        corrected = multiply_add(root, high, min(root, np.float32(2.0**100)) * low)
        p[i] = p[i] * decay + (negative_step_size * first) / (corrected + eps)


@compiled
def prepare(p: Array, g: Array, out: Array, step: Row, contracted: bool) -> None:
    """Write the gradient that enters the moments: scaled (and negated), then L2 decay is added."""
    multiplier, l2_decay = step.multiplier, step.l2_decay
    if not step.coupled:
        for i in range(p.size):
            out[i] = g[i] * multiplier
    elif contracted:
        for i in range(p.size):
            out[i] = multiply_add(p[i], l2_decay, g[i] * multiplier)
    else:
        for i in range(p.size):
            out[i] = p[i] * l2_decay + g[i] * multiplier


@compiled
def update_moments(m: Array, v: Array, g: Array, step: Row, contracted: bool) -> None:
    weight1, small, weight2, beta2 = step.weight1, step.small_weight1, step.weight2, step.beta2
    for i in range(m.size):
        gradient = g[i]
        start = m[i] if small else gradient
        if contracted:
            m[i] = multiply_add(weight1, gradient - m[i], start)
            v[i] = multiply_add(weight2 * gradient, gradient, v[i] * beta2)
        else:
            m[i] = weight1 * (gradient - m[i]) + start
            v[i] = (weight2 * gradient) * gradient + v[i] * beta2


@compiled
def update_last_moments(m: Array, v: Array, g: Array, step: Row) -> None:
    weight1, small, weight2, beta2 = step.weight1, step.small_weight1, step.weight2, step.beta2
    for i in range(m.size):
        gradient = g[i]
        m[i] = multiply_add(weight1, gradient - m[i], m[i] if small else gradient)
        v[i] = multiply_add(v[i], beta2, (weight2 * gradient) * gradient)


@compiled
def move(p: Array, m: Array, v: Array, step: Row) -> None:
    """Decay the parameter and move it, with the square roots and both divisions."""
    decay, root_correction = step.decay, step.root_correction
    eps, negative_step_size = step.eps, step.negative_step_size
    for i in range(p.size):
        p[i] = p[i] * decay + (negative_step_size * m[i]) / (np.sqrt(v[i]) / root_correction + eps)


@compiled
def move_by_roots(p: Array, m: Array, roots: Array, step: Row) -> None:
    """Decay the parameter and move it, given the square roots of the second moment."""
    decay, root_correction = step.decay, step.root_correction
    eps, negative_step_size = step.eps, step.negative_step_size
    if step.divides:
        for i in range(p.size):
            p[i] = p[i] * decay + (negative_step_size * m[i]) / (roots[i] / root_correction + eps)
    else:
        high, low = step.reciprocal_high, step.reciprocal_low
        for i in range(p.size):
            corrected = multiply_add(roots[i], high, min(roots[i], np.float32(2.0**100)) * low)
            p[i] = p[i] * decay + (negative_step_size * m[i]) / (corrected + eps)
