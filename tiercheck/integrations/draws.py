"""Whether an optimizer draws random numbers in its step, as for Langevin noise: a replay would draw others."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tiercheck.streams.tensors.generators import differing, random_state
from tiercheck.streams.tensors.joint import is_torchs_own

__all__ = ["StepDraws"]

log = logging.getLogger(__name__)


class StepDraws:
    """Looks at the global generators around each step. torch's own optimizers draw nothing, and are not looked at."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._told = False

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The step's gradients are there, and it changes something next."""
        self._before = None if is_torchs_own(optimizer) else random_state()

    def drew(self) -> bool:
        """Whether the step, which is done, has drawn random numbers."""
        before, self._before = self._before, None
        if before is None or not (kinds := differing(before, random_state())):
            return False
        if not self._told:
            self._told = True
            log.warning(
                "the optimizer draws from the generators of %s in its step, and a replay would draw other numbers: "
                "each such version gets a base instead of a differential, which takes longer",
                ", ".join(sorted(kinds)),
            )
        return True
