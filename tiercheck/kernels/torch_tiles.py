"""Replay with torch's own operations, a tile at a time: for ``single_tensor`` and ``foreach``.

Both run these operations in this order on CPU (``torch/optim/adam.py``: ``_single_tensor_adam``,
``_multi_tensor_adam``). Each is elementwise, and its result does not depend on where in an array an element
lies, so that the same operations on tiles give the same bits, with one read and one write of the state for any
number of steps. Writing the arithmetic ourselves would not: torch's square root goes through a vector
library that is not always correctly rounded.

The only file of the kernels that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.kernels.adam import KINDS, AdamStep, Coefficients

__all__ = ["TILE", "differing_elements", "environment", "replay_adam", "replay_adam_with_numba"]

TILE = 32704
"""Elements a tile: enough for torch's cost of a call to matter little, with state and gradient in the second-level
cache, and under torch's grain size, so that each operation runs on the calling thread."""

ReplayFunction = Callable[..., None]


def environment() -> tuple[str, str]:
    """The version and the CPU instruction set of the torch in this process."""
    return str(torch.__version__), str(torch.backends.cpu.get_cpu_capability())


def replay_adam(
    param: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradients: Sequence[NDArray[np.float32]],
    steps: Sequence[AdamStep],
) -> None:
    """Apply the steps in order, in place. All arrays are 1-D, float32 and contiguous, of one size."""
    state = [torch.from_numpy(array) for array in (param, exp_avg, exp_avg_sq)]
    differentials = [torch.from_numpy(readable(gradient)) for gradient in gradients]
    denominator, scratch = torch.empty(TILE), torch.empty(TILE)
    with torch.no_grad():
        for start in range(0, param.size, TILE):
            p, m, v = (tensor[start : start + TILE] for tensor in state)
            room = p.numel()
            for gradient, step in zip(differentials, steps, strict=True):
                one_step(p, m, v, gradient[start : start + TILE], step, denominator[:room], scratch[:room])


def one_step(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    step: AdamStep,
    denominator: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    if step.weight_decay != 0:
        if step.decoupled:
            p.mul_(1 - step.lr * step.weight_decay)
        else:
            gradient = torch.add(gradient, p, alpha=step.weight_decay, out=scratch)
    m.lerp_(gradient, 1 - step.beta1)
    v.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
    count = float(step.step)
    torch.sqrt(v, out=denominator)
    denominator.div_((1 - step.beta2**count) ** 0.5).add_(step.eps)
    p.addcdiv_(m, denominator, value=-(step.lr / (1 - step.beta1**count)))


def replay_adam_with_numba(
    param: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradients: Sequence[NDArray[np.float32]],
    steps: Sequence[AdamStep],
    *,
    contracted: bool,
) -> None:
    """As :func:`replay_adam`, with torch for the square roots alone; the rest are two loops in Numba.

    ``contracted``: torch's vector code fuses the multiplications of ``lerp`` and ``addcmul`` into their additions
    (AVX2 and AVX-512), or does not.
    """
    from tiercheck.kernels.cpu import adam as cpu
    from tiercheck.kernels.cpu.compiled import frozen

    rows = np.array([cpu.scalar_row(Coefficients.of(step)) for step in steps], np.float32).reshape(len(steps), 8)
    coupled = [step.weight_decay != 0 and not step.decoupled for step in steps]
    l2_decays = rows[:, 0].copy()
    rows[coupled, 0] = 1
    roots, scratch = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    second_moments, roots_out = torch.from_numpy(exp_avg_sq), torch.from_numpy(roots)
    for start in range(0, param.size, TILE):
        tile = slice(start, min(start + TILE, param.size))
        p, m, v = param[tile], exp_avg[tile], exp_avg_sq[tile]
        for index, gradient in enumerate(gradients):
            g = frozen(gradient[tile])
            if coupled[index]:
                cpu.add_decay(p, g, scratch, l2_decays[index], contracted)
                g = frozen(scratch[: p.size])
            cpu.update_moments(p, m, v, g, rows[index], contracted)
            torch.sqrt(second_moments[tile], out=roots_out[: p.size])
            cpu.update_parameter(p, m, roots, rows[index])


def readable(gradient: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same memory, without torch's warning about read-only arrays; nothing here writes to a gradient."""
    if gradient.flags.writeable:
        return gradient
    address = gradient.__array_interface__["data"][0]
    view: NDArray[np.float32] = np.ctypeslib.as_array(
        (np.ctypeslib.as_ctypes_type(np.float32) * gradient.size).from_address(address)
    )
    return view


@cache
def differing_elements(replay: ReplayFunction, kind: str, implementation: str) -> int:
    """How many values ``replay`` gets otherwise than the torch optimizer in this process: 0 certifies it.

    Runs both on a few hundred elements, in sizes that leave a tail for any vector length, with and without weight
    decay. Takes milliseconds, once a process.
    """
    differing = 0
    generator = np.random.default_rng(20)
    for size, beta1, weight_decay in ((301, 0.9, 0.1), (31, 0.4, 0.01), (16, 0.95, 0.0), (7, 0.9, 0.1)):
        start = generator.standard_normal(size, dtype=np.float32)
        gradients = [generator.standard_normal(size, dtype=np.float32) * np.float32(0.01) for _ in range(3)]
        options: dict[str, Any] = {"lr": 1e-3, "betas": (beta1, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
        steps = [AdamStep.of(kind, options, count) for count in (1, 2, 3)]
        expected = run_optimizer(kind, implementation, start, gradients, options)
        actual = (start.copy(), np.zeros_like(start), np.zeros_like(start))
        replay(*actual, gradients, steps)
        differing += sum(
            int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32))) for a, b in zip(actual, expected, strict=True)
        )
    return differing


def run_optimizer(
    kind: str,
    implementation: str,
    start: NDArray[np.float32],
    gradients: Sequence[NDArray[np.float32]],
    options: dict[str, Any],
) -> tuple[NDArray[np.float32], ...]:
    classes = {"torch.optim.adam.Adam": torch.optim.Adam, "torch.optim.adamw.AdamW": torch.optim.AdamW}
    assert set(classes) == set(KINDS)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = classes[kind](
        [parameter],
        foreach=implementation == "foreach",
        fused=implementation == "fused",
        **options,
    )
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    state = optimizer.state[parameter]
    return tuple(tensor.detach().numpy() for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]))
