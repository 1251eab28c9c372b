"""What each rank of ``test_stories`` runs in one life of a job. Arguments: the story's seed, the number of the life or
``whole`` for a run that does not fail, a directory, and the name of the job's memory.

Writes ``DIRECTORY/LIFE-RANK.jsonl``: what was recovered, each loss, and when an iteration had ended. A rank that is
killed has written what it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tests.small_states  # noqa: F401  (kernels replay the shards)
from tests.cluster.torch.stories import LAST, OPTIMIZERS, Story
from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.records import constants

Passes = Callable[[int, str], None]
Says = Callable[..., None]


class Failed(Exception):
    """The loop has."""


class Job:
    def __init__(self, story: Story) -> None:
        self.story, self.rank = story, dist.get_rank()
        torch.manual_seed(1)
        layers = [
            torch.nn.Linear(8, 6),
            torch.nn.BatchNorm1d(6, affine=story.framework == "ddp"),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(6, 37),
            torch.nn.Linear(37, 5, bias=False),
            torch.nn.Linear(5, 1),
        ]
        layers[4].requires_grad_(not story.frozen)
        network = torch.nn.Sequential(*layers)
        self.model: Any = network
        if story.framework == "ddp":
            self.model = DistributedDataParallel(network, bucket_cap_mb=0.0005)
        else:
            shard(network, story)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        groups = [{"params": trained[:2], "lr": 3e-2}, {"params": trained[2:]}]
        made = OPTIMIZERS[story.optimizer]
        self.optimizers = [made(groups[:1]), torch.optim.AdamW(groups[1:], lr=1e-2)] if story.joint else [made(groups)]
        decay = torch.optim.lr_scheduler.CosineAnnealingLR
        self.schedulers = [decay(each, 20) for each in self.optimizers] if story.scheduled else []
        torch.manual_seed(2 + self.rank)
        random.seed(2 + self.rank)
        self.checkpointer: Checkpointer | None = None

    def attach(self, directory: Path, name: str) -> Checkpointer:
        tiers = [f"shm://{name}-{{rank}}?size=64MiB"]
        if self.story.shared_tier:
            tiers.append(f"nvme://{directory}/{name}?survives=rack")
        config = CheckpointConfig(deadline_s=60, bases="capture", on_nothing_left="restart", **self.story.config)
        optimizer = self.optimizers if self.story.joint else self.optimizers[0]
        schedulers = {f"scheduler {index}": each for index, each in enumerate(self.schedulers)}
        self.checkpointer = attach(self.model, optimizer, Hierarchy.of(*tiers), after_step=schedulers, config=config)
        return self.checkpointer

    def train(self, passes: Passes, say: Says) -> None:
        first = self.checkpointer.version + 1 if self.checkpointer else 1
        for version in range(first, LAST + 1):
            passes(version, "at its begin")
            for each in self.optimizers:
                each.zero_grad()
            loss = sum(self.backward(version, index, passes) for index in range(self.story.micro_batches))
            passes(version, "before the step")
            if self.story.clips:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for stepped in (*self.optimizers, *self.schedulers):
                stepped.step()
            say(version=version, loss=loss.hex())
            passes(version, "before its end")
            if self.story.says_end and version % 3 == 0:
                torch.rand(1), random.random()  # as a validation does
            if self.checkpointer is not None and self.story.says_end:
                self.checkpointer.end_iteration()
            say(ended=version)
            passes(version, "after its end")

    def backward(self, version: int, index: int, passes: Passes) -> float:
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * version + 10 * index + self.rank))
        if self.story.says_end:
            batch += torch.randn_like(batch) * 0.1 + random.random()
        with self.summed() if index + 1 == self.story.micro_batches else self.not_summed():
            loss = self.model(batch).float().pow(2).mean()
            if index == 0:
                passes(version, "after the forward pass")
            loss.backward()
        return float(loss.item())

    def summed(self) -> contextlib.AbstractContextManager[None]:
        if self.story.framework != "ddp":
            self.model.set_requires_gradient_sync(True)
        return contextlib.nullcontext()

    def not_summed(self) -> contextlib.AbstractContextManager[None]:
        if self.story.framework == "ddp":
            return self.model.no_sync()  # type: ignore[no-any-return]
        self.model.set_requires_gradient_sync(False)
        return contextlib.nullcontext()


def shard(network: torch.nn.Sequential, story: Story) -> None:
    sizes, names = ((2, 2), ("replicate", "shard")) if story.framework == "hsdp" else ((story.ranks,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if story.bf16 else MixedPrecisionPolicy()
    fully_shard(network[0], mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32))  # for the normalisation
    fully_shard(network[3], mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def main() -> None:
    seed, life, directory, name = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    story = Story.of(seed)
    torch.set_num_threads(1)
    constants.NBYTES_MIN, constants.SHARE = 0, 1 << 30  # what does not change is referred to, however little it is
    join()
    job = Job(story)
    with (directory / f"{life}-{job.rank}.jsonl").open("w") as file:

        def say(**what: object) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        if life == "whole":
            job.train(lambda version, moment: None, say)
            return
        checkpointer = job.attach(directory, name)
        recovery, began_at = checkpointer.recovery, checkpointer.version
        say(recovered=began_at, fidelity=str(recovery.fidelity) if recovery else "exact")
        failure = story.failures[int(life)] if int(life) < len(story.failures) else None

        def passes(version: int, moment: str) -> None:
            if failure is None or (version - began_at, moment) != (failure.ahead, failure.moment):
                return
            if failure.killed is None:
                raise Failed
            if failure.killed == job.rank:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            job.train(passes, say)
        except Failed:
            checkpointer.abort()
        else:
            checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
