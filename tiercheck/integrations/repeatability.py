"""Whether a replay would repeat an optimizer's step: not if that draws random numbers, as for Langevin noise, or rounds
as only its own thread does."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from tiercheck.streams.tensors.generators import differing, random_state
from tiercheck.streams.tensors.joint import is_torchs_own

__all__ = ["Repeatability"]

log = logging.getLogger(__name__)

NORMAL_MIN = sys.float_info.min
INSTEAD = "each such version gets a base instead of a differential, which takes longer"


class Repeatability:
    """Looks at each step's surroundings. torch's own optimizers draw nothing: the global generators are looked at
    around the steps of others."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._flushes = False
        self._told: set[str] = set()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The step's gradients are there, and it changes something next."""
        self._before = None if is_torchs_own(optimizer) else random_state()
        self._flushes = flushes_subnormals() and on_host(optimizer)

    def is_lost(self) -> bool:
        """Whether the step, which is done, cannot be repeated."""
        before, self._before = self._before, None
        kinds = differing(before, random_state()) if before is not None else ()
        if kinds:
            names = ", ".join(sorted(kinds))
            self._tell(
                f"the optimizer draws from the generators of {names} in its step, and a replay would draw other numbers"
            )
        if self._flushes:
            self._tell(
                "the step runs under torch.set_flush_denormal(True), which holds for its thread alone, and a replay on "
                "others would have other bits"
            )
        return bool(kinds) or self._flushes

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.warning("%s: %s", why, INSTEAD)


def flushes_subnormals() -> bool:
    """Whether this thread takes numbers that are too small to be normal for zero (``torch.set_flush_denormal``)."""
    return NORMAL_MIN / 2 == 0.0


def on_host(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.device.type == "cpu" for group in optimizer.param_groups for each in group["params"])
