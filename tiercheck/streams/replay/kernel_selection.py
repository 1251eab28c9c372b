"""Steps replayed by a kernel, in place: which kernel can stand for the optimizer over which steps, and its state.

A kernel is taken only where it was certified to give the very bits of the optimizer that took the steps, or where the
caller asks for less. Where none is, the optimizer is called: so for the first step of a tensor, which makes its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.kernels import (
    AdamStep,
    Replay,
    SgdReplay,
    SgdStep,
    SparseGradient,
    reason_not_replayable,
    reason_sgd_not_replayable,
    supports,
    supports_sgd,
)
from tiercheck.kernels.adam import KINDS
from tiercheck.kernels.sgd import SGD
from tiercheck.streams.provider import StateProvider
from tiercheck.streams.replay.runs import Gradient, Step

__all__ = ["InPlace", "kernel_for"]

ADAM_STATE = frozenset({"step", "exp_avg", "exp_avg_sq"})

Array = NDArray[np.float32]


class InPlace(Protocol):
    """A kernel for one optimizer, and how it is fed from a provider's state."""

    @property
    def exact(self) -> bool:
        """Whether it gives the bits of the optimizer."""

    def __call__(self, provider: StateProvider, steps: Sequence[Step], *, threads: int) -> None:
        """Apply the steps to the state, on at most ``threads`` threads."""


@dataclass(frozen=True)
class AdamInPlace:
    """Adam and AdamW."""

    kernel: Replay

    @property
    def exact(self) -> bool:
        return self.kernel.exact

    def __call__(self, provider: StateProvider, steps: Sequence[Step], *, threads: int) -> None:
        state, group_of = provider.optimizer_state(), provider.group_of()
        for name, master in provider.masters().items():
            held, taken = state[name], [step for step in steps if name in step.gradients]
            count = int(held["step"])
            largest = held.get("max_exp_avg_sq")
            self.kernel(
                master.numpy(),
                held["exp_avg"].numpy(),
                held["exp_avg_sq"].numpy(),
                [array_of_gradient(step.gradients[name]) for step in taken],
                [
                    AdamStep.of(self.kernel.kind, step.hyperparameters[group_of[name]], count + index)
                    for index, step in enumerate(taken, start=1)
                ],
                max_exp_avg_sq=None if largest is None or not taken else largest.numpy(),
                threads=threads,
            )
            held["step"].add_(len(taken))

    @staticmethod
    def takes(held: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a master's state is there, and is that of all steps, of which it has a gradient and ``options``."""
        variants = {bool(group.get("amsgrad")) for group in options}
        if len(variants) > 1 or held.keys() - {"max_exp_avg_sq"} != ADAM_STATE:
            return False
        return isinstance(held["step"], torch.Tensor) and variants <= {"max_exp_avg_sq" in held}


@dataclass(frozen=True)
class SgdInPlace:
    """SGD, with or without momentum."""

    kernel: SgdReplay
    exact: bool = True

    def __call__(self, provider: StateProvider, steps: Sequence[Step], *, threads: int) -> None:
        state, group_of = provider.optimizer_state(), provider.group_of()
        for name, master in provider.masters().items():
            taken = [step for step in steps if name in step.gradients]
            scalars = [SgdStep.of(step.hyperparameters[group_of[name]], first=False) for step in taken]
            momentum = state[name]["momentum_buffer"].numpy() if any(each.momentum for each in scalars) else None
            gradients = [array_of_gradient(step.gradients[name]) for step in taken]
            self.kernel(master.numpy(), momentum, gradients, scalars, threads=threads)

    @staticmethod
    def takes(held: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> bool:
        """As :meth:`AdamInPlace.takes`."""
        variants = {bool(group["momentum"]) for group in options}
        if len(variants) > 1 or held.keys() - {"momentum_buffer"}:
            return False
        return True not in variants or isinstance(held.get("momentum_buffer"), torch.Tensor)


def kernel_for(provider: StateProvider, steps: Sequence[Step], *, exact: bool = True) -> InPlace | None:
    """The kernel that can stand for the optimizer over these steps, or ``None``: call the optimizer.

    ``exact=False``: one that is not exact, where it is the faster one: for Adam over sparse gradients. Errors:
    ``ConfigurationError`` where that cannot be had.
    """
    optimizer = provider.identity().optimizer
    options = [group for step in steps for group in step.hyperparameters]
    now = [how_it_runs(group) for group in provider.hyperparameters()]
    if any([how_it_runs(group) for group in step.hyperparameters] != now for step in steps):
        return None  # the optimizer was told to run otherwise in between, which rounds otherwise
    if optimizer.kind in KINDS:
        if any(reason_not_replayable(optimizer.kind, group) for group in options):
            return None
        if not all_take(AdamInPlace, provider, steps):
            return None
        sparse = any(isinstance(each, SparseGradient) for step in steps for each in step.gradients.values())
        kernel = supports(
            kind=optimizer.kind,
            implementation=optimizer.implementation,
            torch_version=optimizer.torch_version,
            instruction_set=optimizer.instruction_set,
            device=optimizer.device,
            exact=exact or not sparse,
        )
        return None if kernel is None else AdamInPlace(kernel)
    if optimizer.kind != SGD or len(set(now)) != 1 or any(reason_sgd_not_replayable(SGD, group) for group in options):
        return None
    if not all_take(SgdInPlace, provider, steps):
        return None
    sgd = supports_sgd(
        implementation=now[0],
        torch_version=optimizer.torch_version,
        instruction_set=optimizer.instruction_set,
        device=optimizer.device,
    )
    return None if sgd is None else SgdInPlace(sgd)


def all_take(kind: type[AdamInPlace] | type[SgdInPlace], provider: StateProvider, steps: Sequence[Step]) -> bool:
    """Whether every master's state lies in host memory as fp32, and is what the kernel works on."""
    state, group_of = provider.optimizer_state(), provider.group_of()
    for name, master in provider.masters().items():
        held = state.get(name, {})
        tensors = [master, *(each for key, each in held.items() if key != "step" and isinstance(each, torch.Tensor))]
        if any(t.dtype is not torch.float32 or t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
            return False
        if not kind.takes(held, [step.hyperparameters[group_of[name]] for step in steps if name in step.gradients]):
            return False
    return True


def how_it_runs(group: Mapping[str, Any]) -> str:
    """Which of torch's implementations a parameter group's options choose on a CPU."""
    if group.get("fused"):
        return "fused"
    return "foreach" if group.get("foreach") else "single_tensor"


def array_of_gradient(gradient: Gradient) -> Array | SparseGradient:
    if isinstance(gradient, SparseGradient):
        return gradient
    return gradient.to(torch.float32).contiguous().numpy()
