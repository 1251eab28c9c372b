"""Sparse replay of Adam in Numba, approximate.

It costs one pass over the state and one update for each stored gradient value, however many steps there are.
An element is not touched in steps without a gradient for it. When the next gradient reaches it, or at the end, it takes
all of these steps at once, in closed form (:mod:`tiercheck.kernels.runs`). Until then it holds the moments of the last
step that had a gradient for it, and the parameter from before that step: the step's own movement is the first of the
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.cpu.compiled import LINE, borrowed, compiled, inlined, pointer
from tiercheck.kernels.cpu.prefetch import prefetch_lines, prefetch_span
from tiercheck.kernels.cpu.replay.adam import replay_fused_adam, rows_of
from tiercheck.kernels.cpu.replay.sources import sources_of
from tiercheck.kernels.gradients import Gradient, SparseGradient
from tiercheck.kernels.runs import RUN_MAX, has_closed_form, runs_of

__all__ = ["replay_sparse_adam"]

TILE = 4096

DENSE = 0.25
"""The share of elements with a gradient above which the exact kernel is as fast."""

INFINITY = np.uint32(0x7F800000)

Array = NDArray[np.float32]
Row = Any  # a record of tiercheck.kernels.runs.RUN


def replay_sparse_adam(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    gradients: Sequence[Gradient],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: Array | None = None,
    contracted: bool = True,
) -> None:
    """Apply the steps in order, in place, approximately: see :data:`tiercheck.kernels.accuracy.ERROR_MAX`.

    The arguments are those of :func:`tiercheck.kernels.replay_fused_adam`, which takes the steps with dense gradients,
    L2 decay or amsgrad.
    """

    def is_sparse(pair: tuple[Gradient, AdamStep]) -> bool:
        gradient, step = pair
        few = isinstance(gradient, SparseGradient) and gradient.indices.size < DENSE * param.size
        return few and has_closed_form(step)

    for sparse, group in groupby(zip(gradients, steps, strict=True), key=is_sparse):
        pairs = list(group)
        for start in range(0, len(pairs), RUN_MAX):
            part_gradients, part_steps = zip(*pairs[start : start + RUN_MAX], strict=True)
            if sparse:
                replay_runs(param, exp_avg, exp_avg_sq, part_gradients, part_steps)
            else:
                replay_fused_adam(
                    param,
                    exp_avg,
                    exp_avg_sq,
                    part_gradients,
                    part_steps,
                    max_exp_avg_sq=max_exp_avg_sq,
                    contracted=contracted,
                )


def replay_runs(
    param: Array, exp_avg: Array, exp_avg_sq: Array, gradients: Sequence[Gradient], steps: tuple[AdamStep, ...]
) -> None:
    sources, streams = sources_of([param, exp_avg, exp_avg_sq], gradients)
    apply_runs(param, exp_avg, exp_avg_sq, sources, streams, rows_of(steps), runs_of(steps))


@compiled
def apply_runs(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    sources: NDArray[np.void],
    streams: NDArray[np.uintp],
    steps: NDArray[np.void],
    runs: NDArray[np.void],
) -> None:
    size, count = param.size, steps.size
    reached = np.empty(TILE, np.int32)  # the last step with a gradient for the element; 0: none yet
    touched = np.empty(TILE + 1, np.int32)  # the last entry is written, and never read
    params, moments1, moments2 = borrowed(param), borrowed(exp_avg), borrowed(exp_avg_sq)
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        p, m, v = params[start:stop], moments1[start:stop], moments2[start:stop]
        lines = max(0, min(TILE, size - stop)) // LINE
        wanted = -(-streams.size * lines // count)
        reached[:] = 0
        touched_count = 0
        for index in range(count):
            prefetch_lines(streams, stop, lines, index * wanted, (index + 1) * wanted)
            touched_count = take_gradient(p, m, v, reached, touched, touched_count, start, sources, index, steps, runs)
        leave_small_roots(p, m, v, reached, runs[count, 0].least, steps)
        run_all(p, m, v, reached, runs[count, 0])
        for position in range(touched_count):
            i = touched[position]
            p[i], m[i], v[i] = run_taken(p[i], m[i], v[i], reached[i], count, steps, runs)


@compiled
def take_gradient(
    p: Array,
    m: Array,
    v: Array,
    reached: NDArray[np.int32],
    touched: NDArray[np.int32],
    touched_count: int,
    start: int,
    sources: NDArray[np.void],
    index: int,
    steps: NDArray[np.void],
    runs: NDArray[np.void],
) -> int:
    """Add one step's gradient to the moments of the elements of a tile that it reaches. Returns how many elements any
    step has reached so far."""
    source, step = sources[index], steps[index]
    size = source.size
    indices = carray(pointer(source.indices), (size,), np.uint32)
    values = carray(pointer(source.values), (size,), np.float32)
    multiplier, weight2, beta2 = step.multiplier, step.weight2, step.beta2
    weight1 = step.weight1 if step.small_weight1 else step.weight1 + np.float32(1)
    position, stop = source.next, start + p.size
    while position < size and indices[position] < stop:
        i = np.intp(indices[position]) - start
        touched[touched_count] = i
        touched_count += reached[i] == 0
        moved, first, second = run_taken(p[i], m[i], v[i], reached[i], index, steps, runs)
        gradient = values[position] * multiplier
        p[i], m[i], v[i] = moved, first + weight1 * (gradient - first), second * beta2 + weight2 * gradient * gradient
        reached[i] = index + 1
        position += 1
    taken, source.next = position - source.next, position
    for array in (source.indices, source.values):  # for the next tile: the processor prefetches few streams itself
        prefetch_span(array + np.uintp(4 * position), taken)
    return touched_count


@inlined
def run_taken(
    p: np.float32, m: np.float32, v: np.float32, a: int, b: int, steps: NDArray[np.void], runs: NDArray[np.void]
) -> tuple[np.float32, np.float32, np.float32]:
    """An element's parameter and moments after the run ``[b, a]``: in closed form, or step by step if its root is near
    eps."""
    run = runs[b, a]
    if v < run.least and m != 0:
        return steps_taken(p, m, v, a, b, steps)
    root = np.sqrt(v)
    moves = run.weight1 / (root + run.point1) + run.weight2 / (root + run.point2)
    return p * run.decay - m * moves, m * run.beta1, v * run.beta2


@inlined
def steps_taken(
    p: np.float32, m: np.float32, v: np.float32, a: int, b: int, steps: NDArray[np.void]
) -> tuple[np.float32, np.float32, np.float32]:
    """An element's parameter and moments after the steps of a run, taken one by one."""
    for index in range(max(a - 1, 0), b):
        step = steps[index]
        if index >= a:
            weight1 = step.weight1 if step.small_weight1 else step.weight1 + np.float32(1)
            m -= weight1 * m
            v *= step.beta2
        p = p * step.decay + step.negative_step_size * m / (np.sqrt(v) / step.root_correction + step.eps)
    return p, m, v


@compiled
def leave_small_roots(
    p: Array, m: Array, v: Array, reached: NDArray[np.int32], least: np.float32, steps: NDArray[np.void]
) -> None:
    """Take all steps, one by one, with the elements that no gradient reached, that move, and whose root is near eps.

    A minimum over the second moments says whether there are any. It is taken of their patterns, which have the order of
    the numbers if these are not negative, since a minimum of integers is vectorised.
    """
    if least == 0:
        return
    bits, smallest = v.view(np.uint32), INFINITY
    for i in range(bits.size):
        smallest = min(smallest, bits[i] if m[i] != 0 else INFINITY)
    if np.array([smallest]).view(np.float32)[0] >= least:
        return
    for i in range(p.size):
        if reached[i] == 0 and v[i] < least and m[i] != 0:
            p[i], m[i], v[i] = steps_taken(p[i], m[i], v[i], 0, steps.size, steps)
            reached[i] = steps.size + 1


@compiled
def run_all(p: Array, m: Array, v: Array, reached: NDArray[np.int32], run: Row) -> None:
    """Apply the run of all steps to the elements that no gradient reached."""
    beta1, beta2, decay = run.beta1, run.beta2, run.decay
    weight1, point1, weight2, point2 = run.weight1, run.point1, run.weight2, run.point2
    for i in range(p.size):
        waits = reached[i] == 0
        root = np.sqrt(v[i])
        moved = p[i] * decay - m[i] * (weight1 / (root + point1) + weight2 / (root + point2))
        p[i] = moved if waits else p[i]
        m[i] = m[i] * (beta1 if waits else np.float32(1))
        v[i] = v[i] * (beta2 if waits else np.float32(1))
