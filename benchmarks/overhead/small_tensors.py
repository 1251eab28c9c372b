"""The stall of a differential whose elements are in few tensors or in many. Only the bytes should count."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable

import torch

from benchmarks.training import threads_of_torch
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["FEW", "MANY", "stall_s"]

FEW = 10
MANY = (100, 1_000, 10_000)
WARMUPS, STEPS = 4, 7
BASE_EVERY = WARMUPS + STEPS + 1
CHILDREN = 100
"""Tensors of one module, as of a layer."""


class Many(torch.nn.Module):
    """So many elements in so many tensors, all trained."""

    def __init__(self, elements: int, tensors: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(-(-tensors // CHILDREN)))
        for number in range(tensors):
            parameter = torch.nn.Parameter(torch.randn(elements // tensors))
            self.layers[number // CHILDREN].register_parameter(f"weight{number % CHILDREN}", parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def stall_s(elements: int, tensors: int) -> float:
    """How long training stands still for a differential in shared memory, with one thread: the median of some steps."""
    name = f"tiercheck-benchmark-{uuid.uuid4().hex[:8]}"
    try:
        with threads_of_torch(1):
            return statistics.median(stalls_of(Many(elements, tensors), Hierarchy.of(f"shm://{name}")))
    finally:
        remove_namespace(name)


def stalls_of(model: torch.nn.Module, hierarchy: Hierarchy) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    config = CheckpointConfig(base_every=BASE_EVERY, bases="capture", batch=BASE_EVERY)
    checkpointer = attach(model, optimizer, hierarchy, config=config)
    try:
        taken = [one_stall(checkpointer, lambda: step(model, optimizer)) for _ in range(WARMUPS + STEPS)]
    finally:
        checkpointer.abort()
    return taken[WARMUPS:]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.zeros(1))
    optimizer.step()


def one_stall(checkpointer: Checkpointer, work: Callable[[], None]) -> float:
    before = checkpointer.stats.differential_stall_s
    work()
    checkpointer.end_iteration()
    return checkpointer.stats.differential_stall_s - before
