"""Attaching: what can refuse refuses before a tier is touched, and a failure leaves the tiers as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy


class Accelerated(torch.optim.Optimizer):
    """As ``accelerate.optimizer.AcceleratedOptimizer``: an Optimizer whose own ``__init__`` never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Lookahead(torch.optim.Optimizer):
    """Holds slow weights of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


class Hollow(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters)}]


def test_a_wrapped_optimizer_is_unwrapped() -> None:
    url = memory()
    training = Training()
    training.optimizer = Accelerated(Accelerated(training.optimizer))
    with training.attach(Hierarchy.of(url)):
        training.step(1)
        training.step(2)
    after = Training()
    after.optimizer = Accelerated(after.optimizer)
    checkpointer = after.attach(Hierarchy.of(url))
    checkpointer.abort()
    assert (checkpointer.version, after.parameters()) == (2, training.states[2])


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (Lookahead, "Lookahead wraps AdamW and holds groups or state of its own"),
        (lambda optimizer: optimizer.state_dict(), "optimizer= must be a torch.optim.Optimizer, not dict"),
        (lambda optimizer: Hollow(optimizer.param_groups[0]["params"]), "Hollow has no step hooks"),
    ],
)
def test_what_cannot_be_seen_stepping_is_refused_before_a_tier_is_touched(
    tmp_path: Path, wrap: Any, message: str
) -> None:
    training = Training()
    training.optimizer = wrap(training.optimizer)
    with pytest.raises(UnsupportedSetup, match=message):
        training.attach(Hierarchy.of(memory(), f"nvme://{tmp_path}/durable?survives=rack"))
    assert not list(tmp_path.iterdir())
