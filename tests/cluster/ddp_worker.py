"""What each rank of ``test_ddp`` runs: ``torchrun ... ddp_worker.py DIRECTORY``; writes ``DIRECTORY/r{rank}.json``."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.tiers.namespaces import remove_namespace

FAILED_AT, LAST = 7, 11


def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
    )
    torch.manual_seed(2 + rank)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    first: int,
    last: int,
) -> dict[int, str]:
    losses = {}
    for version in range(first + 1, last + 1):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * version + dist.get_rank()))
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses[version] = loss.item().hex()
    return losses


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    names = [f"test-ddp-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(names)
    hierarchy = Hierarchy.of(f"shm://{names[0]}-{{rank}}?size=64MiB", f"nvme://{directory}/durable?survives=rack")
    config = CheckpointConfig(base_every=4, batch=2, deadline_s=60)

    reference = train(*build(rank), 0, LAST)
    trained = build(rank)
    checkpointer = attach(*trained[:2], hierarchy, scheduler=trained[2], config=config)
    losses = train(*trained, 0, FAILED_AT)
    checkpointer.abort()
    dist.barrier()
    trained = build(rank)
    checkpointer = attach(*trained[:2], hierarchy, scheduler=trained[2], config=config)
    recovered = checkpointer.version
    losses |= train(*trained, recovered, LAST)
    checkpointer.close()
    remove_namespace(f"{names[0]}-{rank}")
    report = {"recovered": recovered, "same": losses == reference, "version": checkpointer.version}
    (directory / f"r{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
