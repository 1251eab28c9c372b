"""A module's tensors by name: always those that torch itself would name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tiercheck.streams.tensors.module_tensors import ModuleTensors


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("absent", None)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(3, 3)
        self.head.weight = self.blocks[0].linear.weight
        self.again = self.blocks[1]
        self.missing = None
        self.scale = torch.nn.Parameter(torch.ones(1))


def check(model: torch.nn.Module, tensors: ModuleTensors) -> None:
    parameters = tensors.parameters()
    assert list(parameters) == [name for name, _ in model.named_parameters()]
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = tensors.buffers()
    assert list(buffers) == [name for name, _ in model.named_buffers() if name in saved]
    assert all(buffers[name].data_ptr() == saved[name].data_ptr() for name in buffers)


def test_the_names_are_torchs() -> None:
    model = Model()
    tensors = ModuleTensors(model)
    check(model, tensors)
    assert "blocks.0.table" not in tensors.buffers()
    assert "blocks.0.steps" in tensors.buffers()
    assert "head.weight" not in tensors.parameters(), "it is named by its first owner"


def test_what_is_shared_has_other_names_too() -> None:
    aliases = ModuleTensors(Model()).aliases()
    assert aliases["head.weight"] == "blocks.0.linear.weight"
    assert aliases["again.steps"] == "blocks.1.steps"
    assert aliases.keys() == {"head.weight", *(f"again.{name}" for name in Block().state_dict())}


def rename(model: Model) -> None:
    model.tail = model.head
    del model.head


def changes() -> dict[str, Callable[[Model], object]]:
    return {
        "a module replaced": lambda model: setattr(model, "head", torch.nn.Linear(2, 2)),
        "a module replaced far below": lambda model: setattr(model.blocks[2], "norm", torch.nn.BatchNorm1d(5)),
        "a module added": lambda model: model.blocks.append(Block()),
        "a module removed": lambda model: delattr(model, "again"),
        "a module renamed": rename,
        "a module where none was": lambda model: setattr(model, "missing", Block()),
        "a parameter added": lambda model: setattr(model, "bias", torch.nn.Parameter(torch.ones(2))),
        "a parameter no longer shared": lambda model: setattr(
            model.head, "weight", torch.nn.Parameter(torch.ones(3, 3))
        ),
        "a buffer added": lambda model: model.head.register_buffer("mask", torch.ones(4)),
        "a buffer replaced": lambda model: setattr(model.blocks[0], "steps", torch.ones(7)),
        "a buffer filled": lambda model: setattr(model.blocks[0], "absent", torch.ones(7)),
        "a buffer made persistent": lambda model: model.blocks[0].register_buffer("table", torch.ones(3)),
    }


@pytest.mark.parametrize("change", changes())
def test_what_changes_is_noticed(change: str) -> None:
    model = Model()
    tensors = ModuleTensors(model)
    check(model, tensors)
    changes()[change](model)
    check(model, tensors)


class Scripted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.steps


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_modules_that_are_compiled_to_torchscript() -> None:
    """They have no dictionaries, but something like them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.jit.script(Scripted()))
    tensors = ModuleTensors(model)
    assert list(tensors.parameters()) == [name for name, _ in model.named_parameters()]
    assert list(tensors.buffers()) == ["1.steps"]
    assert all(ours is theirs for ours, theirs in zip(tensors.parameters().values(), model.parameters(), strict=True))
    assert [*map(tensors.model_name, tensors.parameters())] == [*tensors.parameters()]
    assert tensors.aliases() == {}


def test_a_module_without_any() -> None:
    tensors = ModuleTensors(torch.nn.Identity())
    assert tensors.parameters() == {}
    assert tensors.buffers() == {}
