"""SGD in Numba. It is bound by memory bandwidth, so the state is read and written once for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import LINE, aligned, compiled, frozen, keep_alive, multiply_add, pointer
from tiercheck.kernels.cpu.prefetch import BLOCK, block_between_requests, lines_wanted, prefetch_lines
from tiercheck.kernels.cpu.replay.adam import TILE
from tiercheck.kernels.cpu.replay.sources import sources_of, take_block, untake_block
from tiercheck.kernels.gradients import Gradient
from tiercheck.kernels.sgd import SgdCoefficients, SgdStep

__all__ = ["replay_sgd"]

SGD_STEP = np.dtype(
    [(name, np.float32) for name in ("multiplier", "decay", "momentum", "weight", "negative_lr")]
    + [(name, np.bool_) for name in ("decays", "has_momentum", "nesterov", "first")],
    align=True,
)

Array = NDArray[np.float32]
Row = Any  # a record of SGD_STEP


def replay_sgd(
    param: Array,
    momentum_buffer: Array | None,
    gradients: Sequence[Gradient],
    steps: Sequence[SgdStep],
    *,
    fused: bool,
    contracted: bool,
) -> None:
    """As the reference."""
    rows = np.zeros(len(steps), SGD_STEP)
    for row, step in zip(rows, steps, strict=True):
        for name, value in vars(SgdCoefficients.of(step)).items():
            row[name] = value
        row["decays"], row["has_momentum"] = step.weight_decay != 0, step.momentum != 0
        row["nesterov"], row["first"] = step.nesterov, step.first
    buffer = np.empty(0, np.float32) if momentum_buffer is None else momentum_buffer
    sources, streams = sources_of([param, buffer], gradients)
    apply_sgd_steps(param, buffer, sources, streams, frozen(rows), fused and contracted, contracted)


@compiled
def apply_sgd_steps(
    param: Array,
    momentum_buffer: Array,
    sources: NDArray[np.void],
    streams: NDArray[np.uintp],
    steps: NDArray[np.void],
    has_tail: bool,
    contracted: bool,
) -> None:
    size = param.size
    zeros, scratch = np.zeros(BLOCK + LINE, np.float32), np.empty(BLOCK + LINE, np.float32)
    scattered, prepared = aligned(zeros), aligned(scratch)
    block = block_between_requests(streams.size, steps.size)
    wanted = lines_wanted(streams.size, steps.size, block)
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        lines = max(0, min(TILE, size - stop)) // LINE
        fetched = 0
        for index in range(steps.size):
            for first in range(start, stop, block):
                prefetch_lines(streams, stop, lines, fetched, fetched + wanted)
                fetched += wanted
                last = min(first + block, stop)
                p = param[first:last]
                b = momentum_buffer[first:last] if momentum_buffer.size else momentum_buffer
                if sources[index].sparse:
                    taken = take_block(sources, index, first, last, scattered)
                    g = scattered[: last - first]
                    step_sgd(p, b, g, prepared[: last - first], steps[index], has_tail, contracted)
                    untake_block(sources, index, first, taken, scattered)
                else:
                    g = carray(pointer(sources[index].values), (size,), np.float32)[first:last]
                    step_sgd(p, b, g, prepared[: last - first], steps[index], has_tail, contracted)
    keep_alive(zeros)
    keep_alive(scratch)


@compiled
def step_sgd(p: Array, b: Array, g: Array, prepared: Array, step: Row, has_tail: bool, contracted: bool) -> None:
    multiplier, decay, momentum, negative_lr = step.multiplier, step.decay, step.momentum, step.negative_lr
    for i in range(p.size):
        prepared[i] = g[i] * multiplier
    if step.decays:
        add_scaled(prepared, p, decay, prepared, contracted)
    if not step.has_momentum:
        add_scaled(p, prepared, negative_lr, p, contracted)
        return
    if step.first:
        for i in range(p.size):
            b[i] = prepared[i]
    else:
        vectors = p.size - p.size % 8 if has_tail else p.size
        for i in range(vectors, p.size):
            b[i] = multiply_add(b[i], momentum, prepared[i] * step.weight)
        body = b[:vectors]
        for i in range(vectors):
            body[i] = body[i] * momentum
        add_scaled(body, prepared, step.weight, body, contracted)
    if step.nesterov:
        add_scaled(prepared, b, momentum, prepared, contracted)
        add_scaled(p, prepared, negative_lr, p, contracted)
    else:
        add_scaled(p, b, negative_lr, p, contracted)


@compiled
def add_scaled(a: Array, b: Array, scale: np.float32, out: Array, contracted: bool) -> None:
    """Write ``a + scale * b``, rounded as by torch's addition with an ``alpha``."""
    if contracted:
        for i in range(out.size):
            out[i] = multiply_add(b[i], scale, a[i])
    else:
        for i in range(out.size):
            out[i] = b[i] * scale + a[i]
