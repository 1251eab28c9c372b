"""Gradients that are computed within the step, by a closure that the optimizer calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training import Training, life, memory
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.types import Fidelity

LAST = 7
"""Bases are due at 4 and 8: from 4 on differentials lead to the newest version."""


class Closed(Training):
    """Its loop gives the step a closure, with forward and backward pass in it."""

    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def step(self, version: int) -> None:
        self.closed_step(version)
        if self.scheduler is not None:
            self.scheduler.step()
        if self.checkpointer is not None:
            self.checkpointer.end_iteration()
        self.states[version] = self.parameters()

    def closed_step(self, version: int) -> None:
        self.optimizer.step(lambda: self.loss(version))

    def loss(self, version: int) -> float:
        self.backward(version)
        return float(version)


class ClosedByName(Closed):
    def closed_step(self, version: int) -> None:
        assert self.optimizer.step(closure=lambda: self.loss(version)) == version, "the loss goes to the loop"


@pytest.mark.parametrize("kind", [Closed, ClosedByName])
@pytest.mark.parametrize("scheduled", [False, True])
def test_such_steps_are_resumed_bit_for_bit(kind: type[Closed], scheduled: bool) -> None:
    url = memory()

    def made() -> Closed:
        training = kind()
        if scheduled:
            training.scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 3, gamma=0.5)
        return training

    alone, before, after = made(), made(), made()
    attached = before.attach(Hierarchy.of(url), base_every=4, bases="capture", scheduler=before.scheduler)
    with life(attached):
        for version in range(1, LAST + 1):
            alone.step(version)
            before.step(version)
        assert attached.stats.bases == 2, "the one at the start, and the one that was due"
    with life(checkpointer := after.attach(Hierarchy.of(url), scheduler=after.scheduler)):
        assert checkpointer.recovery is not None
        assert (checkpointer.version, checkpointer.recovery.replayed) == (LAST, LAST - 4)
        assert checkpointer.recovery.fidelity is Fidelity.EXACT
        assert after.parameters() == alone.states[LAST]
        for version in range(LAST + 1, LAST + 4):
            alone.step(version)
            after.step(version)
        assert after.parameters() == alone.states[LAST + 3]


class Ascends(torch.optim.AdamW):
    """Moves the parameters before it has the closure compute the gradients that it steps on, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(1.01)
        return super().step(closure)


def test_an_optimizer_that_moves_parameters_before_its_closure_is_called_approximate() -> None:
    """Gradients alone do not lead to its versions: each gets a base. Nothing tells its write from a late one of the
    loop's."""
    url = memory()
    before = Closed(Ascends)
    with life(before.attach(Hierarchy.of(url), bases="capture")):
        for version in range(1, 4):
            before.step(version)
    after = Closed(Ascends)
    with life(checkpointer := after.attach(Hierarchy.of(url))):
        assert checkpointer.recovery is not None
        assert (checkpointer.version, checkpointer.recovery.replayed) == (3, 0)
        assert checkpointer.recovery.fidelity is Fidelity.APPROXIMATE
        assert after.parameters() == before.states[3]


class Twice(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


class Never(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class Scaled(torch.optim.AdamW):
    def step(self, closure: Any = None, scale: float | None = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (torch.optim.LBFGS, "LBFGS cannot step without a closure, and calls it as often as it likes"),
        (Twice, "calls its closure twice within one step; supported is"),
        (Never, "has stepped without calling its closure"),
    ],
)
def test_what_is_no_step_on_one_gradient_is_refused(optimizer: type[torch.optim.Optimizer], told: str) -> None:
    training = Closed(optimizer)
    with life(training.attach(Hierarchy.of(memory())), flush=False), pytest.raises(UnsupportedSetup, match=told):
        training.step(1)


def test_other_arguments_are_refused() -> None:
    training = Closed(Scaled)
    with life(training.attach(Hierarchy.of(memory())), flush=False):
        step: Any = training.optimizer.step
        for arguments in ({"scale": 2.0}, {"closure": lambda: 0.0, "scale": 2.0}, {"closure": 3}):
            with pytest.raises(UnsupportedSetup, match="more than a closure, which a replay lacks"):
                step(**arguments)
        with pytest.raises(UnsupportedSetup, match="more than a closure, which a replay lacks"):
            step(3)


def test_a_closure_that_fails_costs_the_iteration_alone() -> None:
    url = memory()
    before = Closed()
    with life(before.attach(Hierarchy.of(url))):
        before.step(1)
        with pytest.raises(ZeroDivisionError):
            before.optimizer.step(lambda: 1 / 0)
        before.step(2)
    after = Closed()
    with life(checkpointer := after.attach(Hierarchy.of(url))):
        assert checkpointer.version == 2
        assert after.parameters() == before.states[2]
