"""What each rank of ``test_relayout`` runs: jobs of several frameworks, and jobs that go on from what others saved.

Arguments: ``save | resume``, a directory, and what to save (``zero1``), or to go on from (``3-zero1:fsdp``).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.assembling import assembled
from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.demo.training.deepspeed_cpu import prepare_cpu
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.fsdp.sharded_provider import ShardedProvider
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.streams.records import constants

prepare_cpu()

# What follows imports DeepSpeed, which looks at once for the accelerator that prepare_cpu() names.
import deepspeed  # noqa: E402

from tiercheck.integrations.deepspeed import attach as attach_engine  # noqa: E402
from tiercheck.integrations.deepspeed.partitions import DeepSpeedProvider  # noqa: E402

constants.NBYTES_MIN, constants.SHARE = 0, 1 << 30  # what does not change is referred to, however little it is

SAVED_AT = 6
"""A base is due at every fourth version."""
CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=60)
MOMENTS = ("exp_avg", "exp_avg_sq")


def network() -> torch.nn.Sequential:
    """Sizes that no number of ranks divides, a frozen layer, and a buffer."""
    torch.manual_seed(1)
    layers = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7, bias=False), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    layers[1].requires_grad_(False)
    layers[2].register_buffer("seen", torch.tensor([1.5, 2.5]))
    return torch.nn.Sequential(*layers)


@dataclass
class Moments:
    """A provider whose masters are the optimizer's tensors of one name."""

    provider: Any
    key: str

    def index(self) -> Any:
        return self.provider.index()

    def masters(self) -> Mapping[str, torch.Tensor]:
        state = self.provider.optimizer_state()
        return {
            name: state.get(name, {}).get(self.key, torch.zeros_like(each))
            for name, each in self.provider.masters().items()
        }

    def frozen(self) -> Mapping[str, torch.Tensor]:
        return self.provider.frozen()

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self.provider.buffers()


class Job:
    def __init__(self, kind: str, seed: int, **more: Any) -> None:
        """``more``: of DeepSpeed's configuration."""
        self.kind = kind
        self.engine: Any = None
        model = network()
        if seed != 1:
            torch.manual_seed(seed)
            with torch.no_grad():
                for each in model.parameters():
                    each.normal_()
        if kind.startswith("zero"):
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": int(kind[4]), "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                "bf16": {"enabled": kind.endswith("bf16")},
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-2, "torch_adam": True}},
                **more,
            }
            self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
                model=model, model_parameters=groups_of(model), config=config, lr_scheduler=scheduler_of
            )
            self.model = self.engine
            self.provider: Any = DeepSpeedProvider(self.engine)
            return
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model = DistributedDataParallel(model) if kind == "ddp" else model
        self.optimizer = torch.optim.AdamW(groups_of(self.model), lr=3e-2)
        self.scheduler = scheduler_of(self.optimizer)
        provider = ShardedProvider if kind == "fsdp" else ModuleProvider
        self.provider = provider(self.model, self.optimizer)

    def attach(self, place: Path) -> Checkpointer:
        tiers = Hierarchy.of(f"memory://{place.name}-{{rank}}", f"nvme://{place}?survives=rack")
        if self.engine is not None:
            self.checkpointer = attach_engine(self.engine, tiers, config=CONFIG)
        else:
            self.checkpointer = attach(self.model, self.optimizer, tiers, scheduler=self.scheduler, config=CONFIG)
        return self.checkpointer

    def train(self, last: int) -> None:
        while self.checkpointer.version < last:
            seed = 10 * self.checkpointer.version + dist.get_rank()
            batch = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
            if self.engine is not None:
                loss = self.engine(batch.bfloat16() if self.kind.endswith("bf16") else batch).float().pow(2).mean()
                self.engine.backward(loss)
                self.engine.step()
                continue
            self.optimizer.zero_grad()
            self.model(batch).pow(2).mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.checkpointer.end_iteration()

    def state(self) -> dict[str, str]:
        """A digest of each tensor of the model and of its moments, whole; steps, options and schedule. Collective."""
        found: dict[str, str] = {}
        for what, provider in {"": self.provider, **{key: Moments(self.provider, key) for key in MOMENTS}}.items():
            whole, _ = assembled(provider)
            found |= {f"{name} {what}": hashed(tensor) for (name, _), tensor in whole.items()}
        steps = {int(held["step"]) for held in self.provider.optimizer_state().values() if "step" in held}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, sorted(steps))
        options = [(group["lr"], group["weight_decay"]) for group in self.provider.hyperparameters()]
        schedule = {key: value for key, value in self.scheduler.state_dict().items() if key != "_step_count"}
        seen = {"steps": sorted({each for steps in every for each in steps}), "options": options, "schedule": schedule}
        return {**found, **{name: str(value) for name, value in seen.items()}}


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.1}
    return [matrices, {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0, "lr": 1e-2}]


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def hashed(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:16]


def save(directory: Path, kinds: list[str]) -> None:
    """Every kind trains to the version that all bring to the shared tier, and a little further; then all are killed."""
    world = dist.get_world_size()
    for kind in kinds:
        job = Job(kind, seed=1)
        checkpointer = job.attach(directory / f"{world}-{kind}")
        job.train(SAVED_AT)
        checkpointer.flush()
        state = job.state()
        if dist.get_rank() == 0:
            (directory / f"{world}-{kind}.json").write_text(json.dumps(state))
        if kind != kinds[-1]:
            checkpointer.abort()
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(directory: Path, pairs: list[str]) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    for pair in pairs:
        source, kind = pair.split(":")
        place = directory / f"{pair.replace(':', '-')}-{dist.get_world_size()}"
        if dist.get_rank() == 0:
            shutil.copytree(directory / source, place)
        dist.barrier()
        job = Job(kind, seed=7)
        recovery = job.attach(place).recovery
        wanted, found = json.loads((directory / f"{source}.json").read_text()), job.state()
        counters = job.engine.global_steps if job.engine is not None else job.checkpointer.version
        assert recovery is not None
        report = {
            "version": [recovery.version, counters, job.checkpointer.version],
            "fidelity": str(recovery.fidelity),
            "notes": list(recovery.notes),
            "differing": [what for what in {**wanted, **found} if wanted.get(what) != found.get(what)],
            "detail": {w: [wanted.get(w), found.get(w)] for w in ("steps", "options", "schedule")},
        }
        job.train(SAVED_AT + 1)
        job.checkpointer.close()
        reports[pair] = {**report, "after": job.checkpointer.version}
        dist.barrier()
    return reports


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    deepspeed.init_distributed(dist_backend="gloo")
    if what == "save":
        save(directory, sys.argv[3:])
    reports = resume(directory, sys.argv[3:])
    (directory / f"{dist.get_world_size()}-r{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
