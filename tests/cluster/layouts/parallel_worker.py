"""What each rank of ``test_parallel`` runs: jobs whose model is divided between ranks by torch, along several axes.

Arguments: ``save | resume``, a directory, and what to save (``tp``), or to go on from (``4-tp:pp``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.assembling import assembled
from tests.cluster.layouts.relayout_worker import MOMENTS, Moments, groups_of, hashed, scheduler_of
from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.fsdp.sharded_provider import sums_first
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.attaching import provider_for

SAVED_AT, LAST = 6, 8
"""A base is due at every fourth version."""
CONFIG = CheckpointConfig(base_every=4, batch=2, deadline_s=60)
WIDTH, BLOCKS = 8, 4
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Block(torch.nn.Module):
    """With a buffer, and a parameter that will be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 12)
        self.down = torch.nn.Linear(12, WIDTH)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + added


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleDict({str(index): Block() for index in range(BLOCKS)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class Job:
    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        torch.manual_seed(seed)
        self.model = model = Model()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.schedule: Any = None
        self.slices = {"tp": world, "tp-adam": world, "fsdp-tp": 2}.get(kind, 1)
        if kind == "pp":
            each = BLOCKS // world
            for index in range(BLOCKS):
                if index // each != rank:
                    del model.blocks[str(index)]
            stage = PipelineStage(model, rank, world, torch.device("cpu"))
            self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
        elif kind in ("tp", "tp-adam", "fsdp-tp"):
            sizes = (world // 2, 2) if kind == "fsdp-tp" else (world,)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
            for block in model.blocks.values():
                parallelize_module(block, mesh["tp"], SEQUENCE)
                if kind == "fsdp-tp":
                    fully_shard(block, mesh=mesh["dp"])
            if kind == "fsdp-tp":
                fully_shard(model, mesh=mesh["dp"])
        for block in model.blocks.values():
            block.norm.bias.requires_grad_(False)  # SequenceParallel makes a new one
        if kind == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups_of(model), lr=3e-2)
        if kind == "tp-adam":
            self.optimizer = torch.optim.Adam(groups_of(model), lr=3e-2)
        self.scheduler = scheduler_of(self.optimizer)
        self.provider = provider_for(model)(model, self.optimizer)

    def attach(self, place: Path) -> Checkpointer:
        tiers = Hierarchy.of(f"memory://{place.name}-{{rank}}", f"nvme://{place}?survives=rack")
        self.checkpointer = attach(self.model, self.optimizer, tiers, scheduler=self.scheduler, config=CONFIG)
        return self.checkpointer

    def train(self, last: int) -> None:
        for version in range(self.checkpointer.version + 1, last + 1):
            self.optimizer.zero_grad()
            batch = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(version))
            if self.schedule is not None:
                first, final = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
                self.schedule.step(*([batch] if first else []), **({"target": batch} if final else {}))
            else:
                if (slices := self.slices) > 1:
                    batch = batch.chunk(slices, dim=1)[dist.get_rank() % slices]
                loss_of(self.model(batch), batch).backward()
            if self.kind == "tp-adam":  # its decay would be added to the summands
                for each in self.model.parameters():
                    if isinstance(each.grad, DTensor) and isinstance(each, DTensor):
                        each.grad = each.grad.redistribute(placements=each.placements)
            self.optimizer.step()
            self.scheduler.step()
            self.checkpointer.end_iteration()

    def state(self) -> dict[str, str]:
        """A digest of each tensor of the model and of its moments, whole; steps, options and schedule. Collective."""
        found: dict[str, str] = {}
        provider = self.provider
        for what, each in {"": provider, **{key: Moments(provider, key) for key in MOMENTS}}.items():
            found |= {f"{name} {what}": hashed(tensor) for (name, _), tensor in assembled(each)[0].items()}
        steps = {int(held["step"]) for held in provider.optimizer_state().values() if "step" in held}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, sorted(steps))
        options = [(group["lr"], group["weight_decay"]) for group in provider.hyperparameters()]
        schedule = self.scheduler.state_dict()
        seen = {"steps": sorted({each for steps in every for each in steps}), "options": options, "schedule": schedule}
        return {**found, **{name: str(value) for name, value in seen.items()}}


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.flip(-1)).pow(2).mean()


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
]


def summing() -> list[list[Any]]:
    """By optimizer, whether ``sums_first`` says that a step on summands is a step on their sum; and whether it is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def trained(kind: Any, options: dict[str, Any], *, early: bool) -> tuple[torch.Tensor, bool]:
        whole = torch.randn(257, generator=torch.Generator().manual_seed(1))
        parameter = torch.nn.Parameter(DTensor.from_local(whole, mesh, [Replicate()], run_check=False))
        optimizer = kind([parameter], lr=3e-2, **options)
        for step in range(4):
            own = torch.randn(257, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            summand = DTensor.from_local(own, mesh, [Partial()], run_check=False)
            parameter.grad = summand.redistribute(placements=[Replicate()]) if early else summand
            optimizer.step()
        return parameter.to_local().detach(), sums_first(optimizer, optimizer.param_groups[0])

    found = []
    for kind, options in OPTIMIZERS:
        (early, said), (late, _) = (trained(kind, options, early=early) for early in (True, False))
        found.append([f"{kind.__name__} {options}", said, torch.equal(early, late)])
    return found


def save(directory: Path, kinds: list[str]) -> None:
    """Every kind trains to the version that all bring to the shared tier, which is copied, and on; all are killed."""
    world = dist.get_world_size()
    for kind in kinds:
        job = Job(kind, seed=1)
        checkpointer = job.attach(directory / f"{world}-{kind}")
        job.train(SAVED_AT)
        checkpointer.flush()
        saved = job.state()
        if dist.get_rank() == 0:
            shutil.copytree(directory / f"{world}-{kind}", directory / f"{world}-{kind}-copy")
        dist.barrier()
        job.train(LAST)
        states = {"saved": saved, "last": job.state()}
        if dist.get_rank() == 0:
            (directory / f"{world}-{kind}.json").write_text(json.dumps(states))
        if kind != kinds[-1]:
            checkpointer.abort()
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(directory: Path, pairs: list[str]) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    world = dist.get_world_size()
    for pair in pairs:
        source, kind = pair.split(":")
        place = directory / f"{pair.replace(':', '-')}-{world}"
        if dist.get_rank() == 0:
            shutil.copytree(directory / f"{source}-copy", place)
        dist.barrier()
        job = Job(kind, seed=7)
        recovery = job.attach(place).recovery
        assert recovery is not None
        wanted, found = json.loads((directory / f"{source}.json").read_text()), job.state()
        job.train(LAST)
        after = job.state() if source == f"{world}-{kind}" else wanted["last"]
        job.checkpointer.close()
        reports[pair] = {
            "version": recovery.version,
            "fidelity": str(recovery.fidelity),
            "notes": list(recovery.notes),
            "differing": differing(wanted["saved"], found),
            "after": differing(wanted["last"], after),
        }
        dist.barrier()
    return reports


def differing(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    return [what for what in {**wanted, **found} if wanted.get(what) != found.get(what)]


def main() -> None:
    what, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    if what == "save":
        save(directory, sys.argv[3:])
    reports = {**resume(directory, sys.argv[3:]), "summing": summing()}
    (directory / f"{dist.get_world_size()}-r{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()
