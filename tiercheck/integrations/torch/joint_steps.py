"""One version of several optimizers: each steps at most once in an iteration, which ends when the loop says so.

Nothing else tells where it ends: a GAN's loop has a forward pass between two of its steps, and a ``GradScaler`` may
leave one of them out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.tensors.joint import JointOptimizer

__all__ = ["JointSteps"]


class JointSteps:
    def __init__(self, provider: ModuleProvider, optimizer: JointOptimizer) -> None:
        self._updated_by = {part: provider.updated_by(part) for part in optimizer.parts}
        self._stepped: set[torch.optim.Optimizer] = set()
        """In this iteration."""

    def of(self, optimizer: torch.optim.Optimizer, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its gradients, of all that are there: others may be of the last iteration. Errors: ``UnsupportedSetup`` if it
        has stepped in this iteration."""
        if optimizer in self._stepped:
            raise UnsupportedSetup(
                f"{type(optimizer).__name__} steps twice in one iteration: of several optimizers each may step once, "
                "and the loop must call checkpointer.end_iteration() at the end of each iteration"
            )
        own = self._updated_by[optimizer]
        return {name: gradient for name, gradient in gradients.items() if name in own}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)

    def end(self) -> bool:
        """The iteration is over. Returns whether any of them has stepped in it."""
        any_stepped = bool(self._stepped)
        self._stepped.clear()
        return any_stepped
