"""What each rank of ``test_fsdp`` runs. Arguments: what to do, a directory, and the name of the job's memory."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import tests.small_states  # noqa: F401  (kernels replay the shards)
from tests.assembling import assembled
from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.fsdp.sharded_provider import ShardedProvider
from tiercheck.integrations.torch import attach
from tiercheck.streams.records import constants

FAILED_AT, LAST = 5, 6
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Normalised(torch.optim.Optimizer):
    """Momentum of gradients over their norm: in its step ranks wait for each other. It is replayed by calling it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                norm = parameter.grad.norm().full_tensor()
                momentum.mul_(0.9).add_(parameter.grad, alpha=1 / (norm.item() + 1e-6))
                parameter.add_(momentum, alpha=-group["lr"])


@dataclass(frozen=True)
class Case:
    mesh: tuple[int, ...] = (4,)
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    reshard_after_forward: bool | int = True
    micro_batches: int = 1
    clip: float | None = None
    says_end: bool = True
    """Whether its loop calls ``end_iteration``. Else the last version before a failure is lost."""
    killed: bool = False
    """Whether SIGKILL ends a rank of it, after the last version. The others stop saving there."""


CASES = {
    "fp32": Case(options={"fused": True}, reshard_after_forward=2),
    "hsdp": Case(mesh=(2, 2), optimizer=Normalised, micro_batches=2, clip=0.1, says_end=False),
    "bf16": Case(policy=BF16, options={"foreach": True}, micro_batches=2, clip=0.1),
    "owners": Case(mesh=(2, 2), policy=BF16, micro_batches=2, clip=0.1, killed=True),
}
FEWER = Case(mesh=(3,), options={"fused": True})


@cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


class Job:
    """Of the first layer the last of four ranks has nothing, and of the last one only the first rank has anything."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        layers = [
            torch.nn.Linear(8, 6),
            torch.nn.BatchNorm1d(6, affine=False),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(6, 37),
            torch.nn.Linear(37, 5, bias=False),
            torch.nn.Linear(5, 1),
        ]
        layers[4].requires_grad_(False)
        self.case = case
        self.model = torch.nn.Sequential(*layers)
        mesh = mesh_of(case.mesh)
        to_fp32 = replace(case.policy, output_dtype=torch.float32)  # for the normalisation
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard_after_forward}
        if len(case.mesh) == 2:
            options["shard_placement_fn"] = lambda each: Shard(each.ndim - 1)
        fully_shard(layers[0], mp_policy=to_fp32, **options)
        fully_shard(layers[3], mp_policy=case.policy, **options)
        fully_shard(self.model, mesh=mesh, mp_policy=case.policy, reshard_after_forward=False)
        groups = [{"params": list(layers[0].parameters()), "lr": 1e-2}, {"params": list(layers[3].parameters())}]
        groups[1]["params"] += layers[5].parameters()
        self.optimizer = case.optimizer(groups, lr=3e-2, **case.options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.checkpointer: Checkpointer | None = None
        self.losses: dict[int, str] = {}
        random.seed(dist.get_rank())
        torch.manual_seed(2 + dist.get_rank())

    def attach(self, directory: Path, name: str) -> Checkpointer:
        tiers = f"shm://{name}-{{rank}}?size=64MiB", f"nvme://{directory}/{name}?survives=rack"
        config = CheckpointConfig(base_every=3, batch=2, deadline_s=60, bases="capture")
        self.checkpointer = attach(
            self.model, self.optimizer, Hierarchy.of(*tiers), scheduler=self.scheduler, config=config
        )
        return self.checkpointer

    def backward(self) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        model = self.model
        reduce = model.set_requires_gradient_sync if len(self.case.mesh) == 1 else model.set_requires_all_reduce
        for index in range(self.case.micro_batches):
            reduce(index == self.case.micro_batches - 1)
            loss = (self.model(torch.randn(8, 8)) - random.random()).float().pow(2).mean()
            loss.backward()
            total += loss.item()
        if self.case.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        return total

    def train(self, last: int) -> None:
        for version in range(self.checkpointer.version + 1 if self.checkpointer else 1, last + 1):
            self.losses[version] = self.backward().hex()
            self.optimizer.step()
            self.scheduler.step()
            if self.checkpointer is not None and self.case.says_end:
                self.checkpointer.end_iteration()

    def bits(self) -> dict[str, str]:
        """A digest by name of all that a version holds of this rank."""
        provider = ShardedProvider(self.model, self.optimizer)
        tensors = {**provider.masters(), **provider.frozen(), **provider.buffers()}
        for name, state in provider.optimizer_state().items():
            tensors |= {f"{key} of {name}": torch.as_tensor(each) for key, each in state.items()}
        tensors["generator"] = torch.get_rng_state()
        found = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest()[:16] for name, each in tensors.items()}
        return {**found, "python": str(random.getstate()), "schedule": str(self.scheduler.state_dict())}


def fail(directory: Path, name: str, case: Case) -> None:
    """Train to the version at which the job fails; one rank of some jobs is killed in the iteration after it."""
    job = Job(case)
    checkpointer = job.attach(directory, name)
    job.train(FAILED_AT)
    if case.killed:
        job.backward()
        if dist.get_rank() == 1:
            (directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        job.optimizer.step()
        dist.barrier()  # which nobody leaves
    checkpointer.abort()


def resume(directory: Path, name: str, case: Case) -> dict[str, Any]:
    """Go on from there, and compare with a job that did not fail."""
    whole = Job(case)
    whole.train(LAST)
    job = Job(case)
    torch.manual_seed(3)
    checkpointer = job.attach(directory, name)
    recovered, recovery = checkpointer.version, checkpointer.recovery
    job.train(LAST)
    checkpointer.close()
    assert recovery is not None
    bits, wanted = job.bits(), whole.bits()
    return {
        "recovered": recovered,
        "fidelity": str(recovery.fidelity),
        "notes": list(recovery.notes),
        "same_losses": job.losses == {version: loss for version, loss in whole.losses.items() if version > recovered},
        "differing": [what for what in {**bits, **wanted} if bits.get(what) != wanted.get(what)],
    }


def differing(job: Job) -> list[str]:
    """The parameters that are not put together, by the indexes of all ranks, as torch gathers them."""
    whole, _ = assembled(ShardedProvider(job.model, job.optimizer))
    gathered = {name: each.full_tensor() for name, each in job.model.named_parameters()}
    return [name for name, each in gathered.items() if not torch.equal(each, whole[name, ""])]


def shards(job: Job) -> dict[str, Any]:
    """The shapes of what this rank saves, and where it is in the whole."""
    provider = ShardedProvider(job.model, job.optimizer)
    blocks = provider.blocks()
    return {name: [each.shape, blocks[name].offsets] for name, each in provider.masters().items()}


def stored(directory: Path, name: str) -> dict[str, list[int]]:
    """By tensor of a base or of its constants, the ranks that have stored any of it, in the tier that all share."""
    found: dict[str, list[int]] = {}
    for rank in range(dist.get_world_size()):
        base = sorted((directory / name).glob(f"r{rank:05d}/**/base/*.safetensors"))[-1]
        for path in (base, *(directory / name).glob(f"r{rank:05d}/**/constant/*.safetensors")):
            with safe_open(path, "pt") as shard:
                held = {each for each in shard.keys() if 0 not in shard.get_slice(each).get_shape()}  # noqa: SIM118  (a shard is no mapping)
            for each in held:
                found.setdefault(each, []).append(rank)
    return found


def whole(job: Job) -> dict[str, str]:
    """A digest of each parameter and of its moments, as torch gathers them, and of the steps that this rank counts. Its
    shard may be empty."""
    gathered = {name: each.full_tensor() for name, each in job.model.named_parameters()}
    for name, each in job.model.named_parameters():
        for key, value in job.optimizer.state.get(each, {}).items():
            gathered[f"{key} of {name}"] = value if key == "step" else value.full_tensor()
    return {name: hashlib.sha256(each.detach().numpy().tobytes()).hexdigest()[:16] for name, each in gathered.items()}


def in_another_mesh(directory: Path, name: str, case: Case) -> list[Any]:
    """What a job in a mesh of one dimension recovers of that one, and what is not as it was saved."""
    saved = Job(case)
    saved.train(LAST)
    job = Job(replace(case, mesh=(dist.get_world_size(),)))
    recovery = job.attach(directory, name).recovery
    found, wanted = whole(job), whole(saved)
    assert job.checkpointer is not None
    assert recovery is not None
    job.checkpointer.abort()
    differing = [what for what in {**found, **wanted} if found.get(what) != wanted.get(what)]
    return [recovery.version, str(recovery.fidelity), differing]


def on_other_ranks(directory: Path, name: str, case: Case) -> list[Any]:
    """What a job recovers that has other ranks, or another mesh."""
    checkpointer = Job(case).attach(directory, name)
    recovery = checkpointer.recovery
    assert recovery is not None
    checkpointer.abort()
    return [recovery.version, str(recovery.fidelity), recovery.notes[0]]


def main() -> None:
    what, directory, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    constants.NBYTES_MIN, constants.SHARE = 0, 1 << 30  # what does not change is referred to, however little it is
    join()
    report: Any = None
    if what == "fail":
        for kind, case in CASES.items():
            fail(directory, f"{name}-{kind}", case)
    elif what == "resume":
        report = {kind: resume(directory, f"{name}-{kind}", case) for kind, case in CASES.items()}
        report["differing as assembled"] = {kind: differing(Job(case)) for kind, case in CASES.items()}
        report["shards"] = shards(Job(CASES["fp32"]))
        report["stored"] = stored(directory, f"{name}-owners")
        report["in another mesh"] = in_another_mesh(directory, f"{name}-owners", CASES["owners"])
        report["other mesh"] = on_other_ranks(directory, f"{name}-hsdp", Case(optimizer=Normalised))
    else:
        fail(directory, f"{name}-fewer", FEWER)
        report = {"fewer": resume(directory, f"{name}-fewer", FEWER)}
        report["other ranks"] = on_other_ranks(directory, f"{name}-fp32", FEWER)
    (directory / f"{what}-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
