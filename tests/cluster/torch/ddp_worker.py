"""What each rank of ``test_ddp`` runs: its argument is a directory; writes ``DIRECTORY/r{rank}.json``."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tiercheck
from tests.forks import join
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.tiers.shm.namespaces import remove_namespace

FAILED_AT, LAST = 7, 11


Trained = tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def build(rank: int, **options: bool) -> Trained:
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, 32),
        torch.nn.Linear(32, 1),
    )
    torch.manual_seed(2 + rank)
    # Buckets of a kilobyte: the layout after the first iteration is another one, as in a model of many megabytes.
    model = DistributedDataParallel(network, bucket_cap_mb=0.001, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    first: int,
    last: int,
    end_iteration: Callable[[], None] = lambda: None,
) -> dict[int, str]:
    losses = {}
    for version in range(first + 1, last + 1):
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * version + dist.get_rank()))
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        end_iteration()
        losses[version] = loss.item().hex()
    return losses


def life(directory: Path, rank: int, name: str, **options: bool) -> dict[str, object]:
    """Train, fail, come back, and compare with a run that did not fail."""
    hierarchy = Hierarchy.of(f"shm://{name}-{{rank}}?size=64MiB", f"nvme://{directory}/{name}?survives=rack")
    config = CheckpointConfig(base_every=4, batch=2, deadline_s=60, bases="capture")
    reference = train(*build(rank, **options), 0, LAST)
    trained = build(rank, **options)
    checkpointer = attach(*trained[:2], hierarchy, scheduler=trained[2], config=config)
    losses = train(*trained, 0, FAILED_AT, checkpointer.end_iteration)
    checkpointer.abort()
    dist.barrier()
    trained = build(rank, **options)
    checkpointer = attach(*trained[:2], hierarchy, scheduler=trained[2], config=config)
    recovered, recovery = checkpointer.version, checkpointer.recovery
    losses |= train(*trained, recovered, LAST, checkpointer.end_iteration)
    checkpointer.close()
    remove_namespace(f"{name}-{rank}")
    dist.barrier()
    with tiercheck.open(f"nvme://{directory}/{name}") as archive:
        stored = sorted(archive.rebuild(rank).state.masters())
    return {
        "stored": stored,
        "recovered": recovered,
        "same": losses == reference,
        "version": checkpointer.version,
        "fidelity": str(recovery.fidelity),
        "notes": list(recovery.notes),
    }


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    join()
    rank = dist.get_rank()
    names = [f"test-ddp-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(names)
    reports = {
        kind: life(directory, rank, f"{names[0]}-{kind}", **options)
        for kind, options in {"plain": {}, "static": {"static_graph": True}}.items()
    }
    (directory / f"r{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
