"""A module's parameters and buffers by name, as they are now, without a walk through its tree at each iteration.

``named_parameters`` and ``state_dict`` take a millisecond for a few hundred modules, and each iteration asks several
times, while training stands still. The tree seldom changes, so it is kept, and each time compared with what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

__all__ = ["ModuleTensors"]


T = TypeVar("T", bound=torch.Tensor)


class ModuleTensors:
    """Of ``module`` and all below it. A tensor that several modules share is named once, as torch names it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tree: list[tuple[str, torch.nn.Module, tuple[tuple[str, torch.nn.Module | None], ...]]] = []

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What ``named_parameters`` has."""
        return dict(_named((prefix, module._parameters) for prefix, module in self._modules()))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Those of ``named_buffers`` that ``state_dict`` holds, detached; the others are recomputed by the modules
        themselves."""
        modules = [(prefix, module) for prefix, module in self._modules() if module._buffers]
        if not modules:
            return {}
        saved = {
            prefix + name for prefix, module in modules for name in module._buffers.keys() - _not_persistent(module)
        }
        found = _named((prefix, module._buffers) for prefix, module in modules)
        return {name: buffer.detach() for name, buffer in found if name in saved}

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        changed = (
            (children or module._modules) and tuple(module._modules.items()) != children
            for _, module, children in self._tree
        )
        if not self._tree or any(changed):
            self._tree = [
                (f"{name}." if name else "", module, tuple(module._modules.items()))
                for name, module in self._module.named_modules()
            ]
        return ((prefix, module) for prefix, module, _ in self._tree)


def _not_persistent(module: torch.nn.Module) -> set[str]:
    return module._non_persistent_buffers_set  # torch has no public way but to make a whole state_dict


def _named(owners: Iterator[tuple[str, Mapping[str, T | None]]]) -> Iterator[tuple[str, T]]:
    seen: set[int] = set()
    for prefix, tensors in owners:
        # By items: under ZeRO-3 looking up a name may fetch the parameter from the other ranks.
        for name, tensor in tensors.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + name, tensor
