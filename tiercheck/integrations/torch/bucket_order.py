"""The order in which DDP sums gradients, kept over a restart.

DDP reduces gradients in buckets. A process begins with one layout of them, and after its first iteration makes another
one, for good: by the order in which the gradients came. When three ranks or more add up, each layout rounds otherwise.
So the first step of a resumed process would not have the bits of the run that went on.

Hence the order is recorded in the first iteration, and is part of the state. A resumed process first runs DDP on a
stand-in for the model, whose gradients are zeros and come in that order; its next iteration has the layout that
the interrupted process had. That costs one reduction of all gradients a restart.

With ``gradient_as_bucket_view=True`` gradients lie in the buckets. One that is there already is divided by the number
of ranks; a new one is multiplied by the inverse of it, which rounds otherwise. So it is part of the state, too, whether
the loop keeps its gradients (``zero_grad(set_to_none=False)``): then the zeros of the stand-in stay.

A communication hook that looks at a bucket as a whole, as PowerSGD does, depends on the layout whatever the number of
ranks. It is called on the stand-in's zeros as on a first iteration: with its state as it was when the job attached,
which must be among what the job saves, and is as it was restored again after that.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.hooks import uncompiled
from tiercheck.integrations.torch.all_reduce import compressed_all_reduce
from tiercheck.integrations.torch.communication_hooks import BY_NUMBER, carries_over, hook_name, hooks_of
from tiercheck.streams.tensors.generators import random_state, restore_random_state

__all__ = ["BucketOrder"]

RANKS_MIN = 3
"""The sum of two numbers does not depend on their order."""


class BucketOrder:
    """Of every ``DistributedDataParallel`` in a model. Saved and restored as ``stateful`` are."""

    NAME = "tiercheck.bucket_order"

    def __init__(self, model: torch.nn.Module) -> None:
        wrapped = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._buckets = [_Buckets(each) for each in wrapped if depends_on_layout(each)]

    def note_states(self, given: Iterable[Any]) -> None:
        """Before anything is restored. ``given``: what else the job saves. Errors: ``UnsupportedSetup`` for a hook's
        state that cannot be had."""
        ids = {id(each) for each in given}
        for each in self._buckets:
            each.note_states(ids)

    @property
    def stateful(self) -> dict[str, BucketOrder]:
        """What the provider is to save."""
        return {self.NAME: self} if self._buckets else {}

    def state_dict(self) -> dict[str, Any]:
        return {"orders": [each.order for each in self._buckets], "kept": [each.keeps() for each in self._buckets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each, order in zip(self._buckets, state["orders"], strict=False):
            each.order = None if order is None else list(order)
        for each, kept in zip(self._buckets, state.get("kept", ()), strict=False):
            each.kept = kept is True

    def caveats(self) -> list[str]:
        """Why the next step has not the bits of an uninterrupted run; asked once the state is restored."""
        return [why for each in self._buckets if (why := each.why_another_order())]

    def prime(self) -> None:
        """Give DDP the order that was restored; if there is none, record it. Collective."""
        for each in self._buckets:
            each.prime()

    def remove(self) -> None:
        """Record nothing any more."""
        for each in self._buckets:
            each.remove()


def strange_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Its communication hooks that nobody knows to treat each number for itself, each with its state."""
    return [each for each in hooks_of(ddp) if each[0] not in BY_NUMBER]


def depends_on_layout(ddp: DistributedDataParallel) -> bool:
    """Whether the bits of its gradients may depend on its buckets, or on the order in which they are filled."""
    strange = any(hook is not compressed_all_reduce for hook, _ in strange_hooks(ddp))
    return strange or dist.get_world_size(ddp.process_group) >= RANKS_MIN


def layout_changes(ddp: DistributedDataParallel) -> bool:
    """Whether it has another layout after its first iteration, and that changes its gradients."""
    by_rank = [hook is compressed_all_reduce for hook, _ in strange_hooks(ddp)]  # it adds in the order of the ranks
    return (ddp.static_graph or not ddp.find_unused_parameters) and not (by_rank and all(by_rank))


class _Buckets:
    """Of one wrapper."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._unsaved = strange_hooks(ddp)
        self._states: list[tuple[Any, Any]] = []
        """The states of hooks that the job saves, each with what it was when the job attached."""
        self.order: list[str] | None = None
        """The parameters' names as their gradients came; ``None`` before the first iteration."""
        self.kept = False
        """The loop of the process whose version was restored kept its gradients."""
        self._primed = False
        self._ddp = ddp
        self._coming: list[str] = []
        self._handles: list[RemovableHandle] = []

    def note_states(self, saved: Collection[int]) -> None:
        """``saved``: the ids of what the job saves."""
        hooks = strange_hooks(self._ddp)
        self._unsaved = [(hook, state) for hook, state in hooks if id(state) not in saved]
        if layout_changes(self._ddp):
            self._states = [(state, now(state)) for _, state in hooks if id(state) in saved]

    def keeps(self) -> bool:
        """Whether there are gradients now, between two iterations, in the buckets; before they are put there, whether
        there will be: a process may die between its opening base and its first iteration."""
        if self.kept and not self._primed:
            return True
        return bool(self._ddp.gradient_as_bucket_view) and any(
            each.grad is not None for each in self._parameters().values()
        )

    def prime(self) -> None:
        self._primed = True
        if self.obstacle() is None:
            self._prepare()
        self._states.clear()

    def _prepare(self) -> None:
        if not layout_changes(self._ddp):
            if self.kept and not strange_hooks(self._ddp):
                self._run_stand_in([*self._parameters()])
        elif self.order is None or not self._is_of_these(self.order):
            self._record()
        elif not self._rebuilt():
            self._run_stand_in(self.order)

    def why_another_order(self) -> str | None:
        if not layout_changes(self._ddp) or self._rebuilt():
            return None
        obstacle = self.obstacle()
        if obstacle is None and self.order is not None and self._is_of_these(self.order):
            return None
        because = obstacle or "and in which order the interrupted process did was not recorded"
        if strange_hooks(self._ddp):
            return f"DDP puts the gradients of the first step after a restart into other buckets, {because}"
        return f"DDP sums the gradients of the first step after a restart in another order, {because}"

    def obstacle(self) -> str | None:
        """What may tell the stand-in from the model, or change by it."""
        ddp = self._ddp
        if ddp.static_graph:
            return "which static_graph=True leaves no way around; static_graph=False does"
        if ddp.mixed_precision is not None:
            return "which mixed_precision= leaves no way around; torch.autocast does"
        if self._unsaved:
            hook, state = self._unsaved[0]
            why = "whose state is not in stateful=" if carries_over(state) else "which may keep something unseen"
            return f"which the communication hook {hook_name(hook)}, {why}, leaves no way around"
        hooked = [name for name, each in self._parameters().items() if has_hooks(each) and not self._handles]
        if hooked:
            return f"which hooks on parameters, such as that on {hooked[0]}, leave no way around"
        return None

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _rebuilt(self) -> bool:
        """Whether this process has made its layout before."""
        return bool(getattr(self._ddp, "_has_rebuilt_buckets", False))

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        ignored = self._ddp.parameters_to_ignore
        return {
            name: each
            for name, each in self._ddp.module.named_parameters()
            if each.requires_grad and name not in ignored
        }

    def _is_of_these(self, order: Sequence[str]) -> bool:
        """Whether it names the parameters that are trained now: others may have been when it was saved."""
        return sorted(order) == sorted(self._parameters())

    def _record(self) -> None:
        self.order = None
        self._handles.append(self._ddp.register_forward_pre_hook(uncompiled(lambda module, args: self._coming.clear())))
        parameters: Mapping[str, Any] = self._parameters()  # torch's method has no types
        count = len(parameters)
        for name, each in parameters.items():
            self._handles.append(
                each.register_post_accumulate_grad_hook(uncompiled(lambda _, name=name: self._came(name, count)))
            )

    def _came(self, name: str, count: int) -> None:
        if not self._ddp.require_backward_grad_sync:
            return  # under no_sync nothing is reduced yet
        self._coming.append(name)
        if len(self._coming) == count:
            self.order = list(self._coming)
            self.remove()

    def _run_stand_in(self, order: Sequence[str]) -> None:
        ddp: Any = self._ddp  # nor has its forward
        parameters = self._parameters()
        gradients = {name: each.grad for name, each in parameters.items()}
        model = ddp.module
        generators = random_state()
        known = any(each is not None for each in gradients.values())  # which the loop kept; older versions do not tell
        for each in parameters.values():
            each.grad = None
        try:
            ddp.module = _InTurn([parameters[name] for name in order])
            ddp.require_forward_param_sync = False  # buffers are none of the stand-in's
            with torch.enable_grad(), self._as_attached():
                ddp.forward(torch.zeros((), device=parameters[order[0]].device)).backward()
        finally:
            ddp.module = model
            restore_random_state(generators)  # a hook may have drawn
            for name, each in parameters.items():
                if not self.kept or (known and gradients[name] is None):
                    each.grad = gradients[name]
                elif each.grad is not None:
                    each.grad.zero_()  # a hook may have made something else of zeros

    @contextmanager
    def _as_attached(self) -> Iterator[None]:
        """A context in which the hooks begin anew."""
        restored = [(state, now(state)) for state, _ in self._states]
        for state, attached in self._states:
            state.load_state_dict(attached)
        try:
            yield
        finally:
            for state, each in restored:
                state.load_state_dict(each)


def now(state: Any) -> Any:
    """What it is now: its own tensors change."""
    try:
        return copy.deepcopy(state.state_dict())
    except Exception as error:
        raise UnsupportedSetup(
            f"the state of DDP's communication hook ({type(state).__name__}) cannot be saved: its state_dict() failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def has_hooks(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class _InTurn(torch.nn.Module):
    """A stand-in for a model: gradients of zero, that come in the order of ``parameters``."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self._order = list(parameters)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        link: Any = _Link  # nor its apply
        for each in reversed(self._order):
            value = link.apply(value, each)
        return value


class _Link(torch.autograd.Function):
    """Hands a value on; on the way back the parameter's gradient comes before anything else."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (parameter,) = ctx.saved_tensors
        return gradient, torch.zeros_like(parameter)
