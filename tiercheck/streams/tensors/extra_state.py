"""What modules keep beside parameters and buffers, by ``get_extra_state`` and ``set_extra_state``: the scales of layers
of low precision. It is host state, as of the moment at which a version is published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiercheck.streams.tensors.module_tensors import ModuleTensors
from tiercheck.streams.tensors.storable import from_storable, to_storable

__all__ = ["ExtraState"]

EXTRA_STATE = "extra_state"
"""In a version's host state: by module, as the model names it. Of a model without any there is none."""
NAMED_MAX = 3


class ExtraState:
    """Of ``module`` and all below it that have some."""

    def __init__(self, module: torch.nn.Module) -> None:
        names = ModuleTensors(module)
        plain = torch.nn.Module.get_extra_state
        self._modules = {
            names.model_name(name): each
            for name, each in module.named_modules()
            if type(each).get_extra_state is not plain
        }
        self._lacking: list[str] = []
        """Of the version restored, the modules of which it says nothing."""

    def host_state(self) -> dict[str, Any]:
        """Errors: ``UnsupportedSetup`` naming a tensor that host state cannot hold."""
        modules = self._modules.items()
        found = {
            name: to_storable(each.get_extra_state(), f"the extra state of {called(name)}") for name, each in modules
        }
        return {EXTRA_STATE: found} if found else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`host_state` returned."""
        saved = state.get(EXTRA_STATE, {})
        self._lacking = sorted(self._modules.keys() - saved.keys())
        for name, each in self._modules.items():
            if name in saved:
                each.set_extra_state(from_storable(saved[name]))

    def caveats(self) -> list[str]:
        """Why what follows the recovery has not the bits of an uninterrupted run."""
        if not self._lacking:
            return []
        names = ", ".join(called(each) for each in self._lacking[:NAMED_MAX])
        more = ", ..." if len(self._lacking) > NAMED_MAX else ""
        return [f"the version holds no extra state of {names}{more}, which begins as the script made it"]


def called(module: str) -> str:
    return module or "the model itself"
