"""What each rank of ``test_node_memory`` runs. Arguments: the job's name, a directory, the host of each rank as
``2,0,3``, the version to train to, and ``each`` or ``owner``: whether each rank trains a model of its own, or all of
them the same one under DDP, of which each stores a part. A host is an agent and memory of its own; ranks that end are
killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.forks import join
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach


def build(rank: int, replicas: str) -> torch.nn.Module:
    torch.manual_seed(rank)
    if replicas == "each":
        return torch.nn.Linear(3, 4)
    return DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3))))


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The weights, and what the optimizer has for them."""
    moments = (each for held in optimizer.state_dict()["state"].values() for each in held.values())
    return torch.cat([each.detach().flatten() for each in (*model.parameters(), *moments)]).tolist()


def main() -> None:
    name, directory, hosts, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4])
    replicas = sys.argv[5]
    join()
    rank = dist.get_rank()
    host = f"{name}-{hosts[rank]}"
    os.environ |= {"TIERCHECK_AGENT_NODE": host, "TIERCHECK_NODE": hosts[rank]}
    model = build(rank, replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = CheckpointConfig(base_every=4, batch=2, deadline_s=60, replicas=replicas, bases="capture")
    checkpointer = attach(model, optimizer, Hierarchy.of(f"shm://{host}?size=32MiB", f"peer://{name}"), config=config)
    recovery = checkpointer.recovery
    weights = {checkpointer.version: state(model, optimizer)}
    while checkpointer.version < last:
        optimizer.zero_grad()
        model(torch.full((2, 3), float(checkpointer.version + 1 + rank))).pow(2).sum().backward()
        optimizer.step()
        checkpointer.end_iteration()
        weights[checkpointer.version] = state(model, optimizer)
    checkpointer.flush()
    told = {
        "weights": weights,
        "version": recovery.version if recovery else 0,
        "fidelity": str(recovery.fidelity) if recovery else "",
        "sources": sorted({tier for _, tier in recovery.sources}) if recovery else [],
        "matrix": sorted({row.tier for row in recovery.matrix}) if recovery else [],
    }
    (directory / f"{'-'.join(hosts)}-r{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
