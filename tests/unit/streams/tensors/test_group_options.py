"""A parameter group's options: what plain values do not tell of them is told beside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training import memory
from tests.unit.streams.tensors.lives import life
from tiercheck.format import host_state
from tiercheck.streams.tensors.group_options import (
    GroupOptions,
    merged_options,
    plain_options,
    set_options,
    tensor_options,
)

LAST = 9


def back(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = host_state.unpack(host_state.pack(options))
    return found


def test_plain_values_come_back() -> None:
    group = {"params": [], "lr": 0.1, "betas": (0.9, 0.95), "fused": None, "name": "head"}
    assert plain_options(group) == {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "name": "head"}
    other: dict[str, Any] = {"params": [1], "lr": 1.0}
    set_options(other, plain_options(group))
    assert other == {**group, "params": [1]}


@pytest.mark.parametrize(
    "lr", [torch.tensor(0.1), torch.tensor([0.1], dtype=torch.float64)], ids=["no dimension", "one element"]
)
def test_a_tensor_is_a_number_to_most_and_comes_back_as_it_was(lr: torch.Tensor) -> None:
    options = back(plain_options({"params": [], "lr": lr, "betas": (torch.tensor(0.5), 0.9)}))
    assert options["lr"] == lr.item()
    assert tensor_options(options) == ["betas", "lr"]
    held = lr * 0
    for group in ({}, {"lr": 0.5}, {"lr": torch.zeros(3)}, {"lr": held}):
        set_options(group, options)
        assert torch.equal(group["lr"], lr)
        assert group["lr"].dtype is lr.dtype
        assert torch.is_tensor(group["betas"][0])
        assert group.keys() == {"lr", "betas"}
    assert torch.equal(held, lr), "the tensor that the group holds is filled: others may hold it, too"


def test_what_has_gone_and_what_is_a_number_now_is_told() -> None:
    group: dict[str, Any] = {"params": [], "lr": torch.tensor(0.1), "boost": 2.0}
    options = GroupOptions([group])
    before = back(options.plain([group])[0])
    del group["boost"]
    group["lr"] = 0.2
    after = back(options.plain([group])[0])
    made: dict[str, Any] = {"params": [], "lr": torch.tensor(0.1), "boost": 2.0}
    set_options(made, after)
    assert made == {"params": [], "lr": 0.2}
    assert isinstance(made["lr"], float)
    set_options(made, before)
    assert torch.is_tensor(made["lr"])
    assert made["boost"] == 2.0


def test_a_number_that_the_script_gives_as_a_tensor_now_is_a_number_again() -> None:
    """A version from before the script was changed: steps with a tensor have other bits. An option that the script has
    got since stays."""
    group: dict[str, Any] = {"params": [], "lr": torch.tensor(0.1), "initial_lr": 0.1}
    set_options(group, {"lr": 0.25})
    assert (group["lr"], type(group["lr"]), group["initial_lr"]) == (0.25, float, 0.1)


def test_what_was_saved_takes_the_place_of_all_that_is_here() -> None:
    """As on other ranks: a group's options are those of the script, and those that were saved in their place."""
    script: dict[str, Any] = {"params": [], "lr": torch.tensor(0.1), "boost": 2.0, "more": torch.tensor(3.0)}
    here = plain_options(script)
    options = GroupOptions([script])
    group = dict(script)
    set_options(group, merged_options(here, {"lr": 0.05}))  # from before the script made a tensor of it
    assert (group["lr"], type(group["lr"])) == (0.05, float)
    assert torch.equal(group["more"], torch.tensor(3.0))
    trained = dict(script, lr=0.05)
    del trained["boost"]
    saved = options.plain([trained])[0]
    group = dict(script, lr=torch.tensor(0.1))
    set_options(group, merged_options(here, saved))
    assert (group["lr"], type(group["lr"])) == (0.05, float)
    assert "boost" not in group
    set_options(group, merged_options(here, {}))
    assert torch.equal(group["lr"], torch.tensor(0.1)), "as the script gave it"
    assert group["boost"] == 2.0


class Boosted(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(group.get("boost", 1.0))
        return super().step(closure)


def changing(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], change: Callable[[dict[str, Any]], Any]
) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """In the first life, the options change behind the second step."""
    lives = itertools.count(1)

    def made(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        if next(lives) == 1:
            steps = itertools.count(1)
            optimizer.register_step_post_hook(lambda *_: next(steps) == 2 and change(optimizer.param_groups[0]))
        return optimizer

    return made


def boosted(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Boosted([{"params": list(model.parameters()), "boost": 2.0}], lr=0.1)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (boosted, lambda group: group.pop("boost")),
        (adamw, lambda group: group.update(lr=torch.tensor(1 / 3e3))),
    ],
    ids=["an option goes", "a number becomes a tensor"],
)  # fmt: skip
@pytest.mark.parametrize("ends", [(3,), (4,), (6, 7)], ids=["before a base", "at a base", "between, twice"])
def test_options_that_change_in_mid_training_are_resumed_bit_for_bit(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer],
    change: Callable[[dict[str, Any]], None],
    ends: tuple[int, ...],
) -> None:
    whole = life(memory(), LAST, changing(make, change), base_every=4)
    url, kind = memory(), changing(make, change)
    for last in (*ends, LAST):
        found = life(url, last, kind, base_every=4)
    assert found == whole
    assert found != life(memory(), LAST, make, base_every=4), "the change matters"
