"""Which code an optimizer runs: a replay that calls another one is not called exact."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import Training, memory
from tiercheck.checkpointer import Checkpointer
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.replay import libraries
from tiercheck.streams.replay.libraries import library_of
from tiercheck.types import Fidelity

SOURCE = """
import torch

SHARPNESS = 1

def sign(gradient):
    return clamped(gradient).sign()

def clamped(gradient):
    return gradient.clamp(-1, 1)

def other():
    return 1

class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(sign(parameter.grad), alpha=-group["lr"])
"""


class Module:
    """A user's module with an optimizer, which is edited between two lives of the job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lion(self, source: str = SOURCE) -> Any:
        library_of.cache_clear()
        self.path.write_text(source)
        sys.modules.pop(self.path.stem, None)
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.path.stem] = module
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            spec.loader.exec_module(module)
        finally:
            sys.dont_write_bytecode = before
        linecache.checkcache()
        return module.Lion


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Module]:
    yield Module(tmp_path / "my_lion.py")
    sys.modules.pop("my_lion", None)


def resumed(optimizer: Any, hierarchy: Hierarchy) -> Checkpointer:
    training = Training(optimizer)
    checkpointer = training.attach(hierarchy)
    for version in range(checkpointer.version + 1, checkpointer.version + 3):
        training.step(version)
    checkpointer.abort()
    return checkpointer


@pytest.mark.parametrize(
    ("before", "after", "fidelity"),
    [
        ("sharpness", "sharpness", Fidelity.EXACT),
        ("return 1", "return 2", Fidelity.EXACT),
        ("alpha=-group", "alpha=-2 * group", Fidelity.APPROXIMATE),
        ("clamp(-1, 1)", "clamp(-2, 2)", Fidelity.APPROXIMATE),
    ],
    ids=["nothing", "what it does not run", "its step", "what its step calls"],
)
def test_an_optimizer_whose_code_has_changed_is_another(
    module: Module, before: str, after: str, fidelity: Fidelity
) -> None:
    hierarchy = Hierarchy.of(memory())
    resumed(module.lion(), hierarchy)
    recovery = resumed(module.lion(SOURCE.replace(before, after)), hierarchy).recovery
    assert recovery is not None
    assert (recovery.version, recovery.fidelity) == (2, fidelity)
    assert [note for note in recovery.notes if "library code" in note] == list(recovery.notes)
    assert bool(recovery.notes) == (fidelity is not Fidelity.EXACT)


def test_another_version_of_its_library_is_another_optimizer(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    hierarchy = Hierarchy.of(memory())
    monkeypatch.setattr(libraries, "packages", lambda: {"my_lion": ["lion-pytorch"]})
    version = ["0.1"]
    monkeypatch.setattr(metadata, "version", lambda name: version[0])
    resumed(module.lion(), hierarchy)
    version[0] = "0.2"
    recovery = resumed(module.lion(), hierarchy).recovery
    assert recovery is not None
    assert recovery.fidelity is Fidelity.APPROXIMATE
    (note,) = recovery.notes
    assert "library lion-pytorch 0.1, code " in note
    assert "-> lion-pytorch 0.2, code " in note


def test_torch_tells_of_its_own() -> None:
    assert library_of(torch.optim.AdamW) == library_of(torch.optim.SGD) == ""


def test_a_class_without_source_is_told_by_what_it_was_compiled_to() -> None:
    def made(rate: str) -> type:
        space: dict[str, Any] = {"torch": torch, "__name__": "a_cell_that_is_gone"}
        exec(f"class Plain(torch.optim.SGD):\n  def rate(self):\n    return [each * {rate} for each in (1, 2)]", space)
        kind: type = space["Plain"]
        return kind

    assert library_of(made("2")) == library_of(made("2"))
    assert library_of(made("2")) != library_of(made("3"))
    assert library_of(made("2")).startswith("code ")


def test_an_installed_library_is_named_with_its_version() -> None:
    class Derived(pytest.Item):  # any class of a distribution
        pass

    assert f"pytest {metadata.version('pytest')}" in library_of(Derived)
