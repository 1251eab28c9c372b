"""What each rank of ``test_universal`` runs: a job is saved and exported, and engines load the export.

Arguments: a directory. Each kind is exported at a version that is a differential's.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests.cluster.layouts.relayout_worker import SAVED_AT, Job, hashed
from tests.forks import join
from tiercheck.cli.commands import app

PAIRS = {"zero0": ("zero2",), "zero1": ("zero2", "zero3"), "fsdp": ("zero1",), "zero3-bf16": ("zero1-bf16",)}
"""By what is saved, the stages of ZeRO that load it."""


def export(url: str, to: Path) -> dict[str, Any]:
    command = ["export", url, "--to", str(to), "--format", "deepspeed", "--version", str(SAVED_AT), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def saved(kind: str, directory: Path) -> dict[str, str]:
    """The state at the version."""
    job = Job(kind, seed=1)
    checkpointer = job.attach(directory / kind)
    job.train(SAVED_AT)
    checkpointer.flush()
    state = job.state()
    checkpointer.abort()
    return state


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_backend="gloo")
    reports = {}
    for kind, stages in PAIRS.items():
        wanted = saved(kind, directory)
        out = directory / f"{kind}-universal"
        made: list[Any] = [export(f"nvme://{directory / kind}", out) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(made)
        states = torch.load(out / f"global_step{SAVED_AT}" / "mp_rank_00_model_states.pt", weights_only=False)
        for stage in stages:
            job = Job(stage, seed=7, checkpoint={"load_universal": True})
            job.engine.load_checkpoint(str(out))
            if "call engine.lr_scheduler.step() once" in " ".join(made[0]["notes"]):
                job.engine.lr_scheduler.step()
            found = job.state()
            reports[f"{kind}:{stage}"] = {
                "version": job.engine.global_steps,
                "fidelity": made[0]["fidelity"],
                "differing": [name for name in found if found[name] != wanted.get(name)],
                "frozen": hashed(states["module"]["1.weight"]) == wanted["1.weight "],
            }
    (directory / f"r{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
