"""Which shards several ranks hold alike: under HSDP those of a column of the mesh, which are replicas.

FSDP2 gives a rank of a mesh of two dimensions the shard of its column, and the same sums of gradients as all ranks of
the column: gradients are no part of a step before they are summed over the replicas (``set_requires_all_reduce``). It
does not make the replicas alike at first; that is compared at the start, as always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.fsdp.blocks import block_of
from tiercheck.integrations.replicas import Alike

__all__ = ["MeshReplicas"]


class MeshReplicas:
    """Of a model of ``fully_shard``, made while its parameters are sharded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self._replicated = {
            name: each for name, each in model.named_parameters() if isinstance(each, DTensor) and in_replicas(each)
        }

    def alike(self, masters: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor]) -> Alike:
        """Of these tensors of the model, live, those that replicas hold."""
        if not self._replicated:
            return Alike()
        meshes = {columns_of(each) for each in self._replicated.values()}
        if len(meshes) > 1:
            return Alike(obstacle="the model's parameters are replicated in several meshes")
        parts = meshes.pop()
        if any([*part] != sorted(part) for part in parts):
            return Alike(obstacle="the ranks of the mesh are not in ascending order")
        if obstacle := self._strange_hook():
            return Alike(obstacle=obstacle)
        return Alike(
            frozenset(masters.keys() & self._replicated.keys()),
            frozenset(frozen.keys() & self._replicated.keys()),
            parts=parts,
            nbytes={name: fullest(each) for name, each in self._replicated.items()},
        )

    def forward(self) -> None:
        """Nothing that a forward pass begins has replicas step on different gradients."""

    def check_step(self) -> None:
        """Errors: ``UnsupportedSetup`` if the replicas step on gradients that may differ."""
        if why := self._strange_hook():
            raise UnsupportedSetup(
                f"{why}. One replica stores each shard for all, which takes that they stay alike: start with "
                "CheckpointConfig(replicas='each')"
            )

    def _strange_hook(self) -> str:
        for module in self._modules:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for hook in (getattr(each, "_all_reduce_hook", None) for each in groups):
                if hook is not None:
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    return f"nobody knows whether the all-reduce hook {name} leaves all replicas with the same bits"
        return ""


def in_replicas(parameter: DTensor) -> bool:
    """Whether it is placed as FSDP2 does in a mesh of replicas times shards. What tensor parallelism replicates is not:
    nobody says that its ranks take the same steps."""
    placements = parameter.placements
    hybrid = len(placements) == 2 and placements[0] == Replicate() and isinstance(placements[1], Shard)
    return hybrid and parameter.device_mesh.mesh.shape[0] > 1


def columns_of(parameter: DTensor) -> tuple[tuple[int, ...], ...]:
    """The ranks of its mesh, those together that hold the same of it."""
    return tuple(map(tuple, parameter.device_mesh.mesh.T.tolist()))


def fullest(parameter: DTensor) -> int:
    """The bytes of the longest shard, which is the first rank's."""
    mesh = tuple(parameter.device_mesh.mesh.shape)
    sharded = [each.dim if isinstance(each, Shard) else None for each in parameter.placements]
    first = block_of(parameter.shape, mesh, [0] * len(mesh), sharded)
    return math.prod(first.lengths) * parameter.element_size()
