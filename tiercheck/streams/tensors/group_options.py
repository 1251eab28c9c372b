"""The options of an optimizer's parameter groups, as plain values and back.

A tensor, such as an ``lr`` that a compiled step takes, is told as a number: that is what most readers want. But torch
computes otherwise with a tensor than with a number of the same value (``1 - lr * weight_decay`` is fp32 then). And a
group may lose an option that the script gives it. So what plain values do not tell stands beside them, under names of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tiercheck.streams.tensors.storable import PLAIN, from_storable, to_plain, to_storable

__all__ = ["GroupOptions", "merged_options", "numpy_options", "plain_options", "set_options", "tensor_options"]

TENSORS = "tiercheck.tensors"
"""The options of the group that are tensors, or hold some, as they are."""
REMOVED = "tiercheck.removed"
"""The names of options that the group had, and has no more."""
TOLD_BESIDE = frozenset((TENSORS, REMOVED, "tiercheck.numbers"))
"""The last one stands in older versions, beside what says the same."""


class GroupOptions:
    """What the parameter groups of an optimizer have, and what they have had."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._had: list[set[str]] = []
        self.plain(groups)

    def plain(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Of each group, as :func:`plain_options`, and what was removed."""
        self._had += [set() for _ in groups[len(self._had) :]]
        found: list[dict[str, Any]] = []
        for group, had in zip(groups, self._had, strict=False):
            options = plain_options(group)
            had.update(group)
            if removed := had - group.keys():
                options[REMOVED] = sorted(removed)
            found.append(options)
        return found


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options without its parameters; tensors of one element (a capturable ``lr``) as numbers, and
    as they are under :data:`TENSORS`. Errors: ``UnsupportedSetup`` for a tensor that cannot be stored."""
    found: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, value in group.items():
        if name == "params":
            continue
        if type(value) in PLAIN:
            found[name] = value
            continue
        found[name] = to_plain(without_dimension(value), name)
        if has_tensor(value):
            tensors[name] = to_storable(value, name)
    return {**found, TENSORS: tensors} if tensors else found


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Put options back into a parameter group: tensors into those that the group holds, if they are of their form. What
    was a number is one again, also if the script has made a tensor of it: torch's steps with a tensor have other bits.
    """
    tensors, removed = options.get(TENSORS, {}), options.get(REMOVED, ())
    for name in removed:
        group.pop(name, None)
    for name, value in options.items():
        if name in TOLD_BESIDE or name in removed:
            continue
        current = group.get(name)
        if name in tensors:
            group[name] = tensor_as_kept(current, from_storable(tensors[name]))
        elif isinstance(current, torch.Tensor) and np.ndim(value):
            group[name] = filled(current, value)
        else:
            group[name] = value


def merged_options(here: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options here, with those that were saved in their place. Of an option that ``saved`` tells of, nothing
    of what is here stays."""
    told = {*saved, *saved.get(REMOVED, ()), *TOLD_BESIDE}
    found = {**{name: value for name, value in here.items() if name not in told}, **saved}
    own = {name: value for name, value in here.get(TENSORS, {}).items() if name not in told}
    return {**found, TENSORS: {**own, **saved.get(TENSORS, {})}} if own else found


def tensor_options(options: Mapping[str, Any]) -> list[str]:
    """The names of those that are tensors, or hold some."""
    return sorted(options.get(TENSORS, ()))


def numpy_options(options: Mapping[str, Any]) -> list[str]:
    """The names of those that are numbers of NumPy's in another precision than Python's, or hold some."""
    return sorted(name for name, value in options.items() if _is_numpys(value))


def _is_numpys(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_numpys, value))
    return isinstance(value, np.floating) and not isinstance(value, float)


def tensor_as_kept(current: Any, saved: Any) -> Any:
    """The saved value: on the device of the one that is there, and in its memory if it fits there; else on the host."""
    if isinstance(saved, list | tuple) and isinstance(current, list | tuple) and len(saved) == len(current):
        return type(saved)(map(tensor_as_kept, current, saved))
    if not (isinstance(saved, torch.Tensor) and isinstance(current, torch.Tensor)):
        return saved
    if (current.shape, current.dtype) != (saved.shape, saved.dtype):
        return saved.to(current.device)
    with torch.no_grad():
        return current.copy_(saved)


def filled(current: torch.Tensor, value: Any) -> torch.Tensor:
    """With what was recorded as an array."""
    with torch.no_grad():
        return current.copy_(torch.from_numpy(np.asarray(value)).reshape(current.shape))


def has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_tensor, value))
    return isinstance(value, torch.Tensor)


def without_dimension(value: Any) -> Any:
    """A tensor of one element as torch takes it for a number."""
    return value.reshape(()) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
