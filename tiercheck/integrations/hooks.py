"""Hooks of an optimizer's step that nobody comes between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch

from tiercheck.errors import UnsupportedSetup

__all__ = ["StepHooks"]

Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]


class StepHooks:
    """``before`` runs last before the optimizer's step, and ``after`` first behind it: what a hook of somebody else's
    changed in between would be in no record.

    torch runs hooks in the order in which they were registered, and has no public way to change it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Hook, after: Hook) -> None:
        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(after)
        self._befores = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        self._afters = cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks)
        self.stand_next_to_the_step()

    def stand_next_to_the_step(self) -> None:
        """Pass the hooks that were registered since."""
        self._befores.move_to_end(self._before.id)
        self._afters.move_to_end(self._after.id, last=False)

    def check(self) -> None:
        """Errors: ``UnsupportedSetup`` where a hook was registered since."""
        if next(reversed(self._befores)) != self._before.id:
            raise UnsupportedSetup(
                "a step pre-hook was registered on the optimizer between the forward pass and the step, and what it "
                "does to the gradients would not be recorded: register it before the forward pass"
            )

    def remove(self) -> None:
        self._before.remove()
        self._after.remove()
