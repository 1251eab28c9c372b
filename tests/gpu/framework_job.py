"""One life of a job on a GPU under a framework, by itself in its process group.

Arguments: a name of :data:`JOBS`, a directory, the tiers' name, and the life: ``whole`` trains without saving,
``killed`` ends by SIGKILL after a version, ``resumed`` goes on from what that one has saved. Writes
``DIRECTORY/LIFE.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.demo.training.digest import digest, master_tensors
from tiercheck.demo.training.model import GPT
from tiercheck.hierarchy import Hierarchy

__all__ = ["JOBS", "KILLED_IN", "LAST"]

WIDTH, LAYERS, HEADS, SEQUENCE, BATCH = 128, 3, 4, 64, 4
KILLED_IN, LAST = 12, 18
BASE_EVERY = 4

Step = Callable[[torch.Tensor], torch.Tensor]
"""Trains one version with these tokens, and returns its loss."""


@dataclass(frozen=True)
class Training:
    step: Step
    attach: Callable[[Hierarchy, CheckpointConfig], Checkpointer]
    state: Callable[[], dict[str, torch.Tensor]]


def model_of() -> GPT:
    torch.manual_seed(1)
    return GPT(width=WIDTH, layers=LAYERS, heads=HEADS, sequence=SEQUENCE, dropout=0.1).cuda()


def torch_training(model: torch.nn.Module, *, clip: bool = False) -> Training:
    from tiercheck.integrations.torch import attach

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def state() -> dict[str, torch.Tensor]:
        found = {name: local(each) for name, each in model.named_parameters()}
        for name, each in model.named_parameters():
            found |= {f"{key} of {name}": local(value) for key, value in optimizer.state[each].items()}
        return found

    return Training(step, lambda tiers, config: attach(model, optimizer, tiers, config=config), state)


def local(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def ddp() -> Training:
    return torch_training(DistributedDataParallel(model_of(), device_ids=[0], bucket_cap_mb=1), clip=True)


def fsdp() -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return torch_training(model)


def deepspeed(stage: int, *, fused: bool, dtype: str = "bf16", offload: tuple[str, ...] = ()) -> Training:
    """``fused``: by DeepSpeed's own Adam, which it compiles; else by torch's fused one. ``offload``: to the CPU."""
    import deepspeed

    from tiercheck.integrations.deepspeed import attach

    parameters: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    if not fused:
        parameters |= {"torch_adam": True, "fused": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": stage > 0,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 200_000,
            "stage3_param_persistence_threshold": 1000,
            **{f"offload_{what}": {"device": "cpu"} for what in offload},
        },
        "zero_force_ds_cpu_optimizer": False,
        dtype: {"enabled": True},
    }
    if dtype == "fp16":
        config["fp16"] |= {"initial_scale_power": 24, "loss_scale_window": 100}  # so that the first steps are skipped
    model = model_of()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens, tokens.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        return loss

    def state() -> dict[str, torch.Tensor]:
        masters = list(master_tensors(engine))
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        found = {f"master {place}": each for place, each in enumerate(masters)}
        for place, each in enumerate(masters):
            found |= {f"{key} of {place}": torch.as_tensor(value) for key, value in inner.state[each].items()}
        return {**found, **{name: getattr(each, "ds_tensor", each) for name, each in model.named_parameters()}}

    return Training(step, lambda tiers, config: attach(engine, tiers, config=config), state)


JOBS: dict[str, Callable[[], Training]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    **{f"zero{stage}": lambda stage=stage: deepspeed(stage, fused=False) for stage in range(4)},
    **{f"zero{stage}-FusedAdam": lambda stage=stage: deepspeed(stage, fused=True) for stage in (1, 2, 3)},
    "zero1-fp16": lambda: deepspeed(1, fused=False, dtype="fp16"),
    "zero2-offload": lambda: deepspeed(2, fused=False, offload=("optimizer",)),
    "zero3-offload": lambda: deepspeed(3, fused=False, offload=("optimizer", "param")),
}


def main() -> None:
    job, directory, name, life = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(2)
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", init_method=f"file://{directory}/{life}.store", rank=0, world_size=1)
    training = JOBS[job]()
    torch.manual_seed(2)
    report: dict[str, Any] = {"losses": {}}
    version, checkpointer = 0, None
    if life != "whole":
        tiers = Hierarchy.of(f"shm://{name}?size=512MiB", f"nvme://{directory}/durable?survives=rack")
        checkpointer = training.attach(tiers, CheckpointConfig(base_every=BASE_EVERY, batch=2, deadline_s=60.0))
        version = checkpointer.version
        if checkpointer.recovery is not None:
            report |= {"recovered": version, "fidelity": str(checkpointer.recovery.fidelity)}
            report["notes"] = list(checkpointer.recovery.notes)
    losses: dict[int, torch.Tensor] = {}
    while version < LAST:
        version += 1
        drawn = torch.Generator().manual_seed(version)
        tokens = torch.randint(256, (BATCH, SEQUENCE), generator=drawn).cuda()
        losses[version] = training.step(tokens).detach()
        if checkpointer is not None:
            checkpointer.end_iteration()
        if life == "killed" and version == KILLED_IN:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
    report["losses"] = {at: loss.item().hex() for at, loss in losses.items()}
    report["state"] = {name: digest([(name, each)]) for name, each in training.state().items()}
    if checkpointer is not None:
        checkpointer.close()
    (directory / f"{life}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's static destructors may abort


if __name__ == "__main__":
    main()
