"""The state of a module and its optimizer, as a plain PyTorch loop has them, on one process or under DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tiercheck.errors import UnsupportedSetup
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.integrations.after_loss import AfterLoss
from tiercheck.integrations.torch.kept_gradients import KeptGradients
from tiercheck.integrations.torch.refused_parameters import refuse_parameters
from tiercheck.streams.tensors.bare_step import bare_step
from tiercheck.streams.tensors.beside import Beside, End
from tiercheck.streams.tensors.extra_state import ExtraState
from tiercheck.streams.tensors.group_options import GroupOptions, set_options
from tiercheck.streams.tensors.joint import AnyOptimizer, is_torchs_own, objects_held, parts_of
from tiercheck.streams.tensors.module_tensors import ModuleTensors
from tiercheck.streams.tensors.nested import flat, nested
from tiercheck.streams.tensors.own_state import OwnState
from tiercheck.streams.tensors.placing import copies, laid_out_as
from tiercheck.streams.tensors.provider import (
    Identity,
    OptimizerIdentity,
    check_shapes,
    copy_into,
    extras_of,
    loaded_value,
    whole_index,
)
from tiercheck.streams.tensors.subclasses import apart, whole
from tiercheck.streams.tensors.writes import Unmoved

__all__ = ["ModuleProvider"]

OTHER_PARAMETERS = "close the checkpointer, change the parameters, and attach again"
STEPS_SCHEDULER = "steps_scheduler"
"""In a host state that was translated: the iteration had still to step its scheduler."""


class ModuleProvider:
    """The state of a ``torch.nn.Module`` and its optimizer, on one process or under DDP.

    Masters are the parameters the optimizer updates, named as the module names them. Under DDP every rank
    holds, and saves, all of them.

    What else the loop holds is in ``beside``.
    """

    gathers = False
    """Whether a forward pass begins with a hook that gathers parameters: the iteration before ends ahead of that."""
    trains_on_compressed = False
    """Whether what was encoded is written into the gradients, for the optimizer's step to take."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: AnyOptimizer,
        *,
        beside: Beside | None = None,
    ) -> None:
        self._model = model
        self._tensors = ModuleTensors(model)
        self._optimizer = optimizer
        self.beside = beside or Beside()
        self.after_loss = AfterLoss()
        self.extra_state = ExtraState(model)
        self._own_state = OwnState(optimizer)
        self._options = GroupOptions(optimizer.param_groups)
        self._keeps_plain = all(map(is_torchs_own, parts_of(optimizer)))
        """Whether what it holds of a parameter is plain tensors and numbers, as torch's own do."""
        self._states = 0
        """How many there were when it was last seen whether the optimizer's state can be saved."""
        self._masters = masters_by_name(model, optimizer)
        self._parameter_ids = [id(parameter) for parameter in self._masters.values()]
        self.kept_gradients = KeptGradients(map(self._updated_by, parts_of(optimizer)))
        self._live = Unmoved()
        self._addresses: list[int] | None = None
        """Of the parameters when ``_live`` was made: while they stay, so do the tensors in it."""
        self._parameters_seen: Mapping[str, torch.Tensor] | None = None
        """The model's parameters when ``_untrained`` was made: it has others if it returns another object."""
        self._untrained: Mapping[str, torch.Tensor] = {}
        self._refuse_what_cannot_be_saved()

    def identity(self) -> Identity:
        return Identity.of("torch", self, self._optimizer_identity())

    def masters(self) -> Mapping[str, torch.Tensor]:
        addresses = [each.data_ptr() for each in self._masters.values()]
        if addresses != self._addresses:
            self._addresses = addresses
            self._live = Unmoved((name, each.detach()) for name, each in self._masters.items())
        return self._live

    def group_of(self) -> Mapping[str, int]:
        index = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        if absent := [name for name, tensor in self._masters.items() if id(tensor) not in index]:
            raise UnsupportedSetup(f"the optimizer does not update {absent[0]} any more: {OTHER_PARAMETERS}")
        return {name: index[id(tensor)] for name, tensor in self._masters.items()}

    def updated_by(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """The masters of one of several optimizers."""
        return frozenset(self._updated_by(optimizer))

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
        updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return {name: each for name, each in self._masters.items() if id(each) in updated}

    def gradient_dtypes(self) -> Mapping[str, torch.dtype]:
        return {}

    def tell_of_forward(self, begins: Callable[[], None]) -> bool:
        return False

    def steps_together(self) -> bool:
        return False

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        state = self._optimizer.state
        return {name: self._in_plain(name, state[each]) for name, each in self._masters.items() if state.get(each)}

    def held_by_optimizer(self) -> Sequence[Any] | None:
        return objects_held(self._optimizer)

    def _in_plain(self, master: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank holds of the optimizer's state of a master, in plain tensors and values."""
        if self._keeps_plain:
            return self.held_here(master, dict(state))
        return apart(self.held_here(master, flat(state)), master)

    def _as_kept(self, state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """The inverse: as the optimizer keeps it."""
        here = self.local(parameter, parameter, "the parameter")
        placed = {
            key: self.placed(laid_out_as(here, value), parameter) if isinstance(value, torch.Tensor) else value
            for key, value in (state if self._keeps_plain else whole(state)).items()
        }
        return placed if self._keeps_plain else nested(placed)

    def held_here(self, master: str, state: dict[str, Any]) -> dict[str, Any]:
        """What this rank holds of the optimizer's state of a master."""
        return state

    def frozen(self) -> Mapping[str, torch.Tensor]:
        parameters = self._tensors.parameters()
        if parameters is not self._parameters_seen:
            self._parameters_seen, self._untrained = parameters, self._tensors.others(self._masters.values())
        return {name: tensor.detach() for name, tensor in self._untrained.items()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._tensors.buffers()

    def index(self) -> LogicalIndex:
        """Every rank has all tensors whole."""
        return whole_index(self, self._tensors.model_name, self._tensors.aliases())

    def hyperparameters(self) -> list[dict[str, Any]]:
        return self._own_state.added_to(self._options.plain(self._optimizer.param_groups))

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients the coming step will apply; parameters without one are left out.

        Errors: ``UnsupportedSetup`` for a sparse gradient, and where the optimizer's parameters are not those that
        were there when the provider was made.
        """
        groups = self._optimizer.param_groups
        if [*map(id, chain.from_iterable(group["params"] for group in groups))] != self._parameter_ids:
            raise UnsupportedSetup(
                f"the optimizer's parameters have changed since attach, and the new ones would not be saved: "
                f"{OTHER_PARAMETERS}"
            )
        found = {name: grad for name, each in self._masters.items() if (grad := each.grad) is not None}
        layouts = [each.layout for each in found.values()]
        if layouts.count(torch.strided) < len(layouts):
            name = next(name for name, each in found.items() if each.layout is not torch.strided)
            raise UnsupportedSetup(
                f"the gradient of {name} is {found[name].layout}; supported are dense gradients "
                "(for an embedding: sparse=False)"
            )
        return self.local_gradients(found)

    def local_gradients(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank holds of gradients, live."""
        if True not in [each.requires_grad for each in gradients.values()]:  # as a rule
            return gradients
        return {name: each.detach() for name, each in gradients.items()}

    def local(self, tensor: torch.Tensor, parameter: torch.Tensor, what: str) -> torch.Tensor:
        """What this rank holds of a parameter, or of its gradient, live."""
        return tensor.detach()

    def placed(self, local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`local`, also for what the optimizer holds of a parameter."""
        return local

    def end_of_step(self) -> None:
        self._own_state.look()
        if (states := len(self._optimizer.state)) != self._states:  # those that the first step makes, as a rule
            self._states = states
            self.optimizer_state()
        self.beside.end_of_step()

    def end_of_iteration(self, end: End) -> None:
        self.beside.end_of_iteration(end)

    def published(self) -> None:
        self.beside.published()

    def host_state(self) -> dict[str, Any]:
        beside = self.beside.host_state() | self.extra_state.host_state() | self.after_loss.host_state()
        return {"options": self.hyperparameters(), **beside, **self.kept_gradients.host_state()}

    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        check_shapes(self.masters(), masters)
        copy_into(extras_of(self), extras)
        copy_into(self.masters(), masters)
        group_of = self.group_of()
        for name, parameter in self._masters.items():
            options = self._optimizer.param_groups[group_of[name]]
            current = self._in_plain(name, self._optimizer.state.pop(parameter, {}))
            loaded = {
                key: loaded_value(current.get(key), value, options, parameter.device)
                for key, value in optimizer_state.get(name, {}).items()
            }
            if name in optimizer_state:
                self._optimizer.state[parameter] = self._as_kept(loaded, parameter)
        self._set_hyperparameters(hyperparameters)

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        self._set_hyperparameters(hyperparameters)
        copied = copies(gradients, self.masters())
        for name, parameter in self._masters.items():
            parameter.grad = self.placed(copied[name], parameter) if name in copied else None
        del copied
        bare_step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)

    def refresh(self) -> None:
        """Nothing derives from the parameters of a plain module."""

    def translated_host_state(self, state: Mapping[str, Any], version: int) -> dict[str, Any]:
        """DeepSpeed's engine holds the scheduler, and steps it behind what a version may be saved with."""
        if (engines := state.get("scheduler")) is None:
            return dict(state)
        after_step = {**state["after_step"], "scheduler": engines["state"]}
        return {**state, "after_step": after_step, STEPS_SCHEDULER: engines["steps"]}

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        self.beside.restore(state)
        self._set_hyperparameters(state["options"])
        if state.get(STEPS_SCHEDULER):
            self.beside.step("scheduler")
        self.extra_state.restore(state)
        self.after_loss.restore(state)
        self.kept_gradients.restore(state)
        self.beside.restore_generators(state)

    def _optimizer_identity(self) -> OptimizerIdentity:
        return OptimizerIdentity.of(self._optimizer, next(iter(self._masters.values())).device)

    def _set_hyperparameters(self, hyperparameters: list[dict[str, Any]]) -> None:
        taken = self._own_state.taken_from(hyperparameters)
        for group, options in zip(self._optimizer.param_groups, taken, strict=True):
            set_options(group, options)

    def _refuse_what_cannot_be_saved(self) -> None:
        if lazy := [name for name, each in self._model.named_parameters() if is_lazy(each)]:
            raise UnsupportedSetup(
                f"{lazy[0]} has no shape yet (a lazy module): run the model once, and then make the optimizer"
            )
        updated = set(self._parameter_ids)
        others = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and id(parameter) not in updated
        ]
        if others:
            raise UnsupportedSetup(
                f"{len(others)} trainable parameters are not updated by the attached optimizer "
                f"({', '.join(others[:3])}): attach all optimizers, as [one, other], and set requires_grad to False on "
                "what is not trained"
            )
        if not self._masters:
            raise UnsupportedSetup("the optimizer updates no parameter, so there is nothing to save")
        for name, tensor in {**self.masters(), **extras_of(self)}.items():
            if type(tensor.data) is not torch.Tensor:
                raise UnsupportedSetup(
                    f"{name} is a {type(tensor.data).__name__}; supported are plain tensors, on one process, under "
                    "DDP, under fully_shard (FSDP2), or partitioned by DeepSpeed (tiercheck.integrations.deepspeed)"
                )
            if tensor.is_meta:
                raise UnsupportedSetup(f"{name} is on the meta device: materialise the model before attach")
        refuse_parameters(self._masters, self.masters(), self._optimizer.param_groups)


def masters_by_name(model: torch.nn.Module, optimizer: AnyOptimizer) -> dict[str, torch.nn.Parameter]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masters: dict[str, torch.nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            masters[names.get(id(parameter), f"optimizer.{index}.{position}")] = parameter
    return masters
