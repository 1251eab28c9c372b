"""Hooks of the user's on the same optimizer: what they change is recorded, whenever they were registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.types import Fidelity


def turn_around(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(-0.5)


def bound(optimizer: torch.optim.Optimizer, *_: object) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_gradients_that_another_hook_changes_are_recorded_as_the_step_has_them(registered: str) -> None:
    url = memory()
    training = Training()
    if registered == "before":
        training.optimizer.register_step_pre_hook(turn_around)
    checkpointer = training.attach(Hierarchy.of(url))
    if registered == "after":
        training.optimizer.register_step_pre_hook(turn_around)
    for version in range(1, 6):
        training.step(version)
    checkpointer.abort()
    after = Training()
    resumed = after.attach(Hierarchy.of(url))
    assert (resumed.version, resumed.recovery.fidelity) == (5, Fidelity.EXACT)  # type: ignore[union-attr]
    assert after.parameters() == training.states[5]
    resumed.abort()


@pytest.mark.parametrize("registered", ["before", "after"])
def test_parameters_that_another_hook_changes_are_noticed(registered: str) -> None:
    """They are saved with the next version; what is written after the last step is not."""
    url = memory()
    training = Training()
    if registered == "before":
        training.optimizer.register_step_post_hook(bound)
    checkpointer = training.attach(Hierarchy.of(url))
    if registered == "after":
        training.optimizer.register_step_post_hook(bound)
    for version in range(1, 6):
        training.step(version)
    checkpointer.abort()
    after = Training()
    resumed = after.attach(Hierarchy.of(url))
    assert resumed.version == 5
    resumed.abort()
    bound(after.optimizer)
    assert after.parameters() == training.states[5]


def test_a_hook_that_comes_in_the_middle_of_an_iteration_is_refused() -> None:
    training = Training()
    checkpointer = training.attach(Hierarchy.of(memory()))
    training.backward(1)
    training.optimizer.register_step_pre_hook(turn_around)
    with pytest.raises(UnsupportedSetup, match="register it before the forward pass"):
        training.optimizer.step()
    training.step(1)
    assert checkpointer.version == 1
    checkpointer.abort()


@pytest.mark.parametrize("ended", ["close", "abort"])
def test_a_step_after_the_end_is_told_once(ended: str, caplog: pytest.LogCaptureFixture) -> None:
    training, url = Training(), memory()
    checkpointer = training.attach(Hierarchy.of(url))
    training.step(1)
    getattr(checkpointer, ended)()
    assert "saved nowhere" not in caplog.text
    training.step(2)
    training.step(3)
    assert caplog.text.count("saved nowhere") == 1
    assert not training.optimizer._optimizer_step_pre_hooks
    again = training.attach(Hierarchy.of(url))
    again.abort()
    caplog.clear()
    again = training.attach(Hierarchy.of(url))
    training.step(again.version + 1)
    assert "saved nowhere" not in caplog.text, "it is attached again"
    again.abort()


class Shrinks(torch.optim.AdamW):
    """torch runs hooks for both: the step of this class, and that of its base class within it."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.99)
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_base_class_is_one_step() -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # from here on its step has hooks of its own
    url = memory()
    training = Training(Shrinks)
    checkpointer = training.attach(Hierarchy.of(url), bases="capture")
    for version in range(1, 6):
        training.step(version)
    checkpointer.abort()
    assert checkpointer.stats.bases == 1
    after = Training(Shrinks)
    resumed = after.attach(Hierarchy.of(url))
    assert resumed.recovery is not None
    assert (resumed.version, resumed.recovery.replayed, resumed.recovery.fidelity) == (5, 5, Fidelity.EXACT)
    assert after.parameters() == training.states[5]
    resumed.abort()
