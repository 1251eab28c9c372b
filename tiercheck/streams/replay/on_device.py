"""Steps replayed by a kernel of the GPU on which the optimizer steps, where its state lies.

The kernel is one of the optimizer's candidates. It is taken after it had the optimizer's bits on this process's device,
in trials that no two candidates pass with the same bits. If none has, or CuPy is not installed, the optimizer is
called.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import HalfGradient, SparseGradient
from tiercheck.kernels.gpu_adam import Powers
from tiercheck.streams.optimizers.optimizer import Candidate, OnDevice, ReplayableOptimizer, Trial
from tiercheck.streams.optimizers.replay import Setting
from tiercheck.streams.optimizers.stand_in import Choice, Outcome, trials_of, with_its_bits
from tiercheck.streams.replay.runs import Gradient, wide

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
    if isinstance(gradient, HalfGradient):
        return wide(gradient.piece(piece.start, piece.stop)).to(device)
    if not isinstance(gradient, SparseGradient):
        return gradient.reshape(-1)[piece].to(device, torch.float32).contiguous()
    part = gradient.piece(piece.start, piece.stop)
    dense = torch.zeros(piece.stop - piece.start, dtype=torch.float32, device=device)
    dense[torch.from_numpy(part.indices.astype(np.int64)).to(device)] = torch.from_numpy(part.values.copy()).to(device)
    return dense


def device_replay_for(
    optimizer: ReplayableOptimizer[Any], setting: Setting, options: Sequence[Mapping[str, Any]]
) -> DeviceReplay | None:
    """The kernel for an optimizer that runs so on this process's device, over steps with these options of its groups.
    ``None``: there is none, and the log says why."""
    found = certified(optimizer, setting)
    if isinstance(found, str):
        return None
    betas = {beta for group in options for beta in optimizer.betas(group)}
    try:
        return with_betas(optimizer, found, betas, setting.device)
    except ConfigurationError as error:  # a beta with too many powers
        logger.info("steps of %s are replayed by calling it: %s", optimizer.kind, error)
        return None


@cache
def certified(
    optimizer: ReplayableOptimizer[Any], setting: Setting, memory: DeviceMemory | None = None
) -> Choice | str:
    """The candidate that has the optimizer's bits, or why there is none. Either is found once, and the log says it."""
    here = memory or CudaMemory()

    def on_device(candidate: Candidate, powers: Powers) -> list[Outcome]:
        replay = DeviceReplay(candidate.name, optimizer, candidate.on_device(powers), here)
        return outcomes_of(replay, trials_of(optimizer), setting.device)

    refusal = "no kernel has its bits"
    try:
        found = with_its_bits(optimizer, setting.implementation, (), setting.device, on_device, refusal=refusal)
    except ConfigurationError as error:
        logger.info("the steps of %s are replayed by calling it: %s", optimizer.kind, error)
        return str(error)
    logger.info("the steps of %s are replayed by the kernel %s", optimizer.kind, found.candidate.name)
    return found


def with_betas(
    optimizer: ReplayableOptimizer[Any],
    choice: Choice,
    betas: Collection[float],
    device: str,
    memory: DeviceMemory | None = None,
) -> DeviceReplay:
    """The kernel, for steps with these betas: a schedule may bring others at each step."""
    powers = powers_of(choice.candidate, frozenset(betas), device)
    name, function = choice.candidate.name, choice.candidate.on_device(powers)
    return DeviceReplay(name, optimizer, function, memory or CudaMemory())


@lru_cache(maxsize=64)
def powers_of(candidate: Candidate, betas: frozenset[float], device: str) -> Powers:
    from tiercheck.streams.optimizers.device_trials import powers_on_device

    return powers_on_device(candidate, betas, device)


def outcomes_of(replay: DeviceReplay, trials: Sequence[Trial], device: str) -> list[Outcome]:
    """What the kernel makes of each trial."""
    found: list[Outcome] = []
    for trial in trials:
        held = {name: torch.from_numpy(array.copy()).to(device) for name, array in trial.held.items()}
        first = trial.count + 1
        steps = [replay.optimizer.step(trial.options, first + index) for index in range(len(trial.gradients))]
        state = {name: each for name, each in held.items() if name != "param"}
        replay(held["param"], state, [torch.from_numpy(each.copy()) for each in trial.gradients], steps)
        found.append({name: each.cpu().numpy() for name, each in held.items()})
    return found
