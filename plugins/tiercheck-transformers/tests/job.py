"""A small job of a Trainer, trained by processes that are killed."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tiercheck_transformers import attach
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tiercheck import CheckpointConfig, Hierarchy
from tiercheck.demo.training.deepspeed_cpu import prepare_cpu

prepare_cpu()
# Once, for all the processes that are forked: engines import the optimizer when they are built, and it the compiler.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import numba  # noqa: E402

numba.njit(lambda number: number)(1)  # it learns its types at the first function
gc.collect()
gc.freeze()  # DeepSpeed's engines look for garbage again and again, and none of what was imported is any

KILLED = -signal.SIGKILL
DEADLINE_S = 120.0
NOT_COMPARED = ("runtime", "per_second", "train_loss")
"""The last is of the steps of this call of ``train()``."""
ARGUMENTS: Mapping[str, Any] = {
    "disable_tqdm": True,
    "eval_steps": 4,
    "eval_strategy": "steps",
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 3,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "warmup_steps": 3,
}
"""Eleven batches an epoch: the last step of an epoch accumulates one instead of two."""

fork = multiprocessing.get_context("fork")


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, lines: int, seed: int) -> None:
        self.tokens = torch.randint(0, 64, (lines, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same, of a length that nobody is told."""

    def __init__(self, lines: int, seed: int) -> None:
        self.tokens = Tokens(lines, seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.tokens[index] for index in range(len(self.tokens)))


class Dies(TrainerCallback):
    """Kills the process when this event comes and so many steps are done."""

    def __init__(self, event: str, step: int) -> None:
        self.step = step
        setattr(self, event, self._perhaps)

    def _perhaps(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Job:
    """``hierarchy``: whether the tiers are named here; else the DeepSpeed JSON names them. ``begins``: a checkpoint of
    the Trainer's own."""

    folder: Path
    ranks: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callable[[], TrainerCallback]] = ()
    hierarchy: bool = True
    begins: Path | None = None
    data: Callable[[int, int], torch.utils.data.Dataset[Any]] = Tokens
    lines: int = 44

    @property
    def tiers(self) -> tuple[str, str]:
        return f"shm://{self.folder.name}?size=64MiB", f"nvme://{self.folder}/durable?survives=rack"

    def live(self, name: str, *dies: tuple[str, int], attached: bool = True) -> list[int]:
        """Train in processes of their own until they end or one is killed. Returns how each ended."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            place = [(name, rank, listener, dies, attached) for rank in range(self.ranks)]
            ranks = [fork.Process(target=self._rank, args=each) for each in place]
            for each in ranks:
                each.start()
        watched: dict[Any, BaseProcess] = {each.sentinel: each for each in ranks}
        while watched:
            for sentinel in (ended := wait(list(watched), timeout=DEADLINE_S)):
                watched.pop(sentinel).join()
            if not ended or any(each.exitcode for each in ranks):  # the others would wait for it
                for each in watched.values():
                    each.kill()
        return [each.exitcode or 0 for each in ranks]

    def end(self, name: str) -> list[dict[str, Any]]:
        """What each rank had at the end of a life that was not killed."""
        return [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(self.ranks)]

    def _rank(
        self, name: str, rank: int, listener: socket.socket, dies: Sequence[tuple[str, int]], attached: bool
    ) -> None:
        if self.ranks > 1:
            join(rank, self.ranks, listener)
        trainer = self.trainer(name)
        job = None
        if attached:
            hierarchy = Hierarchy.of(*self.tiers) if self.hierarchy else None
            job = attach(trainer, hierarchy, config=CheckpointConfig(base_every=4, batch=2) if self.hierarchy else None)
        if rank == 0:
            for event, step in dies:
                trainer.add_callback(Dies(event, step))
        trainer.train(resume_from_checkpoint=self.begins)
        found = outcome(trainer)
        if job is not None and job.checkpointer is not None and (recovery := job.checkpointer.recovery) is not None:
            found["recovered"] = [recovery.version, str(recovery.fidelity)]
        (self.folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        sys.stdout.flush()

    def trainer(self, name: str) -> Trainer:
        torch.manual_seed(3)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
            )
        )
        return Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(self.folder / name), **{**ARGUMENTS, **self.arguments}),
            train_dataset=self.data(self.lines, 1),
            eval_dataset=Tokens(8, 2),
            callbacks=[make() for make in self.callbacks],
        )


def join(rank: int, ranks: int, listener: socket.socket) -> None:
    """As under torchrun, but that rank 0 takes over a socket that listens already: nobody else can have its port."""
    port = listener.getsockname()[1]
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in own.items()}}
    extra = {"is_master": True, "master_listen_fd": os.dup(listener.fileno())} if rank == 0 else {}
    store = torch.distributed.TCPStore("127.0.0.1", port, ranks, **extra)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Everything that must be as it would have been: every bit of the model and its moments, and every loss."""
    state = trainer.state
    skipped = NOT_COMPARED
    if any(hasattr(each, "ds_tensor") for each in trainer.model.parameters()):
        skipped = (*skipped, "total_flos")  # under ZeRO-3 it depends on the parameters that are gathered just then
    logged = [{k: v for k, v in each.items() if not k.endswith(skipped)} for each in state.log_history]
    moments = [each for one in trainer.optimizer.state_dict().get("state", {}).values() for each in one.values()]
    return {
        "parameters": digest(trainer.model.parameters()),
        "moments": digest(each for each in moments if isinstance(each, torch.Tensor)),
        "generator": digest([torch.get_rng_state()]),
        "logged": logged,
        "step": state.global_step,
        "epoch": state.epoch,
        "best": state.best_metric,
        "rate": trainer.optimizer.param_groups[0]["lr"],
    }


def digest(tensors: Any) -> str:
    hashed = hashlib.sha256()
    for each in tensors:
        local = each.to_local() if hasattr(each, "to_local") else getattr(each, "ds_tensor", each)
        hashed.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
