"""What an optimizer keeps that belongs to no parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training import memory
from tests.unit.streams.tensors.lives import life
from tiercheck.errors import UnsupportedSetup
from tiercheck.streams.tensors.joint import JointOptimizer
from tiercheck.streams.tensors.own_state import OwnState, same

LAST = 9


class Decaying(torch.optim.Optimizer):
    """Divides its rate by the steps that it has counted."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.label, self.offset = "decaying", 1

    def count(self) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        steps = self.count()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / steps)


class InState(Decaying):
    def count(self) -> float:
        shared = self.state.setdefault("shared", {"steps": torch.zeros((), dtype=torch.int64), "seen": [0]})
        shared["steps"] += 1
        shared["seen"][0] += 1
        return float(shared["steps"] + shared["seen"][0])


class AsNumber(Decaying):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._steps = 0

    def count(self) -> float:
        self._steps += 1
        return self._steps + self.offset


class AsTensor(Decaying):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.steps = torch.zeros(2)

    def count(self) -> float:
        self.steps[1] += 1
        return float(self.steps[1])


class MadeInTheStep(Decaying):
    def count(self) -> float:
        self.steps = getattr(self, "steps", 0.5) + 1.0
        return self.steps


def one(kind: type[torch.optim.Optimizer]) -> Callable[[torch.nn.Module], Any]:
    return lambda model: kind(model.parameters(), **{})


def two(model: torch.nn.Module) -> Any:
    weight, bias = model.parameters()
    return [AsNumber([weight]), InState([bias])]


@pytest.mark.parametrize(
    "make", [one(InState), one(AsNumber), one(AsTensor), one(MadeInTheStep), two],
    ids=["under a key in the state", "a number", "a tensor", "made in the step", "of two optimizers"],
)  # fmt: skip
def test_it_is_resumed_bit_for_bit(make: Callable[[torch.nn.Module], Any]) -> None:
    """Also if the life before ended at a base, or has taken a step since it was resumed."""
    whole = life(memory(), LAST, make, base_every=4)
    url = memory()
    for last in (3, 4, 5, LAST):
        found = life(url, last, make, base_every=4)
    assert found == whole


def test_only_what_a_step_changes_is_saved_and_what_is_not_is_as_the_script_made_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = AsNumber([parameter])
    own = OwnState(optimizer)
    assert own.added_to([{"lr": 0.1}]) == [{"lr": 0.1}]
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(2):
        optimizer.step()
        own.look()
    options = own.added_to([{"lr": 0.1}, {"lr": 0.2}])
    assert options[0] == {"lr": 0.1, "tiercheck.own_state": {"0": {"attributes": {"_steps": 2}}}}
    assert own.taken_from([{"lr": 0.1}]) == [{"lr": 0.1}]
    assert optimizer._steps == 0
    assert own.taken_from(options) == [{"lr": 0.1}, {"lr": 0.2}]
    assert (optimizer._steps, optimizer.label, optimizer.offset) == (2, "decaying", 1)


def test_what_was_under_a_key_from_the_start_is_there_if_a_version_lacks_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = InState([parameter])
    optimizer.state["shared"] = {"steps": torch.tensor(5), "seen": [5]}
    own = OwnState(optimizer)
    optimizer.count()
    own.look()
    own.taken_from([{"lr": 0.1}])
    assert optimizer.count() == 12


def test_a_number_that_becomes_nan_is_seen_to_change() -> None:
    assert same(math.nan, math.nan)
    assert not same(3.0, math.nan)
    assert not same(math.nan, 3.0)


def test_torchs_own_optimizers_keep_nothing_of_the_kind() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    joint = JointOptimizer([torch.optim.AdamW(parameters[:1], fused=True), torch.optim.Adagrad(parameters[1:])])
    own = OwnState(joint)
    for each in parameters:
        each.grad = torch.ones(1)
    for each in joint.parts:
        each.step()
    own.look()
    assert own.added_to([{}, {}]) == [{}, {}]


def test_a_key_that_no_version_can_hold_is_refused_at_the_first_step() -> None:
    class Odd(Decaying):
        def count(self) -> float:
            self.state[("a", "pair")] = {}
            return 1.0

    with pytest.raises(UnsupportedSetup, match=r"Odd keeps state under \('a', 'pair'\), which is neither a parameter"):
        life(memory(), 1, one(Odd), base_every=4)
