"""Which shards are replicas, by the mesh: ranks of a column hold the same. In one process; the mesh is a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.fsdp.replicated import MeshReplicas
from tiercheck.integrations.fsdp.sharded_provider import ShardedProvider
from tiercheck.integrations.replicas import Alike


@pytest.fixture(autouse=True)
def six_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=6)
    yield
    dist.destroy_process_group()


def alike(model: torch.nn.Module) -> Alike:
    provider = ShardedProvider(model, torch.optim.SGD([each for each in model.parameters() if each.requires_grad]))
    return MeshReplicas(model).alike(provider.masters(), provider.frozen())


def model(ranks: Any) -> torch.nn.Sequential:
    sizes = torch.tensor(ranks).ndim
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-sizes:])
    made = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 1))
    made[0].bias.requires_grad_(False)
    fully_shard(made[0], mesh=mesh)
    made[1].requires_grad_(False)
    made[1].weight.requires_grad_(True)
    return fully_shard(made, mesh=mesh)


def test_the_ranks_of_a_column_hold_the_same_and_the_first_column_has_most() -> None:
    found = alike(model([[0, 1, 2], [3, 4, 5]]))
    assert found.masters == {"0.weight", "1.weight"}
    assert found.frozen == {"0.bias", "1.bias"}
    assert found.parts == ((0, 3), (1, 4), (2, 5))
    assert found.nbytes == {"0.weight": 3 * 4 * 4, "0.bias": 3 * 4, "1.weight": 7 * 4, "1.bias": 4}
    assert not found.obstacle


def test_a_mesh_without_replicas_has_nothing_alike() -> None:
    assert alike(model(range(6))) == Alike()


def test_meshes_that_differ_or_are_out_of_order_are_an_obstacle() -> None:
    assert "not in ascending order" in alike(model([[3, 4, 5], [0, 1, 2]])).obstacle
    two = torch.nn.Sequential(model([[0, 1, 2], [3, 4, 5]]), model([[0, 1], [2, 3], [4, 5]]))
    assert "replicated in several meshes" in alike(two).obstacle


def test_an_all_reduce_hook_is_an_obstacle_and_refused_if_it_comes_later() -> None:
    made = model([[0, 1, 2], [3, 4, 5]])
    replicas = MeshReplicas(made)
    replicas.check_step()
    made[0].set_all_reduce_hook(print)
    assert "the all-reduce hook print" in alike(made).obstacle
    with pytest.raises(UnsupportedSetup, match=r"all-reduce hook print .*replicas='each'"):
        replicas.check_step()
