"""What each rank of ``test_parallel`` runs under DeepSpeed: one engine, since a process builds one of these only.

Arguments: ``save | resume``, a directory, what to train (``pipeline-of-3`` stages, ``tensor-parallel``,
``sequence-parallel-of-3``: under that ZeRO stage, ``plain``), and where what was saved is, in the directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.assembling import assembled
from tests.cluster.deepspeed.harness import Case, build, deepspeed, iterate
from tests.cluster.layouts.relayout_worker import MOMENTS, Moments, hashed
from tests.forks import join
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed import attach
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider

SAVED_AT = 6
CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=60)


def built(kind: str, seed: int) -> Any:
    name, _, stages = kind.partition("-of-")
    if name == "sequence-parallel":
        engine = build(Case(int(stages), True, sequence_parallel=True), seed)
        assert engine.sequence_parallel_size == dist.get_world_size()
        return engine
    case = Case(1, True, pipeline=name == "pipeline", tensor_parallel=name == "tensor-parallel")
    return build(case, seed, stages=int(stages or 1))


def state(engine: Any) -> dict[str, str]:
    """A digest of each tensor of the model and of its moments, whole; steps, options and schedule. Collective."""
    provider = DeepSpeedProvider(engine)
    found: dict[str, str] = {}
    for what, each in {"": provider, **{key: Moments(provider, key) for key in MOMENTS}}.items():
        found |= {f"{name} {what}": hashed(tensor) for (name, _), tensor in assembled(each)[0].items()}
    steps = sorted({int(held["step"]) for held in provider.optimizer_state().values() if "step" in held})
    options = [(group["lr"], group["weight_decay"]) for group in provider.hyperparameters()]
    seen = {"steps": steps, "options": options, "schedule": engine.lr_scheduler.state_dict()}
    return {**found, **{name: str(value) for name, value in seen.items()}, "counter": str(engine.global_steps)}


def main() -> None:
    what, directory, kind, saved = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_backend="gloo")
    tiers = Hierarchy.of(f"memory://{saved}-{{rank}}", f"nvme://{directory / saved}?survives=rack")
    engine = built(kind, seed=1 if what == "save" else 7)
    checkpointer = attach(engine, tiers, config=CONFIG)
    if what == "save":
        while engine.global_steps < SAVED_AT:
            iterate(engine)
            checkpointer.end_iteration()
        checkpointer.flush()
    recovery, found = checkpointer.recovery, state(engine)
    report = {"state": found, "version": recovery and recovery.version, "fidelity": recovery and str(recovery.fidelity)}
    report["notes"] = [*recovery.notes] if recovery else []
    if what == "resume":
        iterate(engine)
        checkpointer.close()
        report["after"] = engine.global_steps
    (directory / f"{what}-{kind}-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
