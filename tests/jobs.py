"""A training job small enough to be run hundreds of times, whose every bit is compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@dataclass
class Job:
    """Dropout makes it depend on torch's generator, the noise on Python's, batch norm on buffers."""

    optimizer_factory: OptimizerFactory = adamw
    scheduled: bool = False
    width: int = 16
    losses: dict[int, str] = field(default_factory=dict)
    attached: ClassVar[list[Checkpointer]] = []

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        random.seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, self.width),
            torch.nn.BatchNorm1d(self.width),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(self.width, 1),
        )
        self.optimizer = self.optimizer_factory(self.model.parameters())
        self.scheduler = (
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5) if self.scheduled else None
        )
        self.checkpointer: Checkpointer | None = None
        self.stepped = 0

    def attach(self, hierarchy: Hierarchy, **config: Any) -> Checkpointer:
        settings = {"base_every": 4, "batch": 2, "deadline_s": 30.0, **config}
        self.checkpointer = attach(
            self.model, self.optimizer, hierarchy, scheduler=self.scheduler, config=CheckpointConfig(**settings)
        )
        self.attached.append(self.checkpointer)
        return self.checkpointer

    @classmethod
    def abort_all(cls) -> None:
        """Close whatever a failed test left open."""
        while cls.attached:
            cls.attached.pop().abort()

    def train(self, last: int) -> None:
        """Train up to version ``last``, from the checkpointer's version where there is one."""
        first = self.checkpointer.version if self.checkpointer else 0
        for version in range(first + 1, last + 1):
            batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(version))
            loss = (self.model(batch) - random.random()).pow(2).mean()
            self.losses[version] = loss.item().hex()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            if self.checkpointer is not None:
                self.checkpointer.end_iteration()
            self.stepped = version

    def state(self) -> dict[str, Any]:
        """All that the job is made of, for comparison bit for bit."""
        tensors = dict(self.model.state_dict())
        for index, state in enumerate(self.optimizer.state_dict()["state"].values()):
            tensors |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
        return {
            "tensors": {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "random": (random.getstate(), torch.get_rng_state().numpy().tobytes()),
        }


def uninterrupted(last: int, **options: Any) -> Job:
    job = Job(**options)
    job.train(last)
    return job


@pytest.fixture
def name(name: str) -> Iterator[str]:
    """A namespace of shared memory; whatever job the test leaves open is closed before it goes."""
    yield name
    Job.abort_all()


@pytest.fixture
def hierarchy(name: str, tmp_path: Path) -> Hierarchy:
    return Hierarchy.of(f"shm://{name}?size=64MiB", f"nvme://{tmp_path}/durable?survives=rack")
