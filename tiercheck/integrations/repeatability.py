"""Whether a replay would repeat an optimizer's step: not if that draws random numbers, as for Langevin noise, or rounds
as only its own threads do."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tiercheck.streams.optimizers.replay import flushes_denormals
from tiercheck.streams.tensors.generators import differing, random_state
from tiercheck.streams.tensors.joint import is_torchs_own

__all__ = ["Repeatability"]

log = logging.getLogger(__name__)

GRAIN = 32768
"""So many elements torch gives a thread at least."""
INSTEAD = "each such version gets a base instead of a differential, which takes longer"


class Repeatability:
    """Looks at each step's surroundings. torch's own optimizers draw nothing: the global generators are looked at
    around the steps of others."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._flushes = False
        self._some_thread_flushes: bool | None = None
        """One of torch's; ``None`` before the first step."""
        self._told: set[str] = set()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The step's gradients are there, and it changes something next."""
        self._before = None if is_torchs_own(optimizer) else random_state()
        if self._some_thread_flushes is None:
            self._some_thread_flushes = some_thread_flushes()
        self._flushes = (self._some_thread_flushes or flushes_denormals()) and on_host(optimizer)

    def is_lost(self) -> bool:
        """Whether the step, which is done, cannot be repeated."""
        before, self._before = self._before, None
        flushes, self._flushes = self._flushes, False
        kinds = differing(before, random_state()) if before is not None else ()
        if kinds:
            names = ", ".join(sorted(kinds))
            self._tell(
                f"the optimizer draws from the generators of {names} in its step, and a replay would draw other numbers"
            )
        if flushes:
            self._tell(
                "the step runs on threads that take denormals for zero (torch.set_flush_denormal, or a library when it "
                "was loaded), and a replay on others would have other bits"
            )
        return bool(kinds) or flushes

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.warning("%s: %s", why, INSTEAD)


def some_thread_flushes() -> bool:
    """Whether one of torch's threads does. Each has it from the thread that made it, and as it was then."""
    smallest = torch.full((torch.get_num_threads() * GRAIN,), 1e-45)
    return bool((smallest.mul(1.0).view(torch.int32) == 0).any())


def on_host(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.device.type == "cpu" for group in optimizer.param_groups for each in group["params"])
