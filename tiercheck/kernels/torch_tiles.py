"""Replay of Adam with torch's own operations, a tile at a time: for ``single_tensor`` and ``foreach``.

On a CPU both run the operations below in this order (``torch/optim/adam.py``: ``_single_tensor_adam`` and
``_multi_tensor_adam``). Each operation is elementwise, and its result does not depend on the element's position. So
the same operations on tiles give the same bits, and read and write the state once for any number of steps. A square
root of our own would not do: torch takes it from a vector library that does not always round correctly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.gradients import Gradient, SparseGradient
from tiercheck.kernels.registry import load_numba

__all__ = ["TILE", "replay_adam", "replay_adam_with_numba"]

TILE = 32704
"""Elements of a tile. It is large enough that the cost of calling torch matters little, small enough that state and
gradient stay in the second-level cache, and below torch's grain size, so that torch uses the calling thread alone."""

Array = NDArray[np.float32]


def replay_adam(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    gradients: Sequence[Gradient],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: Array | None = None,
) -> None:
    """Apply the steps in order, in place. All arrays are 1-D, fp32, contiguous, and of one size.

    ``max_exp_avg_sq`` is given if, and only if, the steps have amsgrad. A gradient may be sparse. Nothing is checked.
    """
    state = [torch.from_numpy(array) for array in (param, exp_avg, exp_avg_sq)]
    largest = None if max_exp_avg_sq is None else torch.from_numpy(max_exp_avg_sq)
    scratch = torch.empty(3, TILE, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for start in range(0, param.size, TILE):
            stop = min(start + TILE, param.size)
            p, m, v = (tensor[start:stop] for tensor in state)
            x = None if largest is None else largest[start:stop]
            zeros, denominator, prepared = (row[: stop - start] for row in scratch)
            for gradient, step in zip(gradients, steps, strict=True):
                g = torch.from_numpy(readable(tile_of(gradient, start, stop, zeros.numpy())))
                one_step(p, m, v, x, g, step, denominator, prepared)


def one_step(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    x: torch.Tensor | None,
    gradient: torch.Tensor,
    step: AdamStep,
    denominator: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    multiplier = float(Coefficients.of(step).multiplier)
    if multiplier != 1:
        gradient = torch.mul(gradient, multiplier, out=scratch)
    if step.weight_decay != 0:
        if step.decoupled:
            p.mul_(1 - step.lr * step.weight_decay)
        else:
            gradient = torch.add(gradient, p, alpha=step.weight_decay, out=scratch)
    m.lerp_(gradient, 1 - step.beta1)
    v.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    count = float(step.step)
    if x is not None:
        torch.maximum(x, v, out=x)
    torch.sqrt(v if x is None else x, out=denominator)
    denominator.div_((1 - step.beta2**count) ** 0.5).add_(step.eps)
    p.addcdiv_(m, denominator, value=-(step.lr / (1 - step.beta1**count)))


def tile_of(gradient: Gradient, start: int, stop: int, zeros: Array) -> Array:
    """Elements ``start..stop-1`` of a gradient: a view of a dense one; a sparse one is written into ``zeros``."""
    if not isinstance(gradient, SparseGradient):
        return gradient[start:stop]
    first, last = gradient.between(start, stop)
    zeros[:] = 0
    zeros[gradient.indices[first:last] - np.uint32(start)] = gradient.values[first:last]
    return zeros


def replay_adam_with_numba(
    param: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    gradients: Sequence[Gradient],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: Array | None = None,
    contracted: bool,
) -> None:
    """:func:`replay_adam` in two loops of Numba, with torch for the square roots alone.

    ``contracted``: whether torch's vector code fuses the multiplications of ``lerp`` and ``addcmul`` into their
    additions, as it does with AVX2 and AVX-512.
    """
    load_numba()
    from tiercheck.kernels.cpu.compiled import frozen
    from tiercheck.kernels.cpu.replay import adam as cpu

    rows = cpu.rows_of(tuple(steps))
    zeros, roots, prepared = np.empty((3, TILE), np.float32)
    second = exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq
    second_moments, roots_out = torch.from_numpy(second), torch.from_numpy(roots)
    for start in range(0, param.size, TILE):
        tile = slice(start, min(start + TILE, param.size))
        p, m, v, room = param[tile], exp_avg[tile], exp_avg_sq[tile], slice(0, tile.stop - start)
        moments, out = second_moments[tile], roots_out[room]
        for row, gradient in zip(rows, gradients, strict=True):
            g = frozen(tile_of(gradient, tile.start, tile.stop, zeros[room]))
            if row["prepares"]:
                cpu.prepare(p, g, prepared, row, contracted)
                g = frozen(prepared[room])
            cpu.update_moments(m, v, g, row, contracted)
            if max_exp_avg_sq is not None:
                np.maximum(second[tile], v, out=second[tile])
            torch.sqrt(moments, out=out)
            cpu.move_by_roots(p, m, roots, row)


def readable(gradient: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same memory as a writable view, since torch warns about read-only arrays. Nothing here writes to it."""
    if gradient.flags.writeable:
        return gradient
    address = gradient.__array_interface__["data"][0]
    view: NDArray[np.float32] = np.ctypeslib.as_array(
        (np.ctypeslib.as_ctypes_type(np.float32) * gradient.size).from_address(address)
    )
    return view
