"""Which tensors an engine keeps alike on all ranks: all of them under ZeRO stage 0, if every rank is a replica."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.replicas import Alike
from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["EngineReplicas"]


class EngineReplicas:
    """Of one engine. DeepSpeed gives all ranks rank 0's parameters, and before each step the same sums of gradients."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._summed = True
        """Whether the last backward pass of a step sums gradients."""

    def alike(self, provider: StateProvider) -> Alike:
        """Of the provider's tensors."""
        engine = self._engine
        if engine.zero_optimization_stage() != 0:
            return Alike()
        if isinstance(engine, PipelineEngine) or engine.dp_world_size != dist.get_world_size():
            return Alike(obstacle="pipeline, tensor or sequence parallelism has ranks that are no replicas")
        if not engine.enable_backward_allreduce:
            return Alike(obstacle="the engine's backward pass does not sum gradients (enable_backward_allreduce)")
        return Alike(frozenset(provider.masters()), frozenset(provider.frozen()))

    def forward(self) -> None:
        """A forward pass of training begins."""
        self._summed = not self._engine.inside_no_sync_ctxt

    def check_step(self) -> None:
        """Errors: ``UnsupportedSetup`` if the ranks step on gradients that are not alike."""
        if not self._summed or not self._engine.enable_backward_allreduce:
            raise UnsupportedSetup(
                "the engine steps on gradients that were not summed over the ranks: the last backward pass was under "
                "no_sync(), or enable_backward_allreduce was turned off. One rank stores each parameter for all, which "
                "takes that they stay alike: start with CheckpointConfig(replicas='each')"
            )
