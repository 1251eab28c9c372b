"""Steps replayed by a kernel, in place: whether one can stand for the optimizer over these steps, and its state.

A kernel is taken only if it was certified to give the very bits of the optimizer that took the steps, or if the
caller asks for less. If none is, the optimizer is called: so for the first step of a tensor, which makes its state.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import HalfGradient, SparseGradient
from tiercheck.kernels.threads import PIECE_MIN
from tiercheck.kernels.threads import run as on_threads
from tiercheck.streams.optimizers.optimizer import Array, ReplayableOptimizer
from tiercheck.streams.optimizers.registry import find_optimizer
from tiercheck.streams.optimizers.replay import Replay, Setting, is_ready, replay_for
from tiercheck.streams.optimizers.stand_in import certified_function
from tiercheck.streams.replay.on_device import DeviceReplay, device_replay_for
from tiercheck.streams.replay.runs import Gradient, Step
from tiercheck.streams.tensors.provider import OptimizerIdentity, StateProvider

__all__ = [
    "InPlace",
    "OnDevice",
    "Tensor",
    "is_certified",
    "is_kernel_ready",
    "kernel_for",
    "stand_in_replay",
    "stepped_tensors",
]

logger = logging.getLogger(__name__)

HOST = "cpu"


@dataclass(frozen=True)
class InPlace:
    """A kernel for one optimizer, fed from a provider's state."""

    replay: Replay

    @property
    def exact(self) -> bool:
        """Whether it gives the bits of the optimizer."""
        return self.replay.exact

    def __call__(self, provider: StateProvider, steps: Sequence[Step], *, threads: int) -> None:
        """Apply the steps to the state, on at most ``threads`` threads: they share a long tensor, and take others one
        each."""
        small: deque[Tensor] = deque()
        for each in stepped_tensors(provider, steps):
            if each.master.numel() < 2 * PIECE_MIN:  # which threads do not share
                small.append(each)
            else:
                self.apply(each, threads)

        def drain(_: slice) -> None:
            while True:
                try:
                    each = small.popleft()
                except IndexError:
                    return
                self.apply(each, 1)

        on_threads(drain, [slice(0)] * max(1, min(threads, len(small))))

    def apply(self, each: Tensor, threads: int) -> None:
        """Apply its steps to one tensor."""
        optimizer = self.replay.optimizer
        scalars = each.scalars(optimizer)
        state = {name: each.held[name].numpy() for name in optimizer.needs(scalars[0])}
        gradients = [array_of_gradient(step.gradients[each.name]) for step in each.steps]
        self.replay(each.master.numpy(), state, gradients, scalars, threads=threads)
        if optimizer.counter is not None:
            each.held[optimizer.counter].add_(len(scalars))


@dataclass(frozen=True)
class OnDevice:
    """A kernel of the GPU on which the optimizer steps, fed from a provider's state there."""

    replay: DeviceReplay
    exact = True

    def __call__(self, provider: StateProvider, steps: Sequence[Step], *, threads: int) -> None:
        """Apply the steps to the state. ``threads`` of the host are not needed."""
        for each in stepped_tensors(provider, steps):
            self.apply(each, threads)

    def apply(self, each: Tensor, threads: int) -> None:
        """Apply its steps to one tensor. What the device computes is ordered behind what torch's current stream has."""
        optimizer = self.replay.optimizer
        scalars = each.scalars(optimizer)
        state = {name: each.held[name] for name in optimizer.needs(scalars[0])}
        self.replay(each.master, state, [step.gradients[each.name] for step in each.steps], scalars)
        if optimizer.counter is not None:
            each.held[optimizer.counter].add_(len(scalars))


@dataclass(frozen=True)
class Tensor:
    """A master that has a gradient in some of the steps: those steps, their options, and its state."""

    name: str
    master: torch.Tensor
    held: Mapping[str, Any]
    steps: Sequence[Step]
    options: Sequence[Mapping[str, Any]]

    def parts(self, steps_max: int) -> Iterator[Tensor]:
        """The same with so many of its steps at a time, in their order."""
        for at in range(0, len(self.steps), steps_max):
            piece = slice(at, at + steps_max)
            yield replace(self, steps=self.steps[piece], options=self.options[piece])

    def steps_so_far(self, optimizer: ReplayableOptimizer[Any]) -> int:
        """Of an optimizer that counts none, one: the first is never replayed by a kernel if it makes state."""
        return 1 if optimizer.counter is None else int(self.held[optimizer.counter])

    def scalars(self, optimizer: ReplayableOptimizer[Any]) -> list[Any]:
        """Those of its steps."""
        counted = self.steps_so_far(optimizer)
        return [
            optimizer.step(options, min(2, counted + index) if optimizer.counter is None else counted + index)
            for index, options in enumerate(self.options, start=1)
        ]

    def is_taken(self, optimizer: ReplayableOptimizer[Any], device: str, first: int = 1) -> bool:
        """Whether its state is there, lies on ``device`` as fp32, and is what each of the steps works on. ``first``:
        how many steps the tensor must have had."""
        known = {*optimizer.state, *filter(None, [optimizer.counter])}
        if self.held.keys() - known:
            return False
        if optimizer.counter is not None:
            count = self.held.get(optimizer.counter)
            if not isinstance(count, torch.Tensor) or int(count) < first:
                return False
        needed = {optimizer.needs(optimizer.step(options, 2)) for options in self.options}
        if len(needed) > 1:
            return False
        state = [self.held.get(name) for name in next(iter(needed))]
        return all(
            isinstance(t, torch.Tensor)
            and t.dtype is torch.float32
            and t.device.type == device
            and t.is_contiguous()
            and t.numel() == self.master.numel()
            for t in (self.master, *state)
        )


def stepped_tensors(provider: StateProvider, steps: Sequence[Step]) -> Iterator[Tensor]:
    state, group_of = provider.optimizer_state(), provider.group_of()
    for name, master in provider.masters().items():
        taken = [step for step in steps if name in step.gradients]
        if taken:
            options = [step.hyperparameters[group_of[name]] for step in taken]
            yield Tensor(name, master, state.get(name, {}), taken, options)


def kernel_for(provider: StateProvider, steps: Sequence[Step], *, exact: bool = True) -> InPlace | OnDevice | None:
    """The kernel that can stand for the optimizer over these steps, or ``None``: call the optimizer.

    ``exact=False``: one that is not exact, where it is the faster one: for Adam over sparse gradients. Errors:
    ``ConfigurationError`` if that cannot be had.
    """
    optimizer = find_optimizer(provider.identity().optimizer.kind)
    if optimizer is None:
        return None
    device = provider.identity().optimizer.device
    now = [how_it_runs(group, device) for group in provider.hyperparameters()]
    setting = setting_of(provider)
    if setting is None or any([how_it_runs(group, device) for group in step.hyperparameters] != now for step in steps):
        return None  # the optimizer was told to run otherwise in between, which rounds otherwise
    if any(optimizer.why_called(group) for step in steps for group in step.hyperparameters):
        return None
    tensors = list(stepped_tensors(provider, steps))
    where = {each.master.device.type for each in tensors} or {HOST}
    if len(where) != 1:
        return None
    place = where.pop()
    stands_in = device != HOST and place == HOST
    if not all(each.is_taken(optimizer, place, first=0 if stands_in else 1) for each in tensors):
        return None
    if stands_in:
        return stand_in_for(optimizer, provider.identity().optimizer, steps)
    if place != HOST:
        found = device_replay_for(optimizer, setting, [group for step in steps for group in step.hyperparameters])
        return None if found is None else OnDevice(found)
    approximate = not exact and optimizer.approximation() is not None and has_sparse(steps)
    replay = replay_for(optimizer, setting, exact=not approximate)
    return None if replay is None else InPlace(replay)


def stand_in_for(
    optimizer: ReplayableOptimizer[Any], identity: OptimizerIdentity, steps: Sequence[Step]
) -> InPlace | None:
    """The kernel on the host that has the bits of an optimizer that stepped elsewhere."""
    replay = stand_in_replay(optimizer, identity)
    if replay is None or identity.stand_in is None:
        return None
    powers = identity.stand_in.powers.tables
    options = [group for step in steps for group in step.hyperparameters]
    if powers and any(beta not in powers for group in options for beta in optimizer.betas(group)):
        return None  # a beta that was not among those at attach
    return InPlace(replay)


def stand_in_replay(optimizer: ReplayableOptimizer[Any] | None, identity: OptimizerIdentity) -> Replay | None:
    """The stand-in that a base names, certified in this process; ``None``: there is none."""
    if optimizer is None or identity.stand_in is None:
        return None
    try:
        function = certified_function(optimizer, identity.stand_in)
    except ConfigurationError as error:
        logger.warning("the steps of %s on a GPU cannot be replayed here: %s", identity.kind, error)
        return None
    return Replay(identity.stand_in.candidate, optimizer, identity.implementation, function)


def has_sparse(steps: Sequence[Step]) -> bool:
    return any(isinstance(each, SparseGradient) for step in steps for each in step.gradients.values())


def is_certified(saved: OptimizerIdentity, options: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a kernel is certified in this process for this optimizer with these options of its groups. The first time
    that takes seconds: kernels are compiled, and tried."""
    optimizer, setting = find_optimizer(saved.kind), setting_by(saved, options)
    if optimizer is None or setting is None or any(optimizer.why_called(group) for group in options):
        return False
    if saved.device != HOST:
        return stand_in_replay(optimizer, saved) is not None
    return replay_for(optimizer, setting) is not None


def is_kernel_ready(provider: StateProvider) -> bool:
    """Whether a kernel was certified before for the provider's optimizer as it runs now: :func:`kernel_for` takes no
    time."""
    setting = setting_of(provider)
    return setting is not None and is_ready(provider.identity().optimizer.kind, setting)


def setting_of(provider: StateProvider) -> Setting | None:
    """How the provider's optimizer runs now; ``None`` if its parameter groups run in several ways."""
    return setting_by(provider.identity().optimizer, provider.hyperparameters())


def setting_by(optimizer: OptimizerIdentity, options: Sequence[Mapping[str, Any]]) -> Setting | None:
    implementations = {how_it_runs(group, optimizer.device) for group in options}
    if len(implementations) != 1:
        return None
    return Setting(implementations.pop(), optimizer.torch_version, optimizer.instruction_set, optimizer.device)


def how_it_runs(group: Mapping[str, Any], device: str = HOST) -> str:
    """Which of torch's implementations a parameter group's options choose on a device."""
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    return "foreach" if foreach or (foreach is None and device != HOST) else "single_tensor"


def array_of_gradient(gradient: Gradient) -> Array | SparseGradient | HalfGradient:
    if not isinstance(gradient, torch.Tensor):
        return gradient
    return gradient.to(torch.float32).contiguous().numpy()
