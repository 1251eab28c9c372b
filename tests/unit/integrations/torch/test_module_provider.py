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
from tiercheck.format.index.logical import LogicalTensor, Role
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

    def test_its_names_are_those_of_the_model_in_it(self) -> None:
        trainer = Job(1, distributed=True)
        alone = ModuleProvider(trainer.inner, trainer.optimizer).index()
        index = self.provider(trainer).index()
        assert index.tensors == alone.tensors
        assert index.stored.keys() == {name.replace("/", "/module.") for name in alone.stored}


def test_the_index_says_what_each_tensor_is_to_the_model() -> None:
    trainer = Job(1)
    assert [*ModuleProvider(trainer.model, trainer.optimizer).index().tensors.values()] == [
        LogicalTensor("0.weight", "F32", (8, 5), trained=True),
        LogicalTensor("0.bias", "F32", (8,), trained=True),
        LogicalTensor("1.weight", "F32", (8,), trained=True),
        LogicalTensor("3.weight", "F32", (1, 8), trained=True),
        LogicalTensor("3.bias", "F32", (1,), trained=True),
        LogicalTensor("1.bias", "F32", (8,)),
        LogicalTensor("1.running_mean", "F32", (8,), Role.BUFFER),
        LogicalTensor("1.running_var", "F32", (8,), Role.BUFFER),
        LogicalTensor("1.num_batches_tracked", "I64", (), Role.BUFFER),
    ]


class Wrapper(torch.nn.Module):
    """As activation checkpointing and ``torch.compile`` make one."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


def test_the_index_knows_tied_weights_by_their_other_names_and_no_wrappers() -> None:
    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    model = torch.nn.Sequential(Wrapper("_checkpoint_wrapped_module", first), Wrapper("_orig_mod", last))
    index = ModuleProvider(model, torch.optim.SGD(model.parameters())).index()
    assert index.tensors.keys() == {"0.weight", "0.bias"}
    assert index.aliases == {"1.weight": "0.weight"}


def test_a_state_is_loaded_into_the_memory_of_the_optimizers() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    provider = ModuleProvider(model, optimizer)
    gradients = {name: torch.ones_like(each) for name, each in provider.masters().items()}
    provider.apply(gradients, provider.hyperparameters())
    live = {name: dict(held) for name, held in provider.optimizer_state().items()}
    saved = {name: {key: each + 1 for key, each in held.items()} for name, held in live.items()}
    provider.load(
        masters={name: each.clone() for name, each in provider.masters().items()},
        optimizer_state=saved,
        extras={},
        hyperparameters=provider.hyperparameters(),
    )
    for name, held in provider.optimizer_state().items():
        for key, each in held.items():
            assert each is live[name][key]
            assert torch.equal(each, saved[name][key])
