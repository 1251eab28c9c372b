"""What each rank of ``test_muon`` runs: Muon and AdamW on the shards of FSDP2. Muon's step takes all ranks that hold
parts of a matrix.

Arguments: ``DIRECTORY NAME``; writes ``DIRECTORY/r{rank}.json``: by kind of mesh, what was found.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.forks import join
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.attaching import provider_for
from tiercheck.streams.tensors.joint import JointOptimizer
from tiercheck.tiers.shm.namespaces import remove_namespace

MESHES = {"fsdp": ((4,), ("shard",)), "hsdp": ((2, 2), ("replicate", "shard"))}
BASE_EVERY, FAILED_AT, LAST = 4, 10, 13
LOST = 1
"""This rank's memory is lost, and of its bases in the durable tier the newest."""


class Job:
    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        sizes, names = MESHES[kind]
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 6))
        fully_shard(self.model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
        matrices = [each for each in self.model.parameters() if each.ndim == 2]
        others = [each for each in self.model.parameters() if each.ndim < 2]
        self.optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
        self.provider = provider_for(self.model)(self.model, JointOptimizer(self.optimizers))

    def attach(self, directory: Path, name: str) -> Checkpointer:
        tiers = Hierarchy.of(f"shm://{name}-{{rank}}?size=16MiB", f"nvme://{directory}/{name}?survives=rack")
        config = CheckpointConfig(base_every=BASE_EVERY, batch=1, deadline_s=30, bases="capture")
        self.checkpointer = attach(self.model, self.optimizers, tiers, config=config)
        return self.checkpointer

    def train(self, last: int) -> None:
        for version in range(self.checkpointer.version + 1, last + 1):
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * version + dist.get_rank()))
            for each in self.optimizers:
                each.zero_grad()
            (self.model(batch) - batch).pow(2).mean().backward()
            for each in self.optimizers:
                each.step()
            self.checkpointer.end_iteration()

    def digest(self) -> str:
        found = hashlib.sha256()
        states = self.provider.optimizer_state()
        for name, master in self.provider.masters().items():
            held = [each for _, each in sorted(states.get(name, {}).items()) if isinstance(each, torch.Tensor)]
            for tensor in (master, *held):
                found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def lose_base(directory: Path, name: str) -> None:
    """The durable tier has not got the newest base yet, and the rank's memory is gone."""
    dist.barrier()
    if dist.get_rank() == LOST:
        remove_namespace(f"{name}-{LOST}")
        newest = max((directory / name).glob(f"r{LOST:05d}/g000001/base/*.safetensors"))
        newest.unlink()
    dist.barrier()


def check(kind: str, directory: Path, name: str) -> dict[str, Any]:
    job = Job(kind, seed=1)
    checkpointer = job.attach(directory, name)
    job.train(FAILED_AT)
    failed = job.digest()
    checkpointer.flush()
    checkpointer.abort()
    whole = Job(kind, seed=1)
    whole.attach(directory, f"{name}-whole")
    whole.train(LAST)
    whole.checkpointer.abort()
    lose_base(directory, name)
    job = Job(kind, seed=2)
    recovery = job.attach(directory, name).recovery
    assert recovery is not None
    resumed = job.digest()
    job.train(LAST)
    job.checkpointer.close()
    return {
        "recovered": [recovery.version, recovery.point.anchor, str(recovery.fidelity)],
        "as it was": resumed == failed,
        "as the whole": job.digest() == whole.digest(),
    }


def main() -> None:
    directory, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    join(timeout=timedelta(seconds=60))
    found = {kind: check(kind, directory, f"{name}-{kind}") for kind in MESHES}
    (directory / f"r{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
