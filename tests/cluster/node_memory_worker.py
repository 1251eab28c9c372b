"""What each rank of ``test_node_memory`` runs. Arguments: the job's name, a directory, the host of each rank as
``2,0,3``, and the version to train to. A host is an agent and memory of its own; ranks that end are killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.forks import join
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=60, replicas="each")


def main() -> None:
    name, directory, hosts, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4])
    join()
    rank = dist.get_rank()
    host = f"{name}-{hosts[rank]}"
    os.environ |= {"TIERCHECK_AGENT_NODE": host, "TIERCHECK_NODE": hosts[rank]}
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = attach(model, optimizer, Hierarchy.of(f"shm://{host}?size=32MiB", f"peer://{name}"), config=CONFIG)
    recovery = checkpointer.recovery
    weights = {checkpointer.version: model.weight.flatten().tolist()}
    while checkpointer.version < last:
        optimizer.zero_grad()
        model(torch.full((2, 3), float(checkpointer.version + 1 + rank))).pow(2).sum().backward()
        optimizer.step()
        checkpointer.end_iteration()
        weights[checkpointer.version] = model.weight.flatten().tolist()
    checkpointer.flush()
    told = {
        "weights": weights,
        "version": recovery.version if recovery else 0,
        "sources": sorted({tier for _, tier in recovery.sources}) if recovery else [],
        "matrix": sorted({row.tier for row in recovery.matrix}) if recovery else [],
    }
    (directory / f"{'-'.join(hosts)}-r{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
