"""The kit for state providers finds what a provider does wrong. That right ones pass is seen where they are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.tensors.provider import StateProvider, copy_into, extras_of
from tiercheck.testing.providers import StateProviderTests

Tensors = Mapping[str, torch.Tensor]


class Job:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.unsaved = 0.0

    def iterate(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 3)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.5
        return loss.item()


class Kit(StateProviderTests):
    def __init__(self, provider: type[ModuleProvider] = ModuleProvider) -> None:
        self._provider = provider

    def make(self, seed: int) -> Job:
        return Job(seed)

    def iterate(self, trainer: Any) -> float:
        return float(trainer.iterate())

    def provider(self, trainer: Any) -> StateProvider:
        return self._provider(trainer.model, trainer.optimizer)

    def attach(self, trainer: Any, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        return attach(trainer.model, trainer.optimizer, hierarchy, config=config)


class NamesOfTheProcess(ModuleProvider):
    def masters(self) -> Tensors:
        return {f"{name}@{id(self)}": tensor for name, tensor in super().masters().items()}


class AnotherGroup(ModuleProvider):
    def group_of(self) -> Mapping[str, int]:
        return dict.fromkeys(self.masters(), 1)


class Unstorable(ModuleProvider):
    def host_state(self) -> dict[str, Any]:
        return {**super().host_state(), "model": self}


class LeavesOutAPart(ModuleProvider):
    def index(self) -> LogicalIndex:
        """That of a rank which lacks one row of a matrix, and of no other rank."""
        whole = super().index()
        longer = LogicalTensor("0.weight", "F32", (5, 3), trained=True)
        return LogicalIndex({**whole.tensors, longer.name: longer}, whole.stored)


class IndexOfOthers(ModuleProvider):
    def index(self) -> LogicalIndex:
        return LogicalIndex({}, {})


class Copies(ModuleProvider):
    def masters(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in super().masters().items()}


class Aliases(ModuleProvider):
    def load(self, *, optimizer_state: Mapping[str, Mapping[str, Any]], **rest: Any) -> None:
        super().load(optimizer_state=optimizer_state, **rest)
        for name, parameter in self._masters.items():
            self._optimizer.state[parameter] = dict(optimizer_state.get(name, {}))


class LeavesOutBuffers(ModuleProvider):
    def load(self, *, extras: Tensors, **rest: Any) -> None:
        super().load(extras={name: tensor.clone() for name, tensor in extras_of(self).items()}, **rest)


class ForgetsTheGenerators(ModuleProvider):
    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        pass


class ChecksTooLate(ModuleProvider):
    def load(self, *, masters: Tensors, **rest: Any) -> None:
        copy_into(self.masters(), masters)
        super().load(masters=masters, **rest)


class KeepsItsOptions(ModuleProvider):
    def apply(self, gradients: Tensors, hyperparameters: list[dict[str, Any]]) -> None:
        super().apply(gradients, self.hyperparameters())

    def load(self, *, hyperparameters: list[dict[str, Any]], **rest: Any) -> None:
        super().load(hyperparameters=self.hyperparameters(), **rest)


class WritesToGradients(ModuleProvider):
    def apply(self, gradients: Tensors, hyperparameters: list[dict[str, Any]]) -> None:
        super().apply(gradients, hyperparameters)
        for gradient in gradients.values():
            gradient.zero_()


class TakesNoGradientForZero(ModuleProvider):
    def apply(self, gradients: Tensors, hyperparameters: list[dict[str, Any]]) -> None:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.masters().items()}
        super().apply({**zeros, **gradients}, hyperparameters)


FOUND = {
    NamesOfTheProcess: Kit.test_every_process_has_the_same_names_and_shapes,
    AnotherGroup: Kit.test_its_parts_fit_together,
    Unstorable: Kit.test_its_parts_fit_together,
    LeavesOutAPart: Kit.test_what_its_tensors_are_pieces_of,
    IndexOfOthers: Kit.test_what_its_tensors_are_pieces_of,
    Copies: Kit.test_tensors_are_live,
    Aliases: Kit.test_what_is_loaded_is_copied_and_goes_on_alike,
    LeavesOutBuffers: Kit.test_what_is_loaded_is_copied_and_goes_on_alike,
    ForgetsTheGenerators: Kit.test_what_is_loaded_is_copied_and_goes_on_alike,
    ChecksTooLate: Kit.test_what_does_not_fit_is_refused_and_changes_nothing,
    KeepsItsOptions: Kit.test_a_replayed_step_is_the_step,
    WritesToGradients: Kit.test_a_replayed_step_is_the_step,
    TakesNoGradientForZero: Kit.test_a_master_without_a_gradient_is_left_out,
}


@pytest.mark.parametrize(("broken", "finds"), FOUND.items(), ids=lambda each: each.__name__)
def test_a_broken_provider_fails(broken: type[ModuleProvider], finds: Any) -> None:
    finds(Kit())
    with pytest.raises((AssertionError, TypeError, ValueError)):
        finds(Kit(broken))


def test_state_that_nobody_saves_is_found() -> None:
    class Hidden(Kit):
        def iterate(self, trainer: Any) -> float:
            trainer.unsaved += 1
            return super().iterate(trainer) + float(trainer.unsaved)

    Kit().test_a_resumed_run_is_the_uninterrupted_one(2)
    with pytest.raises(AssertionError):
        Hidden().test_a_resumed_run_is_the_uninterrupted_one(2)
