"""Replay: from a base to the version of the last differential, in temporal order.

Adam and AdamW are replayed by a kernel in place, several steps in one read and one write of the state, where a
kernel is bit-exact with the optimizer that took the steps. Everything else is replayed by calling the
optimizer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.errors import Corruption
from tiercheck.kernels import AdamStep, Replay, reason_not_replayable, supports
from tiercheck.streams.differential import Differential
from tiercheck.streams.providers import StateProvider

__all__ = ["replay"]

STEPS_AT_ONCE = 5
"""Decoded differentials in memory at a time."""


def replay(provider: StateProvider, differentials: Sequence[Differential]) -> None:
    """Apply the differentials, oldest first, to the state the provider holds.

    Errors: ``Corruption`` where one names a master or a group that the state does not have.
    """
    applied = [each for each in differentials if not each.skipped]
    for start in range(0, len(applied), STEPS_AT_ONCE):
        chunk = applied[start : start + STEPS_AT_ONCE]
        kernel = kernel_for(provider, chunk)
        if kernel is None:
            for each in chunk:
                provider.apply(_known(provider, each), each.hyperparameters)
        else:
            _replay_in_place(provider, kernel, chunk)
    _load_buffers(provider, differentials)


def kernel_for(provider: StateProvider, chunk: Sequence[Differential]) -> Replay | None:
    """The kernel that can stand for the optimizer over these steps, or ``None``: call the optimizer."""
    optimizer = provider.identity().optimizer
    if any(reason_not_replayable(optimizer.kind, group) for each in chunk for group in each.hyperparameters):
        return None
    state = provider.optimizer_state()
    for name, master in provider.masters().items():
        held = state.get(name, {})
        if held.keys() != {"step", "exp_avg", "exp_avg_sq"}:  # before its first step, or a variant of Adam
            return None
        if not isinstance(held["step"], torch.Tensor):
            return None
        tensors = (master, held["exp_avg"], held["exp_avg_sq"])
        if any(t.dtype is not torch.float32 or t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
            return None
    return supports(**asdict(optimizer))


def _replay_in_place(provider: StateProvider, kernel: Replay, chunk: Sequence[Differential]) -> None:
    state, group_of = provider.optimizer_state(), provider.group_of()
    decoded = [_known(provider, each) for each in chunk]
    for name, master in provider.masters().items():
        held = state[name]
        count = int(held["step"])
        gradients: list[NDArray[np.float32]] = []
        steps: list[AdamStep] = []
        for each, found in zip(chunk, decoded, strict=True):
            if name in found:
                options = each.hyperparameters[group_of[name]]
                steps.append(AdamStep.of(kernel.kind, options, count + len(steps) + 1))
                gradients.append(found[name].to(torch.float32).contiguous().numpy())
        kernel(
            master.numpy(),
            held["exp_avg"].numpy(),
            held["exp_avg_sq"].numpy(),
            gradients,
            steps,
            threads=torch.get_num_threads(),
        )
        held["step"].add_(len(steps))


def _known(provider: StateProvider, each: Differential) -> dict[str, torch.Tensor]:
    """The gradients of a differential, every one for a master of this state."""
    gradients, masters = each.gradients(), provider.masters()
    for name, gradient in gradients.items():
        if name not in masters or masters[name].shape != gradient.shape:
            raise Corruption(
                f"differential {each.version} has a gradient for {name!r} {tuple(gradient.shape)}, "
                "which the state does not have"
            )
    groups = max(provider.group_of().values(), default=-1) + 1
    if len(each.hyperparameters) < groups:
        raise Corruption(
            f"differential {each.version} has options for {len(each.hyperparameters)} groups, not {groups}"
        )
    return gradients


def _load_buffers(provider: StateProvider, differentials: Sequence[Differential]) -> None:
    """Buffers as of the last version: each from the newest differential in which it changed."""
    buffers = provider.buffers()
    newest: dict[str, torch.Tensor] = {}
    for each in differentials:
        newest.update(each.buffers())
    with torch.no_grad():
        for name, value in newest.items():
            if name not in buffers or buffers[name].shape != value.shape:
                raise Corruption(f"a differential has the buffer {name!r}, which the state does not have")
            buffers[name].copy_(value)
