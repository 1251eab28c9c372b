"""Where the state of a rank comes from and goes back to.

A provider is the only thing that knows how a framework lays out its training state. The streams read it
through this protocol, and recovery writes it back through the same. Tensors are handed out *live*: what
:meth:`StateProvider.masters` returns is the memory the optimizer updates, so a capture must be done before
the next step, and a replay in place needs no copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tiercheck.errors import Mismatch, UnsupportedSetup
from tiercheck.streams.beside import Beside, End
from tiercheck.streams.module_tensors import ModuleTensors
from tiercheck.streams.replay.libraries import library_of
from tiercheck.streams.storable import PLAIN, to_plain

__all__ = ["Identity", "ModuleProvider", "OptimizerIdentity", "StateProvider"]


@dataclass(frozen=True)
class OptimizerIdentity:
    """What must be equal for a replay to be bit for bit the original step.

    ``implementation`` is ``single_tensor``, ``foreach`` or ``fused`` for torch's Adam and AdamW, and
    ``called`` for any other, which is replayed by calling it.
    """

    kind: str
    implementation: str
    torch_version: str
    instruction_set: str
    device: str
    library: str = ""
    """Where the optimizer is not torch's own: whose it is, and a digest of its code
    (:mod:`tiercheck.streams.replay.libraries`)."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerIdentity:
        kind: type = type(optimizer)
        return cls(
            kind=f"{kind.__module__}.{kind.__qualname__}",
            implementation=implementation_of(optimizer, device),
            torch_version=str(torch.__version__),
            instruction_set=torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device_name(device),
            device=device.type,
            library=library_of(kind),
        )


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must agree on with the job that loads it."""

    framework: str
    """The layout of the state, such as ``torch`` or ``deepspeed-zero1-bf16``."""
    world_size: int
    model: str
    """A digest of the names, shapes and dtypes of this rank's tensors."""
    model_summary: str
    """The same in words, for the message that refuses another model."""
    optimizer: OptimizerIdentity


class StateProvider(Protocol):
    """One rank's training state."""

    def identity(self) -> Identity:
        """What this rank trains, and how."""

    def masters(self) -> Mapping[str, torch.Tensor]:
        """The tensors the optimizer updates, live, by a name that is stable across restarts.

        Under ZeRO these are the rank's full-precision partitions; names are unique within the rank.
        """

    def group_of(self) -> Mapping[str, int]:
        """The index of each master's parameter group."""

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        """Per master, the optimizer's tensors for it (``exp_avg``, ``step``...), live; empty before the first step."""

    def extras(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the module that no optimizer updates: persistent buffers and frozen parameters, live."""

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """The parameters that no optimizer updates alone, live."""

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The persistent buffers alone, live: any forward pass may change them."""

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Per parameter group, its options as plain values (``lr``, ``betas``, ``weight_decay``...)."""

    def host_state(self) -> dict[str, Any]:
        """Everything else that the next iteration depends on: RNGs, schedulers, scalers, data position.

        Plain values, ``bytes`` and NumPy arrays only, as of the *end* of the current iteration.
        """

    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        """Make the given values (copied) the rank's state. :meth:`refresh` must follow."""

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        """Run the optimizer's own step on the masters with these gradients and options. A master without a
        gradient is left out, as the optimizer leaves out a parameter whose ``grad`` is ``None``."""

    def refresh(self) -> None:
        """Rebuild what derives from the masters (low-precision copies, gathered parameters). Collective."""

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`host_state` returned."""


class ModuleProvider:
    """The state of a ``torch.nn.Module`` and its optimizer, on one process or under DDP.

    Masters are the parameters the optimizer updates, named as the module names them. Under DDP every rank
    holds, and saves, all of them.

    What else the loop holds is in ``beside``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        world_size: int = 1,
        beside: Beside | None = None,
    ) -> None:
        self._model = model
        self._tensors = ModuleTensors(model)
        self._optimizer = optimizer
        self._world_size = world_size
        self.beside = beside or Beside()
        self._masters = _masters_by_name(model, optimizer)
        self._parameter_ids = [id(parameter) for parameter in self._masters.values()]
        self._refuse_what_cannot_be_saved()

    def identity(self) -> Identity:
        shapes = [describe_tensor(name, tensor) for name, tensor in self._masters.items()]
        extras = [describe_tensor(name, tensor) for name, tensor in self.extras().items()]
        parameters = sum(tensor.numel() for tensor in self._masters.values())
        device = next(iter(self._masters.values())).device
        return Identity(
            framework="torch",
            world_size=self._world_size,
            model=digest([*shapes, *extras]),
            model_summary=f"{len(shapes)} trained tensors of {parameters:,} elements, {len(extras)} others",
            optimizer=OptimizerIdentity.of(self._optimizer, device),
        )

    def masters(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._masters.items()}

    def group_of(self) -> Mapping[str, int]:
        index = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        return {name: index[id(tensor)] for name, tensor in self._masters.items()}

    def optimizer_state(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            name: dict(self._optimizer.state[tensor])
            for name, tensor in self._masters.items()
            if self._optimizer.state.get(tensor)
        }

    def extras(self) -> Mapping[str, torch.Tensor]:
        return {**self.frozen(), **self.buffers()}

    def frozen(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._tensors.others(self._masters.values()).items()}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self._tensors.buffers()

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [plain_options(group) for group in self._optimizer.param_groups]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients the coming step will apply; parameters without one are left out.

        Errors: ``UnsupportedSetup`` for a sparse gradient, and where the optimizer's parameters are not those that
        were there when the provider was made.
        """
        if [id(p) for group in self._optimizer.param_groups for p in group["params"]] != self._parameter_ids:
            raise UnsupportedSetup(
                "the optimizer's parameters have changed since attach, and the new ones would not be saved: close the "
                "checkpointer, change them, and attach again"
            )
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self._masters.items():
            if tensor.grad is None:
                continue
            if tensor.grad.layout is not torch.strided:
                raise UnsupportedSetup(
                    f"the gradient of {name} is {tensor.grad.layout}; supported are dense gradients "
                    "(for an embedding: sparse=False)"
                )
            found[name] = tensor.grad.detach()
        return found

    def end_of_step(self) -> None:
        self.beside.end_of_step()

    def end_of_iteration(self, end: End) -> None:
        self.beside.end_of_iteration(end)

    def published(self) -> None:
        self.beside.published()

    def host_state(self) -> dict[str, Any]:
        return {"options": self.hyperparameters(), **self.beside.host_state()}

    def load(
        self,
        *,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
        hyperparameters: list[dict[str, Any]],
    ) -> None:
        copy_into(self.masters(), masters)
        copy_into(self.extras(), extras)
        for name, parameter in self._masters.items():
            self._optimizer.state.pop(parameter, None)
            if name in optimizer_state:
                self._optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in optimizer_state[name].items()
                }
        self._set_hyperparameters(hyperparameters)

    def apply(self, gradients: Mapping[str, torch.Tensor], hyperparameters: list[dict[str, Any]]) -> None:
        self._set_hyperparameters(hyperparameters)
        for name, parameter in self._masters.items():
            gradient = gradients.get(name)
            # A copy: the optimizer may write to it, and what was read may be a mapping that nobody can write to.
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def refresh(self) -> None:
        """Nothing derives from the parameters of a plain module."""

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        self.beside.restore(state)
        self._set_hyperparameters(state["options"])
        self.beside.restore_generators(state)

    def _set_hyperparameters(self, hyperparameters: list[dict[str, Any]]) -> None:
        for group, options in zip(self._optimizer.param_groups, hyperparameters, strict=True):
            set_options(group, options)

    def _refuse_what_cannot_be_saved(self) -> None:
        others = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._parameter_ids
        ]
        if others:
            raise UnsupportedSetup(
                f"{len(others)} trainable parameters are not updated by the attached optimizer "
                f"({', '.join(others[:3])}): supported is one optimizer for all of them; set requires_grad to False "
                "on what is not trained"
            )
        if not self._masters:
            raise UnsupportedSetup("the optimizer updates no parameter, so there is nothing to save")
        for name, tensor in {**self._masters, **self.extras()}.items():
            if type(tensor.data) is not torch.Tensor:
                raise UnsupportedSetup(
                    f"{name} is a {type(tensor.data).__name__}; supported are plain tensors, on one process, "
                    "under DDP, or partitioned by DeepSpeed (tiercheck.integrations.deepspeed)"
                )
            if tensor.is_meta:
                raise UnsupportedSetup(f"{name} is on the meta device: materialise the model before attach")


def implementation_of(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """How torch's Adam and AdamW run on ``device``: the three differ in their last bits. ``called`` for others."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return "called"
    chosen: set[str] = set()
    for group in optimizer.param_groups:
        if group.get("fused"):
            chosen.add("fused")
        elif group.get("foreach") or (group.get("foreach") is None and device.type != "cpu"):
            chosen.add("foreach")
        else:
            chosen.add("single_tensor")
    return chosen.pop() if len(chosen) == 1 else "called"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"


def digest(lines: Iterable[str]) -> str:
    """Sixteen hexadecimal digits that differ where the lines do."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options without its parameters; tensors (a capturable ``lr``) as numbers."""
    return {
        key: value if type(value) in PLAIN else to_plain(value, key) for key, value in group.items() if key != "params"
    }


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Put options back into a parameter group, into the tensor where the group holds one."""
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor):
            current.fill_(float(np.asarray(value)))
        else:
            group[key] = value


def check_shapes(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Errors: ``Mismatch`` where the names or the shapes differ."""
    if targets.keys() != sources.keys():
        differing = ", ".join(sorted(targets.keys() ^ sources.keys())[:5])
        raise Mismatch(f"the checkpoint and the job hold different tensors, among them {differing}")
    for name, target in targets.items():
        if target.shape != sources[name].shape:
            raise Mismatch(
                f"{name} is {tuple(sources[name].shape)} in the checkpoint and {tuple(target.shape)} in the job"
            )


def copy_into(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Copy each source into the target of its name. Errors: those of :func:`check_shapes`, before any is copied."""
    check_shapes(targets, sources)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(sources[name])


def _masters_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masters: dict[str, torch.nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            masters[names.get(id(parameter), f"optimizer.{index}.{position}")] = parameter
    return masters
