"""How a rank of the demo trains: with a copy of the model and windows of its own, or as one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from tiercheck.demo.settings import TrainingSettings
from tiercheck.demo.training.model import GPT, Block, Embedding, Head, cross_entropy, initialise
from tiercheck.demo.training.text import Bytes, batch_at

__all__ = ["Iterate", "build_model", "iterate_by"]

Iterate = Callable[[int], torch.Tensor]
"""Trains a version and returns its loss, in nats: the rank's, or that of the pipeline's last stage."""


def build_model(settings: TrainingSettings) -> nn.Module:
    """The GPT, or this rank's stage of it. The same values at each start."""
    if settings.stages:
        return build_stage(settings)
    torch.manual_seed(settings.seed)  # the same on every rank
    return GPT(
        width=settings.width,
        layers=settings.layers,
        heads=settings.heads,
        sequence=settings.sequence,
        dropout=settings.dropout,
    )


def build_stage(settings: TrainingSettings) -> nn.Module:
    """As many blocks as the other stages have. The first stage has the embedding as well, the last one the head."""
    block = LayerSpec(Block, settings.width, settings.heads, settings.dropout)
    stage: nn.Module = PipelineModule(
        [
            LayerSpec(Embedding, settings.width, settings.sequence, settings.dropout),
            *[block] * settings.layers,
            LayerSpec(Head, settings.width),
        ],
        num_stages=settings.stages,
        loss_fn=cross_entropy,
        partition_method="type:Block",
    )
    for name, layer in stage.named_children():
        if name.isdigit():  # the layer's place; other children are DeepSpeed's own
            torch.manual_seed(settings.seed + int(name))  # no two layers begin alike
            initialise(layer, settings.layers)
    return stage


def iterate_by(engine: Any, settings: TrainingSettings, corpus: Bytes, rank: int) -> Iterate:
    """How this engine trains a version."""

    def windows(version: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch_at(
            corpus,
            seed=settings.seed,
            version=version,
            rank=place,
            micro_batch=settings.micro_batch,
            sequence=settings.sequence,
        )
        return torch.from_numpy(inputs).to(settings.device), torch.from_numpy(targets).to(settings.device)

    def as_copy(version: int) -> torch.Tensor:
        loss: torch.Tensor = engine(*windows(version, rank))
        engine.backward(loss)
        engine.step()
        return loss

    def as_stage(version: int) -> torch.Tensor:
        def micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for place in range(settings.micro_batches):
                yield windows(version, place)

        loss: torch.Tensor = engine.train_batch(data_iter=micro_batches())
        return loss

    return as_stage if settings.stages else as_copy
