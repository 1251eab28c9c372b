"""Several optimizers of one model, as if they were one: Muon for the matrices and AdamW for the rest; a GAN's two.

Each updates parameters of its own. If all are of one class, they are that class with the parameter groups of all of
them, and kernels replay their steps. Of several classes the steps are replayed by calling them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup

__all__ = [
    "AnyOptimizer",
    "JointOptimizer",
    "is_torchs_own",
    "kind_of",
    "kinds_in",
    "objects_held",
    "parts_of",
    "qualified",
]

AND = " and "


class JointOptimizer:
    """What is asked of a ``torch.optim.Optimizer``, of all of ``parts``. Errors: ``UnsupportedSetup`` if two of them
    update the same parameter."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        seen = Counter(id(parameter) for group in self.param_groups for parameter in group["params"])
        if any(count > 1 for count in seen.values()):
            raise UnsupportedSetup(
                "two of the optimizers update the same parameter: give each parameter to one of them"
            )
        self.state: MutableMapping[torch.Tensor, dict[str, Any]] = _States(self.parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live, in a list of their own."""
        return [*chain.from_iterable(part.param_groups for part in self.parts)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


AnyOptimizer = torch.optim.Optimizer | JointOptimizer


def parts_of(optimizer: AnyOptimizer) -> tuple[torch.optim.Optimizer, ...]:
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has the class: such an optimizer keeps plain tensors and numbers, of parameters alone, and its step
    draws no random numbers."""
    return type(optimizer).__module__.startswith("torch.")


def objects_held(optimizer: AnyOptimizer) -> list[Any] | None:
    """What it holds of its parameters, the objects themselves. ``None`` for one of a user's own, which may hold
    containers of tensors."""
    parts = parts_of(optimizer)
    if not all(is_torchs_own(part) or type(part).__module__.startswith("deepspeed.") for part in parts):
        return None
    return [each for part in parts for state in part.state.values() for each in state.values()]


def kind_of(optimizer: AnyOptimizer) -> str:
    """The qualified name of its class. Of several classes those of all parts, with their numbers of parameter groups
    (:func:`kinds_in`)."""
    parts = parts_of(optimizer)
    if len(set(kinds := [qualified(type(part)) for part in parts])) > 1:
        return AND.join(f"{kind} ({len(part.param_groups)})" for kind, part in zip(kinds, parts, strict=True))
    return kinds[0]


def kinds_in(kind: str) -> list[tuple[str, int | None]]:
    """The classes that :func:`kind_of` has named, and how many parameter groups are each one's; ``None``: all."""
    found = []
    for each in kind.split(AND):
        name, _, groups = each.partition(" (")
        found.append((name, int(groups.removesuffix(")")) if groups else None))
    return found


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """By parameter, what the one that updates it holds of it."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        self._part_of = {id(each): part for part in parts for group in part.param_groups for each in group["params"]}

    def _of(self, parameter: torch.Tensor) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        found: MutableMapping[torch.Tensor, dict[str, Any]] = self._part_of[id(parameter)].state
        return found

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self._of(parameter)
        if parameter not in state:  # torch's makes one of what is asked for
            raise KeyError(parameter)
        return state[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)
