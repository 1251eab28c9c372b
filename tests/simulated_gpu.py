"""An optimizer that rounds as a GPU might: torch's Adam or AdamW, whose steps the reference of a candidate takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tiercheck import kernels
from tiercheck.kernels.gpu_adam import Powers, Rounding, powers_needed
from tiercheck.streams.optimizers import device_trials, stand_in
from tiercheck.streams.optimizers.registry import optimizer_of

__all__ = ["DeviceMemoryOfTests", "simulate", "simulated"]

CLASSES = {"torch.optim.adam.Adam": torch.optim.Adam, "torch.optim.adamw.AdamW": torch.optim.AdamW}


def powers_of(rounding: Rounding, betas: tuple[float, ...]) -> Powers:
    """As torch computes them on the host, which stands for the device."""
    if (number := rounding.powers) is None:
        return Powers()
    dtype = torch.float32 if number is np.float32 else torch.float64
    tables = {}
    for beta in betas:
        counts = torch.arange(1, powers_needed(beta) + 1, dtype=dtype)
        tables[beta] = torch.pow(torch.full_like(counts, beta), counts).numpy()
    return Powers(tables)


def simulated(
    kind: str, rounding: Rounding, powers: Callable[[Rounding, tuple[float, ...]], Powers] = powers_of
) -> type[torch.optim.Optimizer]:
    """The class, under the name of torch's own."""
    base: Any = CLASSES[kind]
    cached: dict[tuple[float, ...], Powers] = {}

    def step(self: Any, closure: Any = None) -> None:
        replayable = optimizer_of(kind)
        for group in self.param_groups:
            betas = replayable.betas(group)
            if betas not in cached:
                cached[betas] = powers(rounding, betas)
            for p in group["params"]:
                if p.grad is not None:
                    step_one(self.state[p], p, group, replayable, cached[betas])

    def step_one(state: Any, p: Any, group: Any, replayable: Any, known: Powers) -> None:
        if not state:
            state["step"] = torch.zeros(())
            for name in replayable.needs(replayable.step(group, 1)):
                state[name] = torch.zeros_like(p.detach())
        state["step"] += 1
        scalars = replayable.step(group, int(state["step"]))
        arrays = [state[name].view(-1).numpy() for name in replayable.needs(scalars)]
        largest = arrays[2] if len(arrays) > 2 else None
        kernels.replay_gpu_adam.by("reference")(
            p.detach().view(-1).numpy(),
            *arrays[:2],
            [p.grad.reshape(-1).numpy()],
            [scalars],
            max_exp_avg_sq=largest,
            rounding=rounding,
            powers=known,
        )

    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "step": step}
    return type(base.__name__, (base,), named)


def simulate(monkeypatch: pytest.MonkeyPatch, kind: str, rounding: Rounding, **options: Any) -> None:
    """From here on the device ``cuda`` is the host, and this optimizer steps there as the candidate does."""
    made = simulated(kind, rounding, **options)
    monkeypatch.setattr(device_trials, "class_of", lambda _: made)
    for name in ("outcome_on_device", "powers_on_device"):
        real = getattr(device_trials, name)
        monkeypatch.setattr(device_trials, name, on_host(real))
    monkeypatch.setattr(stand_in, "_known", {})
    stand_in.chosen.cache_clear()


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*("cpu" if each == "cuda" else each for each in arguments))


class DeviceMemoryOfTests:
    """Host memory that passes for a device's. ``wrap``: makes an emulated device's array of a NumPy one."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.wrap = wrap

    def stream(self, tensor: torch.Tensor) -> nullcontext[None]:
        return nullcontext()

    def borrow(self, tensor: torch.Tensor, stream: Any) -> Any:
        return self.wrap(tensor.numpy())
