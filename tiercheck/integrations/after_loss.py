"""What a pipeline keeps for the case that a stage is lost, and what a recovery from that leaves behind for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tiercheck.recovery.stages.making import RAISED_RATE
from tiercheck.streams.tensors.stage import GradientNorms

__all__ = ["AfterLoss"]


class AfterLoss:
    """The norms of the last step's gradients, and the learning rate that is raised after a stage was made anew.

    The rate is raised for the step alone, and put back behind it: a schedule, and whatever else reads and moves the
    options, knows nothing of it. Each version's record holds the raised rate, so that it is replayed as it was.
    """

    def __init__(self) -> None:
        self.norms: GradientNorms | None = None
        """``None``: they are not measured."""
        self._raised: Mapping[str, Any] | None = None
        """The factor, and the last version; ``None``: the rate is not raised."""
        self._ends = False
        """The step that runs is of that version."""
        self._before: list[Any] = []
        """By parameter group, the rate during a step that takes a raised one."""

    def measure(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """The gradients of the coming step, or of a part of it."""
        if self.norms is not None:
            self.norms.measure(gradients)

    def raise_rate(self, groups: Sequence[dict[str, Any]], version: int) -> None:
        """The step of ``version`` begins."""
        if self._raised is None or self._before:
            return
        self._ends = version >= self._raised["until"]
        if version > self._raised["until"]:
            return
        self._before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._raised["factor"]

    def lower_rate(self, groups: Sequence[dict[str, Any]], *, done: bool = True) -> None:
        """The step is done, or (not ``done``) a part of it: before the next one :meth:`raise_rate` is called again."""
        for group, rate in zip(groups, self._before, strict=False):
            group["lr"] = rate
        self._before = []
        if self._ends and done:
            self._raised, self._ends = None, False

    def host_state(self) -> dict[str, Any]:
        """As of the end of the last step."""
        found = {} if self.norms is None else self.norms.host_state()
        return found if self._raised is None else {**found, RAISED_RATE: self._raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`host_state` returned."""
        self._raised = state.get(RAISED_RATE)
        self._before, self._ends = [], False
        if self.norms is not None:
            self.norms.restore(state)
