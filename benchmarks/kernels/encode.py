"""What one differential costs training: all of it, as a share of the step.

Counted is every second that the step stands still for the differential: memory is reserved, the gradients are encoded
into it, the host state is packed, the checksum is taken, the shard is published. (A base is another thing, which
``tiercheck demo`` shows.) Twice: what the demo does to each of its ranks, and, harsher, one process which has the whole
gradient in one tensor a parameter.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import Figure, Measured, Unavailable
from benchmarks.kernels.settings import KernelSettings
from benchmarks.machine import cpu_text
from benchmarks.pairs import Pair, summarise_times
from benchmarks.training import SetUp, Training, threads_of_torch
from tiercheck.config import CheckpointConfig
from tiercheck.demo.launch import Trainers
from tiercheck.demo.settings import RANKS, TrainingSettings
from tiercheck.demo.training.progress import RankProgress
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.codecs import codec_names
from tiercheck.streams.records.snapshot import SNAPSHOT_CODECS
from tiercheck.tiers.shm.driver import remove_namespace

__all__ = ["FIGURES"]

WARMUP_STEPS = 25
"""By then snapshots use memory again that earlier ones have given back: what was made ready for them before the first
step, when nobody could say what the optimizer would keep, was of another size."""
SPARE_BYTES = 4 << 20
"""Beside the parameters' bytes, of each object: its header and the host state."""


async def of_a_rank(settings: KernelSettings, *, codec: str) -> Measured:
    """The demo's own trainers under ZeRO-1: two processes of one thread each, of which each encodes its half of the
    parameters, in the few tensors that ZeRO makes of them. Seconds are the trainers' own; the ranks' steps count alike.

    Errors: ``Unavailable`` for more than one thread, which a rank of the demo does not have; ``TrainerFailure``.
    """
    if settings.threads != 1:
        raise Unavailable("each rank of the demo has one thread")
    setup, steps = settings.setup, WARMUP_STEPS + settings.encode_steps
    name = f"benchmark-{secrets.token_hex(6)}"
    size = tier_bytes(-(-setup.parameters // RANKS), steps)
    training = TrainingSettings(
        steps=steps,
        seed=setup.seed,
        width=setup.width,
        layers=setup.layers,
        heads=setup.heads,
        sequence=setup.sequence,
        micro_batch=setup.micro_batch,
        tiers=(f"shm://{name}-{{rank}}?size={size}",),
        name=name,
        base_every=steps + 1,
        codec=codec,
    )
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-benchmark-"))
    try:
        ranks = await asyncio.to_thread(trained, training, folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for rank in range(RANKS):
            remove_namespace(f"{name}-{rank}")
    found = [pair for rank in ranks for pair in pairs_of(rank)[WARMUP_STEPS - 1 :]]
    if len(found) != RANKS * settings.encode_steps:
        raise RuntimeError(f"the ranks told of {len(found)} steps, not of {RANKS * settings.encode_steps}")
    details = {"threads": 1, "ranks": RANKS, **details_of(setup, codec)}
    return Measured(summarise_times(found), "s", cpu_text(), 4 * setup.parameters // RANKS, details)


def trained(settings: TrainingSettings, folder: Path) -> Sequence[RankProgress]:
    with Trainers(settings, folder) as trainers:
        ranks = trainers.watch(lambda ranks: all(rank.finished for rank in ranks), lambda ranks: None)
        trainers.wait_for_exit()
    return ranks


def pairs_of(rank: RankProgress) -> list[Pair]:
    """Of each step but the first: the seconds it stood still, and the others."""
    return [
        Pair(stall_s := after.stall_s - before.stall_s, after.seconds - stall_s)
        for before, after in pairwise(rank.steps)
    ]


async def of_one_process(settings: KernelSettings, *, codec: str) -> Measured:
    training = Training(settings.setup)
    steps = WARMUP_STEPS + settings.encode_steps
    # The base that a run opens with is the only one: the next would come after the last step.
    threads = settings.threads
    config = CheckpointConfig(base_every=steps + 1, bases="capture", batch=5, codec=codec, encode_threads=threads)
    name = f"benchmark-{secrets.token_hex(6)}"
    url = f"shm://{name}?size={tier_bytes(settings.setup.parameters, steps)}"
    found: list[Pair] = []
    before = written = 0.0
    try:
        with (
            threads_of_torch(settings.threads),
            attach(training.model, training.optimizer, Hierarchy.of(url), config=config) as checkpointer,
        ):
            for _ in range(steps):
                begun = time.perf_counter()
                training.train(1)
                checkpointer.end_iteration()
                seconds = time.perf_counter() - begun
                stats = checkpointer.stats
                stall_s, before = stats.differential_stall_s - before, stats.differential_stall_s
                found.append(Pair(stall_s, seconds - stall_s))
            written = stats.captured_bytes
    finally:
        remove_namespace(name)
    if stats.differentials != steps or stats.failed_saves:
        raise RuntimeError(f"{stats.differentials} of {steps} differentials were captured")
    details = {"threads": settings.threads, **details_of(settings.setup, codec)}
    return Measured(summarise_times(found[WARMUP_STEPS:]), "s", cpu_text(), round(written / steps), details)


def details_of(setup: SetUp, codec: str) -> dict[str, object]:
    return {"parameters": setup.parameters, "windows": setup.micro_batch, "codec": codec}


def tier_bytes(parameters: int, steps: int) -> int:
    """Room for three bases, and for the differentials that a checkpointer wants room for before it begins."""
    base, differential = 12 * parameters + SPARE_BYTES, 5 * parameters + SPARE_BYTES
    return 4 * base + (2 * steps + 16) * differential


FIGURES: tuple[Figure[KernelSettings], ...] = (
    *(
        Figure(
            f"encode.total.{name}/step",
            f"what a differential with the codec {name} adds to a step of a rank of the demo",
            partial(of_a_rank, codec=name),
            0.02,
            at_most=True,
        )
        for name in codec_names()
    ),
    *(
        Figure(
            f"encode.total.{name}/step",
            f"what a {name} adds to a step of a rank of the demo: its part of the state, each time",
            partial(of_a_rank, codec=name),
        )
        for name in SNAPSHOT_CODECS
    ),
    *(
        Figure(
            f"encode.one_process.{name}/step",
            f"what a differential with the codec {name} adds to a step of one process, which has all parameters",
            partial(of_one_process, codec=name),
        )
        for name in codec_names()
    ),
)
