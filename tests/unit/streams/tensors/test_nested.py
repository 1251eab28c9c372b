"""Lists and dictionaries of tensors that an optimizer keeps of a parameter."""

from __future__ import annotations

from typing import Any

import torch

import tiercheck
from tests.training import memory
from tests.unit.streams.tensors.lives import life
from tiercheck.streams.tensors.nested import flat, nested


class Preconditioned(torch.optim.Optimizer):
    """Keeps a factor of each dimension, as Shampoo and SOAP do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["factors"] = [torch.eye(size) for size in parameter.shape]
                    state["momentum"] = {"fast": (torch.zeros_like(parameter), 0.9), "steps": 0}
                gradient = parameter.grad
                rows = gradient.reshape(len(gradient), -1)
                fast, beta = state["momentum"]["fast"]
                fast.mul_(beta).add_(gradient)
                state["momentum"]["steps"] += 1
                state["factors"][0] = state["factors"][0] + 0.1 * rows @ rows.T
                parameter.add_(state["factors"][0] @ fast / state["momentum"]["steps"], alpha=-group["lr"])


def lived(url: str, last: int) -> list[bytes]:
    return life(url, last, lambda model: Preconditioned(model.parameters()), base_every=2)


def test_it_is_resumed_bit_for_bit() -> None:
    whole = lived(memory(), 9)
    url = memory()
    for last in (3, 4, 9):
        found = lived(url, last)
    assert found == whole


def test_tensors_in_it_are_stored_as_tensors() -> None:
    url = memory()
    lived(url, 4)
    with tiercheck.open(url) as archive:
        rebuilt = archive.rebuild(0, version=4)
    state = rebuilt.state.optimizer_state()["weight"]
    shapes = {key: tuple(each.shape) for key, each in state.items() if isinstance(each, torch.Tensor)}
    assert shapes == {"factors#0": (2, 2), "factors#1": (3, 3), "momentum#0": (2, 3)}


def test_flat_and_back() -> None:
    one, other = torch.ones(2), torch.zeros(())
    held = {"step": 3, "moment": one, "both": [one, {"deep": (other, None, "x")}], "plain": [1, 2], "empty": {}}
    found = flat(held)
    assert {key for key, each in found.items() if isinstance(each, torch.Tensor)} == {"moment", "both#0", "both#1"}
    assert nested(found) == held
    assert nested(flat({})) == {}
