"""Whether a replay would repeat an optimizer's step: not if that draws random numbers, as for Langevin noise, rounds
as only its own threads do, reads its gradients in another order than they are recorded in, or was broken off."""

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
        self._reorders = False
        self._begun = 0
        """Steps since the last one that was done."""
        self._told: set[str] = set()

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The step's gradients are there, and it changes something next."""
        self._before = None if is_torchs_own(optimizer) else random_state()
        if self._some_thread_flushes is None:
            self._some_thread_flushes = some_thread_flushes()
        self._flushes = (self._some_thread_flushes or flushes_denormals()) and on_host(optimizer)
        self._reorders = reads_in_another_order(optimizer)
        self._begun += 1

    def is_unfinished(self) -> bool:
        """Whether a step was begun and is not done: it has raised an error that the loop passes over."""
        return self._begun > 0

    def is_lost(self) -> bool:
        """Whether the step, which is done, cannot be repeated."""
        before, self._before = self._before, None
        flushes, self._flushes = self._flushes, False
        reorders, self._reorders = self._reorders, False
        begun, self._begun = self._begun, 0
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
        if reorders:
            self._tell(
                "a fused optimizer on the host reads gradients in the order of memory, and the script has set a .grad "
                "that lies in another order than its parameter: it gets other elements' gradients. Set .grad to a "
                "tensor of the parameter's strides"
            )
        if begun > 1:
            self._tell("an optimizer's step has raised an error, and nobody knows what it had changed by then")
        return bool(kinds) or flushes or reorders or begun > 1

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.warning("%s: %s", why, INSTEAD)


def some_thread_flushes() -> bool:
    """Whether one of torch's threads does. Each has it from the thread that made it, and as it was then."""
    smallest = torch.full((torch.get_num_threads() * GRAIN,), 1e-45, dtype=torch.float32, device="cpu")
    return bool((smallest.mul(1.0).view(torch.int32) == 0).any())


def on_host(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.device.type == "cpu" for group in optimizer.param_groups for each in group["params"])


def reads_in_another_order(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's fused step on the host takes a gradient's elements for others, since they lie in another order
    than the parameter's."""
    fused = (each for group in optimizer.param_groups if group.get("fused") for each in group["params"] if each.is_cpu)
    pairs = ((each, each.grad) for each in fused if each.grad is not None)
    return any(each.stride() != grad.stride() and strides(each) != strides(grad) for each, grad in pairs)


def strides(tensor: torch.Tensor) -> list[int]:
    """Of the dimensions in which it has several elements."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
