"""Certification of a replay by experiment: the torch optimizer of this process, on small problems, against the
kernel.

Exactness depends on torch's version, on the instruction set it found and on the compiler that built it. No table of
ours can know them all, so a kernel is asked for the optimizer's very bits before it is ever called exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.kernels.adam import KINDS, AdamStep
from tiercheck.kernels.gradients import Gradient, SparseGradient, dense
from tiercheck.kernels.sgd import SGD, SgdStep

__all__ = ["differing_elements", "environment"]

Array = NDArray[np.float32]

STEPS = 4

SIZES = (301, 31, 16, 7)
"""With and without an end behind the last whole vector, for any vector length."""

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "torch.optim.adam.Adam": torch.optim.Adam,
    "torch.optim.adamw.AdamW": torch.optim.AdamW,
    SGD: torch.optim.SGD,
}

assert set(OPTIMIZERS) == {*KINDS, SGD}


def environment() -> tuple[str, str]:
    """The version and the CPU instruction set of the torch in this process."""
    return str(torch.__version__), str(torch.backends.cpu.get_cpu_capability())


@cache
def differing_elements(replay: Callable[..., None], kind: str, implementation: str) -> int:
    """How many values ``replay`` gets otherwise than the torch optimizer in this process: 0 certifies it.

    Takes some hundredths of a second, once a process.
    """
    differing = 0
    for options, size in product(sgd_variants() if kind == SGD else adam_variants(), SIZES):
        start, gradients = problem(size)
        expected = run_optimizer(kind, implementation, start, [dense(each, size) for each in gradients], options)
        differing += differing_values(run_replay(replay, kind, start, gradients, options), expected)
    return differing


def adam_variants() -> Iterator[dict[str, Any]]:
    """Both ways to lerp, decay, and the variants."""
    for beta1, weight_decay in ((0.9, 0.1), (0.4, 0.01), (0.95, 0.0)):
        for amsgrad, maximize in ((False, False), (True, False), (False, True)):
            yield {
                "lr": 1e-3,
                "betas": (beta1, 0.95),
                "eps": 1e-8,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
            }


def sgd_variants() -> Iterator[dict[str, Any]]:
    for momentum, dampening, nesterov in ((0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.8, 0.0, True)):
        for weight_decay, maximize in ((0.0, False), (0.1, True)):
            yield {
                "lr": 0.013,
                "momentum": momentum,
                "dampening": dampening,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "maximize": maximize,
            }


def problem(size: int) -> tuple[Array, list[Gradient]]:
    """A start, and gradients of which every second is sparse; one element overflows and one is not a number."""
    generator = np.random.default_rng(size)
    start = generator.standard_normal(size, dtype=np.float32)
    gradients: list[Gradient] = []
    for count in range(STEPS):
        gradient = generator.standard_normal(size, dtype=np.float32) * np.float32(0.01)
        gradient[0] = np.float32(1e-42 if count else 1e-20)
        gradient[-1] = np.float32(3e38)
        gradient[size // 2] = np.float32(np.nan if count == 2 else 1e-3)
        if count % 2:
            kept = np.flatnonzero(generator.random(size) < 0.3).astype(np.uint32)
            gradients.append(SparseGradient(kept, gradient[kept]))
        else:
            gradients.append(gradient)
    return start, gradients


def run_optimizer(
    kind: str, implementation: str, start: Array, gradients: Sequence[Array], options: Mapping[str, Any]
) -> list[Array]:
    """The parameter and every array of the state after the steps of the real optimizer."""
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    optimizer = OPTIMIZERS[kind]([parameter], **flags, **options)  # type: ignore[arg-type]
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    held = optimizer.state[parameter]
    names = ("momentum_buffer",) if kind == SGD else ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    state = [held[name].numpy() for name in names if held.get(name) is not None]
    return [parameter.detach().numpy(), *state]


def run_replay(
    replay: Callable[..., None],
    kind: str,
    start: Array,
    gradients: Sequence[Gradient],
    options: Mapping[str, Any],
) -> list[Array]:
    """The same from the kernel."""
    param = start.copy()
    if kind == SGD:
        buffer = np.zeros_like(start) if options["momentum"] else None
        replay(param, buffer, gradients, [SgdStep.of(options, first=count == 0) for count in range(len(gradients))])
        return [param] if buffer is None else [param, buffer]
    state = [param, np.zeros_like(start), np.zeros_like(start)]
    largest = np.zeros_like(start) if options.get("amsgrad") else None
    steps = [AdamStep.of(kind, options, count) for count in range(1, len(gradients) + 1)]
    replay(*state, gradients, steps, max_exp_avg_sq=largest)
    return state if largest is None else [*state, largest]


def differing_values(actual: Sequence[Array], expected: Sequence[Array]) -> int:
    """Values with other bits; a NaN is a NaN, whatever its payload."""
    return sum(
        int(np.count_nonzero((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))))
        for a, b in zip(actual, expected, strict=True)
    )
