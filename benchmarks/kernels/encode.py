"""What one differential costs training: all of it, as a share of the step.

The demo's model trains with a checkpointer attached, whose first tier is shared memory. Counted is every second that
the step stands still for the differential: memory is reserved, the gradients are encoded into it, the host state is
packed, the checksum is taken, the shard is published. (A base is another thing, which ``tiercheck demo`` shows.)
"""

from __future__ import annotations

import secrets
import statistics
import time
from functools import partial

from benchmarks.figures import Figure, Measured
from benchmarks.kernels.settings import KernelSettings
from benchmarks.machine import cpu_text
from benchmarks.pairs import Pair, Summary
from benchmarks.training import Training, threads_of_torch
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.streams.codecs import CODECS
from tiercheck.tiers.shm import remove_namespace

__all__ = ["FIGURES"]

WARMUP_STEPS = 5
SPARE_BYTES = 4 << 20
"""Beside the parameters' bytes, of each object: its header and the host state."""


async def total(settings: KernelSettings, *, codec: str) -> Measured:
    training = Training(settings.setup)
    steps = WARMUP_STEPS + settings.encode_steps
    # The base that a run opens with is the only one: the next would come after the last step.
    config = CheckpointConfig(base_every=steps + 1, batch=5, codec=codec, encode_threads=settings.threads)
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
                seconds = time.perf_counter() - begun
                stats = checkpointer.stats
                stall_s, before = stats.differential_stall_s - before, stats.differential_stall_s
                found.append(Pair(stall_s, seconds - stall_s))
            written = stats.captured_bytes
    finally:
        remove_namespace(name)
    if stats.differentials != steps or stats.failed_saves:
        raise RuntimeError(f"{stats.differentials} of {steps} differentials were captured")
    details = {
        "threads": settings.threads,
        "parameters": settings.setup.parameters,
        "windows": settings.setup.micro_batch,
        "codec": codec,
    }
    return Measured(share_of(found[WARMUP_STEPS:]), "s", cpu_text(), round(written / steps), details)


def tier_bytes(parameters: int, steps: int) -> int:
    """Room for three bases, and for the differentials that a checkpointer wants room for before it begins."""
    base, differential = 12 * parameters + SPARE_BYTES, 5 * parameters + SPARE_BYTES
    return 4 * base + (2 * steps + 16) * differential


def share_of(pairs: list[Pair]) -> Summary:
    """Medians of seconds; the ratio is what the differential takes of the step without it."""
    shares = [pair.subject_s / pair.ceiling_s for pair in pairs]
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    return Summary(
        value=statistics.median(pair.subject_s for pair in pairs),
        ceiling=statistics.median(pair.ceiling_s for pair in pairs),
        ratio=statistics.median(shares),
        spread=(low, high),
        pairs=len(pairs),
    )


FIGURES: tuple[Figure[KernelSettings], ...] = tuple(
    Figure(
        f"encode.total.{name}/step",
        f"what a differential with the codec {name} adds to a step of the demo's model",
        partial(total, codec=name),
        0.02,
        at_most=True,
    )
    for name in CODECS
)
