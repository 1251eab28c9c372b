"""Steps replayed by a kernel of the GPU on which the optimizer steps, where its state lies.

The kernel is one of the optimizer's candidates. It is taken after it had the optimizer's bits on this process's device,
in trials that no two candidates pass with the same bits. If none has, or CuPy is not installed, the optimizer is
called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import SparseGradient
from tiercheck.streams.optimizers import device_trials, stand_in
from tiercheck.streams.optimizers.optimizer import OnDevice, ReplayableOptimizer, Trial
from tiercheck.streams.optimizers.replay import Setting
from tiercheck.streams.replay.runs import Gradient

__all__ = ["DeviceMemory", "DeviceReplay", "device_replay_for"]

logger = logging.getLogger(__name__)

PIECE = 1 << 25
"""Elements of whose gradients are on the device at a time: 128 MiB a step."""


class DeviceMemory(Protocol):
    """How torch's tensors on a device are handed to kernels."""

    def stream(self, tensor: torch.Tensor) -> AbstractContextManager[Any]:
        """The stream that torch puts work on this tensor into: what comes before, and after, is ordered. Kernels are
        put there inside of the context."""
        ...

    def borrow(self, tensor: torch.Tensor, stream: Any) -> Any:
        """The same memory, as the kernels take it."""
        ...


class CudaMemory:
    """Through CuPy."""

    def stream(self, tensor: torch.Tensor) -> AbstractContextManager[Any]:
        from tiercheck.kernels import cuda

        return cuda.torch_stream(torch.cuda.current_stream(tensor.device).cuda_stream, tensor.device.index)

    def borrow(self, tensor: torch.Tensor, stream: Any) -> Any:
        from tiercheck.kernels import cuda

        return cuda.borrow(tensor, stream)


@dataclass(frozen=True)
class DeviceReplay:
    """A kernel that applies an optimizer's steps on its device, bit for bit."""

    name: str
    optimizer: ReplayableOptimizer[Any]
    function: OnDevice
    memory: DeviceMemory = field(default_factory=CudaMemory)

    def __call__(
        self,
        master: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        gradients: Sequence[Gradient],
        steps: Sequence[Any],
    ) -> None:
        """Apply the steps to the state, in place, in one pass over it. Their gradients are brought to the device, of so
        many elements at a time: there is little memory to spare. The host does not wait for the kernel. Errors:
        ``ConfigurationError`` if the tensors cannot be worked on."""
        flat = {name: each.detach().view(-1) for name, each in {"param": master, **state}.items()}
        with self.memory.stream(master) as stream:
            for start in range(0, master.numel(), PIECE):
                piece = slice(start, min(start + PIECE, master.numel()))
                brought = [placed(each, piece, master.device) for each in gradients]
                held = {name: self.memory.borrow(each[piece], stream) for name, each in flat.items()}
                there = [self.memory.borrow(each, stream) for each in brought]
                self.function(held.pop("param"), held, there, steps, stream=stream)


def placed(gradient: Gradient, piece: slice, device: torch.device) -> torch.Tensor:
    """Elements of a gradient on the device, dense, flat and in fp32."""
    if not isinstance(gradient, SparseGradient):
        return gradient.reshape(-1)[piece].to(device, torch.float32).contiguous()
    part = gradient.piece(piece.start, piece.stop)
    dense = torch.zeros(piece.stop - piece.start, device=device)
    dense[torch.from_numpy(part.indices.astype(np.int64)).to(device)] = torch.from_numpy(part.values.copy()).to(device)
    return dense


def device_replay_for(
    optimizer: ReplayableOptimizer[Any], setting: Setting, options: Sequence[Mapping[str, Any]]
) -> DeviceReplay | None:
    """The kernel for an optimizer that runs so on this process's device, over steps with these options of its groups.
    ``None``: there is none, and the log says why."""
    found = certified(optimizer, setting, tuple(sorted({beta for group in options for beta in optimizer.betas(group)})))
    return None if isinstance(found, str) else found


@cache
def certified(
    optimizer: ReplayableOptimizer[Any], setting: Setting, betas: tuple[float, ...], memory: DeviceMemory | None = None
) -> DeviceReplay | str:
    """The kernel, or why there is none; either is found once, and the log says which."""
    try:
        found = chosen(optimizer, setting, betas, memory or CudaMemory())
    except ConfigurationError as error:
        logger.info("the steps of %s are replayed by calling it: %s", optimizer.kind, error)
        return str(error)
    logger.info("the steps of %s are replayed by the kernel %s", optimizer.kind, found.name)
    return found


def chosen(
    optimizer: ReplayableOptimizer[Any], setting: Setting, betas: tuple[float, ...], memory: DeviceMemory
) -> DeviceReplay:
    """Errors: ``ConfigurationError``: no candidate has the optimizer's bits on the device."""
    device = setting.device
    trials = stand_in.trials_of(optimizer)
    try:
        expected = device_trials.outcomes_on_device(optimizer, setting.implementation, device, trials)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        raise ConfigurationError(f"the optimizer could not be tried on {device}: {error}") from error
    tried: list[str] = []
    for candidate in optimizer.candidates:
        if setting.implementation not in candidate.implementations:
            continue
        needed = {*betas, *(beta for trial in trials for beta in optimizer.betas(trial.options))}
        function = candidate.on_device(device_trials.powers_on_device(candidate, needed, device))
        replay = DeviceReplay(candidate.name, optimizer, function, memory)
        differing = stand_in.differing_values(outcomes_of(replay, trials, device), expected)
        if differing == 0:
            return replay
        tried.append(f"{candidate.name}: {differing}")
    raise ConfigurationError(f"no kernel has its bits on {device}; values that differ: {', '.join(tried) or 'none'}")


def outcomes_of(
    replay: DeviceReplay, trials: Sequence[Trial], device: str
) -> list[dict[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """What the kernel makes of each trial."""
    found = []
    for trial in trials:
        held = {name: torch.from_numpy(array.copy()).to(device) for name, array in trial.held.items()}
        first = trial.count + 1
        steps = [replay.optimizer.step(trial.options, first + index) for index in range(len(trial.gradients))]
        state = {name: each for name, each in held.items() if name != "param"}
        replay(held["param"], state, [torch.from_numpy(each.copy()) for each in trial.gradients], steps)
        found.append({name: each.cpu().numpy() for name, each in held.items()})
    return found
