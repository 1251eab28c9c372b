"""What each rank of ``test_loading`` runs: jobs go on with another model than the one that was saved.

Arguments: a directory.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.cluster.layouts import relayout_worker
from tests.cluster.layouts.relayout_worker import CONFIG, SAVED_AT, Job
from tests.forks import join
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach as attach_engine
from tiercheck.integrations.torch import attach
from tiercheck.streams.loading import Loading

PAIRS = (("zero3", "zero1-bf16"), ("ddp", "fsdp"))
"""Under what is saved, and under what a job goes on."""
NAMES = {"0": "first", "1": "thawed", "2": "middle", "3": "head"}
saved_network = relayout_worker.network


def other_network() -> torch.nn.Sequential:
    """Other names, a head of another size, and the layer that was frozen is trained."""
    first, frozen, middle, _ = saved_network()
    torch.manual_seed(3)
    layers = first, frozen.requires_grad_(True), middle, torch.nn.Linear(7, 5)
    return torch.nn.Sequential(OrderedDict(zip(NAMES.values(), layers, strict=True)))


def renamed(name: str) -> str:
    layer, _, rest = name.partition(".")
    return f"{NAMES[layer]}.{rest}"


def go_on(kind: str, place: Path) -> dict[str, Any]:
    """What became of it, and the state before and after."""
    loading = Loading(rename=renamed, missing="keep", unexpected="drop")
    job = Job(kind, seed=7)
    made = job.state()
    tiers = Hierarchy.of(f"memory://{place.name}-{kind}-{{rank}}", f"nvme://{place}?survives=rack")
    if job.engine is not None:
        job.checkpointer = attach_engine(job.engine, tiers, config=CONFIG, loading=loading)
    else:
        schedule = {"scheduler": job.scheduler, "config": CONFIG}
        job.checkpointer = attach(job.model, job.optimizer, tiers, loading=loading, **schedule)
    recovery = job.checkpointer.recovery
    assert recovery is not None
    loaded = job.state()
    job.train(recovery.version + 1)
    job.checkpointer.close()
    told = {"recovery": recovery.to_object(), "notes": list(recovery.notes)}
    return {**told, "version": recovery.version, "made": made, "loaded": loaded, "end": job.state()}


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_backend="gloo")
    reports = {}
    for number, (before, after) in enumerate(PAIRS):
        relayout_worker.network = saved_network
        place = directory / f"{number}-{before}"
        job = Job(before, seed=1)
        checkpointer = job.attach(place)
        job.train(SAVED_AT)
        checkpointer.flush()
        saved = job.state()
        checkpointer.abort()
        dist.barrier()
        relayout_worker.network = other_network
        reports[f"{before}:{after}"] = {"saved": saved, "first": go_on(after, place), "again": go_on(after, place)}
    (directory / f"r{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
