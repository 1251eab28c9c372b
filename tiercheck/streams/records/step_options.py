"""The options of the parameter groups, as the step of a version takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["StepOptions"]


class StepOptions:
    """Of all groups as of the step's begin. If the step has several parts, the loop may set the options of a part since
    the part before: those of a group are as of the call that brings its gradients."""

    def __init__(self, provider: StateProvider) -> None:
        self._provider = provider
        self._parts = 0
        self.groups: list[dict[str, Any]] = provider.hyperparameters()

    def take(self, gradients: Mapping[str, Any]) -> None:
        """Gradients come, by master."""
        self._parts += 1
        if self._parts == 1:
            return
        now, group_of = self._provider.hyperparameters(), self._provider.group_of()
        for group in {group_of[name] for name in gradients if name in group_of}:
            self.groups[group] = now[group]
