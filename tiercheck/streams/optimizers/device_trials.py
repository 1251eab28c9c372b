"""An optimizer on its device: it takes its candidates' trials, and the device computes the powers of its betas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tiercheck.kernels.gpu_adam import Powers, powers_needed
from tiercheck.streams.optimizers.certification import Held, class_of
from tiercheck.streams.optimizers.optimizer import Candidate, ReplayableOptimizer, Trial
from tiercheck.streams.tensors.bare_step import bare_step

__all__ = ["outcomes_on_device", "powers_on_device"]


def outcomes_on_device(
    optimizer: ReplayableOptimizer[Any], implementation: str, device: str, trials: Sequence[Trial]
) -> list[Held]:
    """What the real optimizer makes of each trial. Errors: what torch raises if it cannot step there."""
    return [outcome_on_device(optimizer, implementation, device, trial) for trial in trials]


def outcome_on_device(
    optimizer: ReplayableOptimizer[Any], implementation: str, device: str, trial: Trial
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Its first step makes its state; then the trial's state is planted."""
    parameter = torch.nn.Parameter(torch.zeros(trial.held["param"].size, dtype=torch.float32, device=device))
    arguments: dict[str, Any] = {**optimizer.arguments(implementation), **trial.options}
    stepping = class_of(optimizer.kind)([parameter], **arguments)
    parameter.grad = torch.zeros_like(parameter)
    bare_step(stepping)
    held: Mapping[str, torch.Tensor] = {**stepping.state[parameter], "param": parameter.detach()}
    for name, planted in trial.held.items():
        held[name].copy_(torch.from_numpy(planted))
    if optimizer.counter is not None:
        held[optimizer.counter].fill_(trial.count)
    for gradient in trial.gradients:
        parameter.grad = torch.from_numpy(gradient).to(device, copy=True)
        bare_step(stepping)
    held = {**stepping.state[parameter], "param": parameter.detach()}
    return {name: held[name].cpu().numpy().copy() for name in trial.held}


def powers_on_device(candidate: Candidate, betas: Iterable[float], device: str) -> Powers:
    """By torch's operation there, which computes them as torch's fused kernels do. Errors: ``ConfigurationError`` for a
    beta with too many."""
    if candidate.powers is None:
        return Powers()
    dtype = torch.float32 if candidate.powers is np.float32 else torch.float64
    tables = {}
    for beta in sorted(set(betas)):
        counts = torch.arange(1, powers_needed(beta) + 1, dtype=dtype, device=device)
        tables[beta] = torch.pow(torch.full_like(counts, beta), counts).cpu().numpy()
    return Powers(tables)
