"""The pipelines that ``lost_stage`` trains, and their tiers."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import distributed as dist
from torch import nn

from tests.cluster.deepspeed.harness import LENGTH, VOCABULARY, WIDTH, Block, Case, First, Last, deepspeed, objective
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import NotFound
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["BASE", "Job", "iterate"]

BASE = 3
"""A base is due at each third version."""


class Wide(Block):
    """As many layers as a block, of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Embedding(nn.Module):
    """The first layer, and the last one by :func:`scores`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(61, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


def scores(layer: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T


@dataclass
class Job:
    """A pipeline of a stage a rank (``data``: data-parallel copies), each of ``blocks`` blocks."""

    place: Path
    case: Case
    blocks: int = 2
    data: int = 1
    odd: Collection[int] = ()
    """The stages whose blocks have other shapes."""
    tied: bool = False
    hierarchy: Hierarchy = field(init=False)

    def __post_init__(self) -> None:
        job = hashlib.sha256(f"{os.getppid()} {self.place}".encode()).hexdigest()[:16]
        self.namespace = f"test-lost-{job}-{dist.get_rank()}"
        memory = f"shm://test-lost-{job}-{{rank}}?size=64MiB"
        self.hierarchy = Hierarchy.of(memory, f"nvme://{self.place}?survives=rack")
        self.stages = dist.get_world_size() // self.data

    def build(self, seed: int) -> Any:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        inner = [
            LayerSpec(Wide if stage in self.odd else Block) for stage in range(self.stages) for _ in range(self.blocks)
        ]
        ends = [LayerSpec(First)], [LayerSpec(Last)]
        if self.tied:
            tied = [TiedLayerSpec("embed", Embedding, forward_fn=each) for each in (None, scores)]
            ends = [tied[0]], [tied[1]]
        layers = [*ends[0], *inner, *ends[1]]
        model = PipelineModule(
            layers, num_stages=self.stages, loss_fn=objective, base_seed=seed, partition_method="type:Block|Wide"
        )
        parameters = [{"params": [each for each in model.parameters() if each.requires_grad]}]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=self.case.config())
        torch.manual_seed(seed + 100 * dist.get_rank())
        return engine

    def attach(self, engine: Any, lost: Any = None, base_every: int = BASE) -> Checkpointer:
        config = CheckpointConfig(base_every=base_every, batch=1, deadline_s=60, bases="capture")
        return attach(engine, self.hierarchy, config=config, on_lost_stage=lost)

    def lose(self, *ranks: int, before: int | None = None) -> None:
        """Every copy of what these ranks have saved, or all from version ``before`` on."""
        dist.barrier()
        if dist.get_rank() in ranks:
            remove_namespace(self.namespace)
            shards, markers = (self.place / where / f"r{dist.get_rank():05d}" for where in (".", "done"))
            for file in shards.rglob("*.safetensors"):
                if before is None or int(file.name[:12]) >= before:
                    file.unlink()
            if before is None:
                shutil.rmtree(markers, ignore_errors=True)  # without a base of it there are none
        dist.barrier()

    def end(self) -> None:
        dist.barrier()
        with suppress(NotFound):
            remove_namespace(self.namespace)


def iterate(engine: Any) -> float:
    """One iteration on batches that are always the same: a model of this size learns them by heart."""
    data = torch.Generator().manual_seed(1)
    shape, factor = (2, LENGTH), torch.ones(2, 1)
    batches = [torch.randint(VOCABULARY, shape, generator=data) for _ in range(engine.gradient_accumulation_steps())]
    return float(engine.train_batch(data_iter=iter([(tokens, (tokens, factor)) for tokens in batches])))
