"""Where the state of a rank comes from and goes back to.

A provider is the only thing that knows how a framework lays out its training state. The streams read it
through this protocol, and recovery writes it back through the same. Tensors are handed out *live*: what
:meth:`StateProvider.masters` returns is the memory the optimizer updates, so a capture must be done before
the next step, and a replay in place needs no copy.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["Identity", "ModuleProvider", "OptimizerIdentity", "StateProvider", "random_state", "restore_random_state"]


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

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerIdentity:
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        return cls(
            kind=kind,
            implementation=implementation_of(optimizer, device),
            torch_version=torch.__version__,
            instruction_set=torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device_name(device),
            device=device.type,
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

    def to_object(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_object(cls, value: Mapping[str, Any]) -> Identity:
        fields = dict(value)
        return cls(**{**fields, "optimizer": OptimizerIdentity(**fields["optimizer"])})


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

    def optimizer_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Per master, the optimizer's tensors for it (``exp_avg``, ``step``...), live; empty before the first step."""

    def extras(self) -> Mapping[str, torch.Tensor]:
        """Tensors of the module that no optimizer updates: persistent buffers and frozen parameters, live."""

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
        optimizer_state: Mapping[str, Mapping[str, torch.Tensor]],
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
