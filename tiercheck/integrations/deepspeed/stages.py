"""The stage of a pipeline's engine: where it stands, its layers, and where their gradients are.

DeepSpeed names a parameter by its layer's place in the whole pipeline (``5.norm.weight``). A tied layer is named by its
key (``tied_modules.embed.weight``), and all stages that tie it have it under that name.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from tiercheck.integrations.deepspeed.layouts import MasterLayout
from tiercheck.streams.tensors.beside import Beside
from tiercheck.streams.tensors.module_tensors import ModuleTensors
from tiercheck.streams.tensors.stage import GradientNorms, PipelineStage, runs_of

__all__ = ["norms_of", "stage_of"]

TIED = "tied_modules"


def stage_of(engine: object, layout: MasterLayout, tensors: ModuleTensors, beside: Beside) -> PipelineStage | None:
    """``None`` if the engine is no pipeline's."""
    if not isinstance(engine, PipelineEngine):
        return None
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, parameter in named(layout, tensors):
        layer = layer_of(name)
        layers.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = tuple(parameter.shape)
    copies = engine.grid.get_data_parallel_world_size() if engine.zero_optimization_stage() == 0 else 1
    schedules = (each for each in beside.given() if isinstance(each, torch.optim.lr_scheduler.LRScheduler))
    return PipelineStage(
        stage=engine.stage_id,
        stages=engine.num_stages,
        copies=copies,
        layers=dict(sorted(layers.items(), key=lambda each: place_of(each[0]))),
        tied=[layer for layer in layers if layer.startswith(TIED)],
        scheduled=engine.lr_scheduler is not None or any(schedules),
    )


def norms_of(layout: MasterLayout, tensors: ModuleTensors) -> GradientNorms:
    """What measures the gradients of this rank's masters."""
    layers = {id(parameter): layer_of(name) for name, parameter in named(layout, tensors)}
    parts = {
        master.name: [
            *runs_of((None if span.parameter is None else layers[id(span.parameter)], span.length) for span in spans)
        ]
        for master, spans in zip(layout.masters(), layout.spans(), strict=True)
    }
    return GradientNorms(sorted(set(layers.values()), key=place_of), parts)


def named(layout: MasterLayout, tensors: ModuleTensors) -> Iterable[tuple[str, torch.Tensor]]:
    """The trained parameters of the rank's module, by the model's names."""
    trained = {id(parameter) for group in layout.trained() for parameter in group}
    for name, parameter in tensors.parameters().items():
        if id(parameter) in trained:
            yield tensors.model_name(name), parameter


def layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == TIED else 1])


def place_of(layer: str) -> tuple[int, str]:
    """Sorts layers as they come in the pipeline; tied ones come first."""
    return (int(layer), "") if layer.isdigit() else (-1, layer)
