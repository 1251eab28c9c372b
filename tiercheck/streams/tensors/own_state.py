"""What an optimizer keeps that belongs to no parameter: under a key of its own in ``state``, or as an attribute.

A count of steps, as a rule. It is saved with the options of the first parameter group: a record holds them as they were
before its step, and they are set again before the step is replayed. torch's own optimizers keep nothing of the kind.

Of attributes numbers are seen, and small tensors on the host, if a step changes them; a version of before that has the
value that the script gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup
from tiercheck.streams.tensors.joint import AnyOptimizer, is_torchs_own, parts_of, qualified
from tiercheck.streams.tensors.storable import from_storable, to_storable

__all__ = ["OwnState"]

OWN_STATE = "tiercheck.own_state"
"""Among the options of the first parameter group; of an optimizer without any there is none."""
ELEMENTS_MAX = 1024
"""Of a tensor that is an attribute."""
SCHEDULERS = frozenset(("_step_count", "_opt_called"))
"""Attributes that torch's learning-rate schedulers set."""


class OwnState:
    def __init__(self, optimizer: AnyOptimizer) -> None:
        self._parts = [_Part(each) for each in parts_of(optimizer) if not is_torchs_own(each)]

    def look(self) -> None:
        """A step was taken. Errors: ``UnsupportedSetup`` for a key that a version cannot hold."""
        for each in self._parts:
            each.look()

    def added_to(self, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The options of the parameter groups, with what there is now in the first."""
        found = {str(index): each.saved() for index, each in enumerate(self._parts)}
        if any(found.values()) and options:
            options[0][OWN_STATE] = found
        return options

    def taken_from(self, options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The inverse: what was added is put back; without that, all is as the script made it. Returns the options."""
        saved = options[0].get(OWN_STATE, {}) if options else {}
        for index, each in enumerate(self._parts):
            each.restore(saved.get(str(index), {}))
        return [{name: value for name, value in each.items() if name != OWN_STATE} for each in options]


class _Part:
    """Of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._given = self._numbers()
        """The attributes as the script made them."""
        self._last = self._given
        self._moving: set[str] = set()
        """The attributes that a step was seen to change, here or in the process whose version was restored."""
        self._keys: tuple[Any, ...] = ()
        self._entries = 0
        """How many entries ``state`` had when its keys were looked at."""
        self._look_at_keys()
        self._given_state: Mapping[Any, Any] = self.saved().get("state", {})
        """What was under them as the script made it."""

    def look(self) -> None:
        self._look_at_keys()
        now = self._numbers()
        self._moving |= {name for name, value in now.items() if not same(value, self._last.get(name))}
        self._last = now

    def saved(self) -> dict[str, Any]:
        state = self._optimizer.state
        kept = {key: to_storable(state[key], f"state[{key!r}] of the optimizer") for key in self._keys if key in state}
        numbers = self._numbers() if self._moving else {}
        moved = {name: to_storable(numbers[name], name) for name in sorted(self._moving & numbers.keys())}
        return {name: each for name, each in (("state", kept), ("attributes", moved)) if each}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for key in self._keys:
            self._optimizer.state.pop(key, None)
        for key, value in saved.get("state", self._given_state).items():
            self._optimizer.state[key] = from_storable(value)
        moved = {name: from_storable(value) for name, value in saved.get("attributes", {}).items()}
        self._moving |= moved.keys()
        for name in self._moving:
            self._set(name, moved.get(name, self._given.get(name)))
        self._entries = -1
        self.look()

    def _set(self, name: str, value: Any) -> None:
        here = getattr(self._optimizer, name, None)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor) and here.shape == value.shape:
            with torch.no_grad():
                here.copy_(value)
        elif value is not None:
            setattr(self._optimizer, name, value.clone() if isinstance(value, torch.Tensor) else value)

    def _look_at_keys(self) -> None:
        state = self._optimizer.state
        if len(state) == self._entries:
            return
        self._entries = len(state)
        self._keys = tuple(key for key in state if not isinstance(key, torch.Tensor))
        for key in self._keys:
            if type(key) not in (str, int):
                raise UnsupportedSetup(
                    f"{qualified(type(self._optimizer))} keeps state under {key!r}, which is neither a parameter nor "
                    "a string: it cannot be saved"
                )

    def _numbers(self) -> dict[str, Any]:
        """The attributes that may be state, tensors copied."""
        found: dict[str, Any] = {}
        for name, value in vars(self._optimizer).items():
            if type(value) in (int, float) and name not in SCHEDULERS:
                found[name] = value
            elif isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() <= ELEMENTS_MAX:
                found[name] = value.detach().clone()
        return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other or (one != one and other != other))
