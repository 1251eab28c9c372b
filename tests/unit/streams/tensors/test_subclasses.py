"""Tensors of an optimizer's state that are made of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

import tiercheck
from tests.training import memory
from tests.unit.streams.tensors.lives import life
from tiercheck.errors import Mismatch, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.tensors.subclasses import apart, whole


class Scaled(torch.Tensor):
    """Numbers of eight bits and their scale."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, levels: int, dtype: torch.dtype) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes, made.scale, made.levels = codes, scale, levels  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.levels, self.dtype]  # type: ignore[attr-defined]

    @classmethod
    def __tensor_unflatten__(cls, inside: Any, context: Any, size: Any, stride: Any) -> Scaled:
        assert tuple(size) == tuple(inside["codes"].shape)
        return cls(inside["codes"], inside["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            one = args[0]
            made = cls(one.codes.detach(), one.scale.detach(), one.levels, one.dtype)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        raise NotImplementedError(f"{func} of scaled numbers")

    @classmethod
    def of(cls, values: torch.Tensor) -> Scaled:
        scale = values.abs().max().clamp_min(1e-12).reshape(1) / 127
        return cls((values / scale).round().to(torch.int8), scale, 127, values.dtype)

    def values(self) -> torch.Tensor:
        return self.codes.to(torch.float32) * self.scale


class InEightBits(torch.optim.Optimizer):
    """Momentum, in eight bits."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                before = state["momentum"].values() if state else torch.zeros_like(parameter)
                state["momentum"] = Scaled.of(0.9 * before + parameter.grad)
                parameter.sub_(state["momentum"].values(), alpha=group["lr"])


def lived(url: str, last: int) -> list[bytes]:
    return life(url, last, lambda model: InEightBits(model.parameters()), base_every=3)


def test_it_is_resumed_bit_for_bit() -> None:
    expected = lived(memory(), 9)
    url = memory()
    for last in (2, 4, 6, 9):
        found = lived(url, last)
    assert found == expected
    with tiercheck.open(url) as archive:
        state = archive.rebuild(0, version=9).state.optimizer_state()["weight"]
    assert {key for key, each in state.items() if isinstance(each, torch.Tensor)} == {
        "momentum#codes",
        "momentum#scale",
    }


class Around(Scaled):
    """Whose codes are scaled in their turn."""


def test_apart_and_whole() -> None:
    inner = Scaled.of(torch.tensor([1.0, -2.0]))
    outer = Around(inner, torch.ones(1), 3, torch.bfloat16)
    held = {"step": torch.tensor(3.0), "plain": 1, "outer": outer}
    found = apart(held, "weight")
    tensors = {key for key, each in found.items() if isinstance(each, torch.Tensor)}
    assert tensors == {"step", "outer#codes#codes", "outer#codes#scale", "outer#scale"}
    back = whole(found)
    assert back.keys() == held.keys()
    assert (type(back["outer"]), back["outer"].dtype, back["outer"].levels) == (Around, torch.bfloat16, 3)
    assert type(back["outer"].codes) is Scaled
    assert torch.equal(back["outer"].codes.values(), inner.values())


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    class Odd(torch.Tensor):
        pass

    with pytest.raises(UnsupportedSetup, match=r"the optimizer's moment of weight is a Odd; supported are plain"):
        apart({"moment": torch.ones(2).as_subclass(Odd)}, "weight")
    strange = Scaled(torch.ones(2), torch.ones(1), {1}, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedSetup, match="is a tensor that holds a set, which cannot be saved"):
        apart({"moment": strange}, "weight")


@pytest.mark.parametrize("name", ["nowhere.Scaled", "os.path", "torch.Tensor", "torch.nn.Parameter", "Scaled", ""])
def test_no_class_is_imported_or_made_because_a_checkpoint_names_it(name: str) -> None:
    found = apart({"moment": Scaled.of(torch.ones(2))}, "weight")
    found["moment"]["tiercheck.made_of"]["class"] = name
    with pytest.raises(Mismatch, match="which this process has not imported"):
        whole(found)


def test_a_state_that_cannot_be_saved_is_refused_at_the_first_step() -> None:
    class Odd(torch.Tensor):
        pass

    class Strange(InEightBits):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["moment"] = torch.ones(2).as_subclass(Odd)

    model = torch.nn.Linear(3, 2)
    optimizer = Strange(model.parameters())
    checkpointer = attach(model, optimizer, Hierarchy.of(memory()))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UnsupportedSetup, match=r"moment of weight is a Odd"):
        optimizer.step()
    checkpointer.abort()
