"""The layers of a stage of a pipeline, and the norms of their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.integrations.torch.stages import layer_of, norms_of, replicas_of, stage_of


class Stage(torch.nn.Module):
    """The last one of a model: two blocks, a norm and a head, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.blocks = torch.nn.ModuleDict({str(each): torch.nn.Linear(2, 2) for each in (9, 10)})
        self.norm = torch.nn.LayerNorm(2)
        self.head = torch.nn.Linear(2, 3, bias=False)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.7.weight", "model.layers.3"),
        ("3.weight", "3"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("scale", "scale"),
    ],
)
def test_a_layer_is_what_is_numbered_first(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_stages_layers_come_in_the_models_order_under_its_names() -> None:
    model = Stage()
    model.norm.requires_grad_(False)
    found = stage_of((3, 4), torch.compile(model), optimizer_of(model), scheduled=True)  # type: ignore[arg-type]
    assert list(found.layers) == ["scale", "blocks.9", "blocks.10", "head"]
    assert found.layers["blocks.10"] == {"weight": (2, 2), "bias": (2,)}
    assert found.layers["scale"] == {"": ()}
    assert set(found.tied) == {"scale", "head"}
    assert (found.stage, found.stages, found.copies, found.scheduled) == (3, 4, None, True)


def test_a_stage_without_numbers_ties_nothing() -> None:
    """Its names may be those of each stage: ``linear.weight``."""
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2)})
    assert list(stage_of((0, 2), model, optimizer_of(model), scheduled=False).tied) == []


@pytest.mark.parametrize("place", [None, 3, (4, 4), (-1, 4), (0.0, 4), (True, 2), [0, 4], (0, 4, 1)])
def test_a_place_that_is_none_is_refused(place: Any) -> None:
    model = Stage()
    with pytest.raises(ConfigurationError, match=r"stage= is which stage .* such as \(stage\.stage_index"):
        stage_of(place, model, optimizer_of(model), scheduled=False)


def test_complex_parameters_are_refused_by_name() -> None:
    model = Stage()
    model.scale = torch.nn.Parameter(torch.ones((), dtype=torch.complex64))
    with pytest.raises(UnsupportedSetup, match="scale is complex"):
        stage_of((0, 2), model, optimizer_of(model), scheduled=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_measured_by_layer(dtype: torch.dtype) -> None:
    model = Stage().to(dtype)
    optimizer = optimizer_of(model)
    norms = norms_of(model, optimizer)
    for each in model.parameters():
        each.grad = torch.full_like(each, 300.0)
    norms.measure(ModuleProvider(model, optimizer).gradients())
    found = norms.host_state()["gradient_norms"]
    elements = {"scale": 1, "blocks.9": 6, "blocks.10": 6, "norm": 4, "head": 6}
    assert {name: math.sqrt(square) for name, square in found.items()} == pytest.approx(
        {name: 300.0 * math.sqrt(count) for name, count in elements.items()}
    ), "also if a square has no fp16 number"


class Placed:
    """What is asked of a ``DTensor``."""

    def __init__(self, sizes: tuple[int, ...], *placements: Any) -> None:
        self.device_mesh = torch.zeros(sizes)
        self.device_mesh.mesh = self.device_mesh  # type: ignore[attr-defined]
        self.device_mesh.size = self.device_mesh.numel  # type: ignore[assignment,method-assign]
        self.placements = placements


def test_how_many_ranks_hold_the_same_elements() -> None:
    plain: Any = torch.nn.Parameter(torch.ones(2))
    both: Any = Placed((4, 2), Shard(0), Shard(0))
    norm: Any = Placed((4, 2), Shard(0), Replicate())
    assert replicas_of({"plain": plain}) == {}
    assert replicas_of({"both": both, "norm": norm, "plain": plain}) == {"both": 1, "norm": 2, "plain": 8}
