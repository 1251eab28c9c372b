"""One rank of the demo's training: an ordinary DeepSpeed loop, started by torchrun.

``attach`` is the only line that checkpointing adds to it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tiercheck.demo.training.deepspeed_cpu import prepare_cpu

if os.environ.get("DS_ACCELERATOR", "cpu") == "cpu":
    prepare_cpu()  # before anything imports DeepSpeed, which chooses its accelerator then

import deepspeed
import torch

from tiercheck.demo.settings import RECOVERED, TrainingSettings
from tiercheck.demo.training.digest import state_digest, whole_digest
from tiercheck.demo.training.iterations import build_model, iterate_by
from tiercheck.demo.training.model_size import parameter_count
from tiercheck.demo.training.progress import ProgressWriter, progress_path
from tiercheck.demo.training.text import fingerprint, load_corpus
from tiercheck.recording.stats import Stats

__all__ = ["deepspeed_configuration", "main", "train"]

LEARNING_RATE = 1e-3
WARMUP_STEPS = 10
RANKS_APART_MAX = 2
"""Versions that ranks may be apart when they are killed. A stage that is further behind goes back alone."""
FOLDS_S_MAX = 60.0
FOLDS_AGAIN_S = 0.05
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def deepspeed_configuration(settings: TrainingSettings) -> dict[str, Any]:
    """The DeepSpeed JSON; ``torch_adam`` because DeepSpeed's own Adam wants a compiler."""
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": settings.steps + 1,
        "zero_optimization": {"stage": settings.zero},
        "bf16": {"enabled": settings.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": max(settings.steps, WARMUP_STEPS + 1),
                "warmup_num_steps": WARMUP_STEPS,
                "warmup_min_lr": 0.0,
                "warmup_max_lr": LEARNING_RATE,
            },
        },
    }


def build_engine(settings: TrainingSettings, rank: int) -> Any:
    model = build_model(settings)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=deepspeed_configuration(settings)
    )
    torch.manual_seed(settings.seed + 1 + rank)  # its own dropout on each
    return engine


def attach_checkpointer(engine: Any, settings: TrainingSettings) -> Any:
    """The checkpointer, which has recovered what the tiers hold; ``None`` if the run has no tiers."""
    if not settings.tiers:
        return None
    # Each rank stands for a node, with an agent of its own.
    node = str(torch.distributed.get_rank())
    os.environ |= {"TIERCHECK_NODE": node, "TIERCHECK_AGENT_NODE": f"{settings.name}-{node}"}
    from tiercheck.config import CheckpointConfig
    from tiercheck.hierarchy import Hierarchy
    from tiercheck.integrations.deepspeed import attach
    from tiercheck.policy.recovery.lost_stage import LostStage

    config = CheckpointConfig(base_every=settings.base_every, batch=settings.batch, codec=settings.codec)
    lost = None
    if settings.on_lost_stage is not None:
        lost = LostStage(method=settings.on_lost_stage, behind_max=RANKS_APART_MAX)
    return attach(engine, Hierarchy.of(*settings.tiers), config=config, on_lost_stage=lost)


def wait_for_folds(checkpointer: Any) -> None:
    """What folds is made ready from the first step on, and meanwhile a job of days has its first bases captured. This
    run would be over by then."""
    from tiercheck.replication.fold_controller import PREPARING

    until = time.monotonic() + FOLDS_S_MAX
    while time.monotonic() < until:
        stats = checkpointer.stats
        if stats.mover.folds or stats.not_folded or stats.mover.not_folded not in ("", PREPARING):
            return
        time.sleep(FOLDS_AGAIN_S)


def digest_at(engine: Any, settings: TrainingSettings) -> dict[str, str]:
    """Of the state after a version. Data-parallel ranks put the whole together; of a stage it is its own."""
    return state_digest(engine) if settings.stages else whole_digest(engine)


def train(settings: TrainingSettings, rank: int, progress: ProgressWriter) -> None:
    """Train up to ``settings.steps``, from where the tiers say, and write the digest of the final state."""
    corpus = load_corpus(Path(settings.text) if settings.text else None)
    engine = build_engine(settings, rank)
    iterate = iterate_by(engine, settings, corpus, rank)
    checkpointer = attach_checkpointer(engine, settings)
    if checkpointer is not None and (recovery := checkpointer.recovery) is not None:
        progress.write("recovered", **recovery.to_object())
    progress.write(
        "started",
        rank=rank,
        pid=os.getpid(),
        parameters=parameter_count(width=settings.width, layers=settings.layers, sequence=settings.sequence),
        corpus=fingerprint(corpus),
        version=engine.global_steps,
    )
    if settings.digest_at == RECOVERED:
        progress.write("state", version=engine.global_steps, digest=digest_at(engine, settings))
    for version in range(engine.global_steps + 1, settings.steps + 1):
        begun = time.perf_counter()
        loss = iterate(version)
        value, seconds = loss.item(), time.perf_counter() - begun
        # Asking for the statistics looks into the tiers: it is no part of the step.
        stats = Stats() if checkpointer is None else checkpointer.stats
        progress.step(version, value, seconds, stats.stall_s, captured=stats.bases, folded=stats.mover.folded_bases)
        if settings.digest_at == version:
            progress.write("state", version=version, digest=digest_at(engine, settings))
        if checkpointer is not None and version == 1:
            wait_for_folds(checkpointer)
        if version == settings.killed_by:
            signal.pause()
    digest = state_digest(engine)
    begun = time.perf_counter()
    if checkpointer is not None:
        checkpointer.close()
    drain_s = time.perf_counter() - begun
    stats = Stats() if checkpointer is None else checkpointer.stats
    progress.write("finished", digest=digest, drain_s=drain_s, captured=stats.bases, folded=stats.mover.folded_bases)
    engine.destroy()


def die_with_parent() -> None:
    """Have the kernel kill this process when the torchrun agent dies, so that no trainer is ever left behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main() -> None:
    """``python -m tiercheck.demo.training.trainer --settings FILE --progress FOLDER``, under torchrun."""
    parser = argparse.ArgumentParser(prog="python -m tiercheck.demo.training.trainer", description=__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="the run's settings, a JSON file")
    parser.add_argument("--progress", type=Path, required=True, help="the folder for the ranks' progress files")
    arguments = parser.parse_args()
    die_with_parent()
    settings = TrainingSettings.load(arguments.settings)
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True)  # the runs are compared bit by bit
    deepspeed.init_distributed(dist_backend="nccl" if settings.device == "cuda" else "gloo")
    rank = torch.distributed.get_rank()
    with ProgressWriter(progress_path(arguments.progress, rank)) as progress:
        try:
            train(settings, rank, progress)
        except Exception as error:
            progress.write("failed", error=f"{type(error).__name__}: {error}")
            raise
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Everything is written and closed. A regular exit may abort in torch's static destructors ("terminate called
    # without an active exception", seen with ZeRO-3), which would make a success look like a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
