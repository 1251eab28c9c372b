"""The provider of a plain torch loop passes the kit: alone and under DDP, whether or not the loop says where its
iterations end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.tensors.beside import Beside
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.testing.providers import StateProviderTests


class Job:
    """Two groups, a frozen parameter, running statistics, dropout and a schedule; batches from torch's generator."""

    def __init__(self, seed: int, *, distributed: bool = False) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)]
        self.inner = torch.nn.Sequential(*layers)
        self.inner[1].bias.requires_grad = False
        self.model = torch.nn.parallel.DistributedDataParallel(self.inner) if distributed else self.inner
        first, last = layers[0].parameters(), [self.inner[1].weight, *layers[3].parameters()]
        groups = [{"params": list(first), "weight_decay": 0.1}, {"params": last, "lr": 3e-2}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.checkpointer: Checkpointer | None = None

    def iterate(self, *, says_end: bool) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(torch.randn(16, 5)) - 1).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        if says_end and self.checkpointer is not None:
            self.checkpointer.end_iteration()
        return loss.item()


class TestModule(StateProviderTests):
    distributed, says_end = False, True

    def make(self, seed: int) -> Job:
        return Job(seed, distributed=self.distributed)

    def iterate(self, trainer: Any) -> float:
        return float(trainer.iterate(says_end=self.says_end))

    def provider(self, trainer: Any) -> StateProvider:
        beside = Beside({"scheduler": trainer.scheduler})
        return ModuleProvider(trainer.model, trainer.optimizer, beside=beside)

    def attach(self, trainer: Any, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        checkpointer = attach(trainer.model, trainer.optimizer, hierarchy, scheduler=trainer.scheduler, config=config)
        trainer.checkpointer = checkpointer
        return checkpointer


class TestUnsaid(TestModule):
    says_end = False


class TestDdp(TestModule):
    distributed = True

    @pytest.fixture(autouse=True)
    def torch_distributed(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
