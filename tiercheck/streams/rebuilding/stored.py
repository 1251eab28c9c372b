"""A rank's state made of what a base holds, without the model and the job that wrote it.

The tensors are the base's own, copied. Differentials are replayed on them as in a job: by a kernel where one is
certified in this process, else by calling an optimizer of the class that took the steps, built over these tensors with
the options that were saved. A class is never imported because a file names it: it is one of torch's, or one that an
installed distribution has registered (``tiercheck.optimizers``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tiercheck.errors import ConfigurationError, Corruption, Mismatch
from tiercheck.format.container import Shard
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.optimizers.certification import class_of
from tiercheck.streams.optimizers.optimizer import ReplayableOptimizer
from tiercheck.streams.optimizers.registry import find_optimizer
from tiercheck.streams.records.base import BaseState, read_base
from tiercheck.streams.records.expected import Expected
from tiercheck.streams.replay.kernel_selection import kernel_for, stand_in_replay
from tiercheck.streams.replay.runs import Step
from tiercheck.streams.state import MakeRuns, Rebuilt
from tiercheck.streams.tensors.as_bytes import is_given
from tiercheck.streams.tensors.bare_step import bare_step
from tiercheck.streams.tensors.group_options import set_options, tensor_options
from tiercheck.streams.tensors.joint import AnyOptimizer, JointOptimizer, kinds_in, qualified
from tiercheck.streams.tensors.placing import copies
from tiercheck.streams.tensors.provider import (
    Identity,
    OptimizerIdentity,
    StateProvider,
    copy_into,
)
from tiercheck.streams.tensors.tensor_state import TensorReader

__all__ = ["StoredReader", "StoredState", "check_replayable", "optimizer_class"]

HOST = torch.device("cpu")
WHOLE_TENSORS = "fsdp"
"""The framework under which an optimizer steps on whole tensors, each rank on its part. If it is not known to be
element-wise, as those are that have a kernel, a rank's part of a step says nothing without the others'."""


@cache
def torch_optimizers() -> Mapping[str, type[torch.optim.Optimizer]]:
    """The classes that ``torch.optim`` offers, by qualified name."""
    found = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    return {qualified(each): each for each in found if issubclass(each, torch.optim.Optimizer)}


def optimizer_class(kind: str) -> type[torch.optim.Optimizer]:
    """The optimizer of this qualified name. Errors: ``ConfigurationError`` if it is neither torch's nor registered."""
    if kind in torch_optimizers():
        return torch_optimizers()[kind]
    if find_optimizer(kind) is None:
        raise ConfigurationError(
            f"the steps were taken by {kind}, which is neither torch's nor registered here (entry-point group "
            "tiercheck.optimizers): they cannot be replayed without the training code, and only bases can be read"
        )
    return class_of(kind)


def made_of(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Errors: ``ConfigurationError``, as :func:`optimizer_class`; ``Mismatch`` if it does not take the groups."""
    make: Any = optimizer_class(kind)
    try:
        made: torch.optim.Optimizer = make(groups)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Mismatch(f"{kind} cannot be made with the options that were saved: {error}") from error
    return made


def check_replayable(identity: Identity) -> None:
    """Whether a rank's steps can be replayed apart from the job. Errors: ``ConfigurationError``."""
    for kind, _ in kinds_in(identity.optimizer.kind):
        if find_optimizer(kind) is None and identity.framework.startswith(WHOLE_TENSORS):
            raise ConfigurationError(
                f"the steps were taken by {kind} on tensors that lie on several ranks (FSDP2), and it is not "
                "registered as one that is element-wise (entry-point group tiercheck.optimizers): a rank's part of a "
                "step cannot be replayed by itself, and only bases can be read"
            )
        optimizer_class(kind)


def on_host(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what torch refuses on the host: steps that a CUDA graph may capture, and an ``lr`` that is a tensor for
    others that take all tensors at once."""
    if not options.get("capturable"):
        return dict(options)
    return {**options, "capturable": False, **({"foreach": False} if tensor_options(options) else {})}


def kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_given(tensor) else tensor.clone()


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())


class StoredState(StateProvider):
    """The state that :meth:`load` was given, on the host. ``saved``, ``group_of``: of the base."""

    def __init__(
        self, saved: Identity | None, group_of: Mapping[str, int], *, index: LogicalIndex | None = None
    ) -> None:
        self._identity = saved
        self._index = index
        self._group_of = dict(group_of)
        self._masters: dict[str, torch.nn.Parameter] = {}
        self._extras: dict[str, torch.Tensor] = {}
        self._states: dict[str, dict[str, Any]] = {}
        """By master; it is moved to the optimizer when that is made."""
        self._options: list[dict[str, Any]] = []
        self._optimizer: AnyOptimizer | None = None
        self._host_state: Mapping[str, Any] = {}
        self._called = False
        """Whether an optimizer here took a step that another device's had taken."""

    @property
    def _saved(self) -> Identity:
        assert self._identity is not None, "a state was loaded"
        return self._identity

    def identity(self) -> Identity:
        """The saved one, with the optimizer as it runs here; where that cannot be had, nothing can be replayed. If a
        kernel here stands in for an optimizer that ran on a GPU, the steps are that one's."""
        if self._stands_in:
            return self._saved
        try:
            return replace(self._saved, optimizer=OptimizerIdentity.of(self.optimizer, HOST))
        except ConfigurationError:
            return self._saved

    @property
    def _stands_in(self) -> bool:
        """Whether all steps so far had the bits of the optimizer on its GPU, and further ones can have."""
        saved = self._saved.optimizer
        return not self._called and stand_in_replay(find_optimizer(saved.kind), saved) is not None

    @property
    def optimizer(self) -> AnyOptimizer:
        """Made when it is first asked for. Errors: ``ConfigurationError``, as :func:`optimizer_class`; ``Mismatch`` if
        a class does not take the saved options."""
        if self._optimizer is None:
            groups: list[dict[str, Any]] = [{"params": []} for _ in self._options]
            for group, options in zip(groups, self._options, strict=True):
                set_options(group, on_host(options))
            for name, master in self._masters.items():
                groups[self._group_of[name]]["params"].append(master)
            parts, start = [], 0
            for kind, count in kinds_in(self._saved.optimizer.kind):
                stop = len(groups) if count is None else start + count
                parts.append(made_of(kind, groups[start:stop]))
                start = stop
            made: AnyOptimizer = parts[0] if len(parts) == 1 else JointOptimizer(parts)
            for name, state in self._states.items():
                made.state[self._masters[name]] = state
            self._optimizer = made
        return self._optimizer

    def index(self) -> LogicalIndex:
        return self._index or super().index()

    def copy_all(self) -> None:
        """Have memory of its own for all that an optimizer updates."""
        self._states = {
            name: {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in held.items()}
            for name, held in self.optimizer_state().items()
        }
        self._masters = {name: as_parameter(each.detach().clone()) for name, each in self._masters.items()}
        self._optimizer = None

    def take_options(self, options: list[dict[str, Any]]) -> None:
        """Those at the end of the version."""
        self._options = options

    def masters(self) -> Mapping[str, torch.Tensor]:
        return {name: master.detach() for name, master in self._masters.items()}

    def group_of(self) -> Mapping[str, int]:
        return self._group_of

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        if self._optimizer is None:
            return self._states
        held = self._optimizer.state
        return {name: dict(held[master]) for name, master in self._masters.items() if held.get(master)}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Frozen parameters, too: a base does not tell them apart."""
        return self._extras

    def hyperparameters(self) -> list[dict[str, Any]]:
        return self._options

    def host_state(self) -> dict[str, Any]:
        return dict(self._host_state)

    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        if self._masters:
            copy_into(self.masters(), masters)
        else:
            self._masters = {name: as_parameter(kept(each)) for name, each in masters.items()}
        self._extras = {name: kept(each) for name, each in extras.items()}
        self._states = {
            name: {key: kept(each) if isinstance(each, torch.Tensor) else each for key, each in held.items()}
            for name, held in optimizer_state.items()
        }
        self._options = [dict(options) for options in hyperparameters]
        self._optimizer = None

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        check_replayable(self._saved)
        if self._stands_in and self._step_by_stand_in(gradients, hyperparameters):
            return
        self._called = True
        optimizer = self.optimizer
        for group, options in zip(optimizer.param_groups, hyperparameters, strict=True):
            set_options(group, on_host(options))
        self._options = [dict(options) for options in hyperparameters]
        copied = copies(gradients, self._masters)
        for name, master in self._masters.items():
            master.grad = copied[name].view_as(master) if name in copied else None
        del copied
        bare_step(optimizer)
        optimizer.zero_grad(set_to_none=True)

    def _step_by_stand_in(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> bool:
        """Take the step by the kernel that stands in, which begins with moments of zeros. Whether it could."""
        replayable = find_optimizer(self._saved.optimizer.kind)
        assert replayable is not None, "something stands in for it"
        before = self._options, dict(self._states)
        self._options = [dict(options) for options in hyperparameters]
        step = Step(0, self._options, gradients)
        for name in gradients:
            options = self._options[self._group_of[name]]
            if name not in self._states and replayable.why_called(options) is None:
                self._states[name] = first_state(replayable, options, self._masters[name])
        kernel = kernel_for(self, [step])
        if kernel is None:
            self._options, self._states = before
            return False
        kernel(self, [step], threads=1)
        return True

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        self._host_state = state


def first_state(
    replayable: ReplayableOptimizer[Any], options: Mapping[str, Any], master: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What an optimizer with candidates holds for a parameter before its first step: a count, and zeros."""
    zeros = {name: torch.zeros_like(master) for name in replayable.needs(replayable.step(options, 1))}
    counted = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32  # as torch's own are
    counter = torch.zeros((), dtype=counted, device="cpu")
    return {**({} if replayable.counter is None else {replayable.counter: counter}), **zeros}


class StoredReader(TensorReader):
    """Reads shards without a live state, and makes of them :attr:`state`. ``threads``: as of :class:`TensorReader`."""

    def __init__(self, *, threads: int | None = None) -> None:
        self.state = StoredState(None, {})
        """What was rebuilt last."""
        super().__init__(self.state, threads=threads)

    def expect(self) -> None:
        """There is no live state to compare with."""

    def base(self, shard: Shard, constants: Shard | None, *, tier: str, places: str) -> BaseState:
        return self._checked(read_base(shard, constants, tier=tier), tier)

    def base_alone(self, shard: Shard, *, tier: str) -> BaseState:
        """Without the constants that it refers to: see :func:`~tiercheck.streams.records.base.read_base`."""
        return self._checked(read_base(shard, tier=tier, alone=True), tier)

    def _checked(self, base: BaseState, tier: str) -> BaseState:
        self._expected = Expected.of_base(base)
        self._expected.check_base(base)
        if base.masters.keys() != base.group_of.keys() or max(base.group_of.values(), default=0) >= len(
            base.hyperparameters
        ):
            raise Corruption("its trained tensors are in parameter groups that it has no options of", tier=tier)
        return base

    async def rebuild(self, base: BaseState, start: BaseState, make: MakeRuns, scheduler: Scheduler) -> Rebuilt:
        self._provider = self.state = StoredState(base.identity, base.group_of)
        rebuilt = await super().rebuild(base, start, make, scheduler)
        self.state.restore_host_state(rebuilt.host_state)
        return rebuilt
