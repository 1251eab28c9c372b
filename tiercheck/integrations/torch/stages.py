"""The stage of a pipeline that a loop of torch trains: its layers, and what measures their gradients.

A layer is what is numbered first in a parameter's name: ``model.layers.3.norm.weight`` is of ``model.layers.3``. What
has no number in it (an embedding, a last norm, a head) is of the module that it is in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tiercheck.errors import ConfigurationError, UnsupportedSetup
from tiercheck.integrations.torch.module_provider import masters_by_name
from tiercheck.streams.tensors.joint import AnyOptimizer
from tiercheck.streams.tensors.module_tensors import ModuleTensors
from tiercheck.streams.tensors.stage import GradientNorms, PipelineStage
from tiercheck.types import shown

__all__ = ["norms_of", "stage_of"]


def stage_of(place: Any, model: torch.nn.Module, optimizer: AnyOptimizer, *, scheduled: bool) -> PipelineStage:
    """``place``: which stage ``model`` is, and of how many. Errors: ``ConfigurationError``; ``UnsupportedSetup``."""
    stage, stages = checked(place)
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    trained = trained_by_name(model, optimizer)
    for name, parameter in trained.items():
        layer = layer_of(name)
        if parameter.is_complex():
            raise UnsupportedSetup(f"{name} is complex, and a lost stage is made of real numbers: leave stage= out")
        layers.setdefault(layer, {})[name.removeprefix(layer).removeprefix(".")] = tuple(parameter.shape)
    plain = [layer for layer in layers if not is_numbered(layer)]
    return PipelineStage(
        stage=stage,
        stages=stages,
        copies=min(replicas_of(trained).values(), default=None),
        layers=layers,
        tied=plain if len(plain) < len(layers) else (),
        scheduled=scheduled,
    )


def norms_of(model: torch.nn.Module, optimizer: AnyOptimizer) -> GradientNorms:
    """What measures the gradients of this rank's masters. Of what more ranks hold than the stage's other parameters
    (tensor parallelism replicates some), each measures its share."""
    tensors, masters = ModuleTensors(model), masters_by_name(model, optimizer)
    replicas = replicas_of(masters)
    layers = {name: layer_of(tensors.model_name(name)) for name in masters}
    parts = {name: [(layers[name], 0, math.prod(parameter.shape))] for name, parameter in masters.items()}
    weights = {name: min(replicas.values()) / each for name, each in replicas.items()}
    return GradientNorms(dict.fromkeys(layers.values()), parts, weights)


def checked(place: Any) -> tuple[int, int]:
    whole = isinstance(place, tuple) and len(place) == 2 and all(type(each) is int for each in place)
    if not whole or not 0 <= place[0] < place[1]:
        raise ConfigurationError(
            "stage= is which stage of the pipeline this rank is, from 0, and of how many, such as "
            f"(stage.stage_index, stage.num_stages) of a torch.distributed.pipelining.PipelineStage, not {shown(place)}"
        )
    return int(place[0]), int(place[1])


def trained_by_name(model: torch.nn.Module, optimizer: AnyOptimizer) -> dict[str, torch.nn.Parameter]:
    """By the model's names, in their order in it."""
    tensors, masters = ModuleTensors(model), masters_by_name(model, optimizer)
    ordered = dict.fromkeys((*(name for name, _ in model.named_parameters() if name in masters), *masters))
    return {tensors.model_name(name): masters[name] for name in ordered}


def layer_of(name: str) -> str:
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return name if len(parts) == 1 else ".".join(parts[:-1] if first is None else parts[: first + 1])


def is_numbered(layer: str) -> bool:
    return layer.split(".")[-1].isdigit()


def replicas_of(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, int]:
    """By name, how many ranks of the stage hold the same elements of a parameter; empty if all hold all."""
    meshes = {
        name: mesh for name, each in parameters.items() if (mesh := getattr(each, "device_mesh", None)) is not None
    }
    every = max((mesh.size() for mesh in meshes.values()), default=1)
    return {name: in_mesh(each) if name in meshes else every for name, each in parameters.items()} if meshes else {}


def in_mesh(parameter: Any) -> int:
    sizes = zip(parameter.placements, parameter.device_mesh.mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
