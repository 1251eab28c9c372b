"""Whether a loop keeps its gradients from one iteration to the next, for the next process to do the same.

A loop that sets gradients to zero (``zero_grad(set_to_none=False)``), and does not drop them, steps parameters that the
iteration did not use, too, with a gradient of zeros. A process that has just started has no gradients yet, and would
leave those parameters out. So each version knows which parameters have a gradient when the next iteration begins, and a
resumed process gives them zeros. What the gradients hold is in no version.

Whether the loop drops them before the next iteration was seen in the iterations before: when the first forward pass
with gradients begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["KeptGradients"]

KEPT = "kept_gradients"


class KeptGradients:
    """Of one optimizer's ``parameters``, by name, or of several optimizers': each may be treated otherwise."""

    def __init__(self, parameters: Iterable[Mapping[str, torch.Tensor]]) -> None:
        self._parts = [_Part(each) for each in parameters]

    def stepped(self) -> None:
        """All optimizers have stepped that do so in this iteration."""
        for part in self._parts:
            part.stepped()

    def forward(self) -> None:
        """A forward pass of training begins, perhaps the first one after the step."""
        if torch.is_grad_enabled():
            for part in self._parts:
                part.forward()

    def host_state(self) -> dict[str, Any]:
        """As of now, between two iterations."""
        names = [name for part in self._parts if part.keeps for name in part.with_gradient()]
        if not names:
            return {}
        return {KEPT: None if len(names) == sum(len(part.parameters) for part in self._parts) else names}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Give zeros to the parameters that had a gradient. Any others stay as they are."""
        if KEPT not in state:
            return
        names = None if state[KEPT] is None else frozenset(state[KEPT])
        for part in self._parts:
            part.restore(names)


class _Part:
    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.keeps = False
        """At the last look the loop had kept what the iteration before left."""
        self._stepped_on: torch.Tensor | None = None
        """A parameter with a gradient at the end of the last step, until the loop was looked at."""

    def stepped(self) -> None:
        self._stepped_on = next((each for each in self.parameters.values() if each.grad is not None), None)

    def forward(self) -> None:
        if self._stepped_on is not None:
            self.keeps, self._stepped_on = self._stepped_on.grad is not None, None

    def with_gradient(self) -> list[str]:
        return [name for name, each in self.parameters.items() if each.grad is not None]

    def restore(self, names: frozenset[str] | None) -> None:
        given = [each for name, each in self.parameters.items() if names is None or name in names]
        self.keeps = bool(given)
        for each in given:
            each.grad = torch.zeros_like(each)
