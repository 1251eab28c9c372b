"""Certification of a replay by experiment: the optimizer of this process, on small problems, against the form.

Exactness depends on torch's version, on the instruction set it found, on the compiler that built it, and on the code of
the optimizer. No table of ours can know them all, so a form is asked for the optimizer's very bits before it is ever
called exact.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gradients import Gradient, SparseGradient, dense
from tiercheck.streams.optimizers.optimizer import Array, Function, ReplayableOptimizer
from tiercheck.streams.tensors.bare_step import bare_step

__all__ = ["class_of", "differing_elements", "differing_values", "environment", "run_optimizer", "run_replay"]

STEPS = 5
"""The first of them is the optimizer's own, which makes its state: as when a job is replayed."""

SIZES = (301, 31, 16, 7)
"""With and without an end behind the last whole vector, for any vector length."""


def environment() -> tuple[str, str]:
    """The version and the CPU instruction set of the torch in this process."""
    return str(torch.__version__), str(torch.backends.cpu.get_cpu_capability())


def class_of(kind: str) -> type[torch.optim.Optimizer]:
    """The optimizer's class by its qualified name. Errors: ``ConfigurationError`` if there is none."""
    module, _, name = kind.rpartition(".")
    try:
        found: Any = getattr(sys.modules.get(module) or importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"there is no optimizer {kind} in this process: {error}") from error
    return cast(type[torch.optim.Optimizer], found)


@cache
def differing_elements(function: Function, optimizer: ReplayableOptimizer[Any], implementation: str) -> int:
    """How many values ``function`` gets otherwise than the optimizer in this process: 0 certifies it.

    Takes some hundredths of a second, once a process.
    """
    differing = 0
    for options in optimizer.variants():
        for size in SIZES:
            start, gradients = problem(size)
            whole = [dense(each, size) for each in gradients]
            first, expected = run_optimizer(optimizer, implementation, start, whole, options)
            actual = run_replay(function, optimizer, first, gradients[1:], options, begin=2)
            differing += differing_values(actual, expected)
    return differing


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


Held = Mapping[str, Array]
"""``param``, and the arrays of the state by name."""


def run_optimizer(
    optimizer: ReplayableOptimizer[Any],
    implementation: str,
    start: Array,
    gradients: Sequence[Array],
    options: Mapping[str, Any],
) -> tuple[Held, Held]:
    """The parameter and every array of the state after the real optimizer's first step, and after all."""
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    arguments: dict[str, Any] = {**optimizer.arguments(implementation), **options}
    stepping = class_of(optimizer.kind)([parameter], **arguments)
    seen: list[Held] = []
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        bare_step(stepping)
        held = stepping.state[parameter]
        arrays = {name: held[name] for name in optimizer.state if held.get(name) is not None}
        seen.append({name: each.detach().numpy().copy() for name, each in {"param": parameter, **arrays}.items()})
    return seen[0], seen[-1]


def run_replay(
    function: Function,
    optimizer: ReplayableOptimizer[Any],
    held: Held,
    gradients: Sequence[Gradient],
    options: Mapping[str, Any],
    *,
    begin: int = 1,
) -> Held:
    """The same from a form, which takes step ``begin`` first."""
    arrays = {name: array.copy() for name, array in held.items()}
    count = len(gradients)
    numbers = range(begin, begin + count) if optimizer.counter else [min(2, begin + index) for index in range(count)]
    steps = [optimizer.step(options, number) for number in numbers]
    param = arrays.pop("param")
    with np.errstate(all="ignore"):
        function(param, arrays, gradients, steps)
    return {"param": param, **arrays}


def differing_values(actual: Held, expected: Held) -> int:
    """Values with other bits; a NaN is a NaN, whatever its payload. A missing array differs in all of them."""
    differing = 0
    for name in actual.keys() | expected.keys():
        if name not in actual or name not in expected:
            differing += (actual.get(name, expected.get(name, np.empty(0)))).size
            continue
        a, b = actual[name], expected[name]
        differing += int(np.count_nonzero((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))))
    return differing
