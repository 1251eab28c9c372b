"""The kit for state providers, on two ranks of DeepSpeed: a partition each, and low-precision copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.cluster.deepspeed.harness import Case, build, iterate
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.index.message import plain_index, read_index
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.testing.providers import NO_BASES, StateProviderTests


class Kit(StateProviderTests):
    def __init__(self, case: Case) -> None:
        self._case = case

    def make(self, seed: int) -> Any:
        return build(self._case, seed)

    def iterate(self, trainer: Any) -> list[float]:
        return iterate(trainer)

    def provider(self, trainer: Any) -> StateProvider:
        return DeepSpeedProvider(trainer)

    def indexes(self, provider: StateProvider) -> dict[int, LogicalIndex]:
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, plain_index(provider.index()))
        return dict(enumerate(map(read_index, ranks)))

    def attach(self, trainer: Any, hierarchy: Hierarchy, config: CheckpointConfig) -> Checkpointer:
        return attach(trainer, hierarchy, config=config)


def certified(case: Case) -> Callable[[], Iterable[str]]:
    """A check that raises what the kit finds."""

    def check() -> Iterable[str]:
        kit = Kit(case)
        ran = 0
        for name in dir(kit):
            if name.startswith("test_") and name != "test_a_resumed_run_is_the_uninterrupted_one":
                getattr(kit, name)()
                torch.distributed.barrier()
                ran += 1
        for base_every in (2, NO_BASES):
            kit.test_a_resumed_run_is_the_uninterrupted_one(base_every)
            torch.distributed.barrier()
        if ran < 7:
            yield f"only {ran} tests of the kit were found"

    return check
