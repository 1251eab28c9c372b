"""What the command line asks of the kernels' figures, and how a kernel is compared with its ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Measured
from benchmarks.machine import cpu_text
from benchmarks.pairs import Repetition, interleave, summarise
from benchmarks.training import SetUp

__all__ = ["KernelSettings", "clocked", "compared"]

WARMUPS = 2


@dataclass(frozen=True)
class KernelSettings:
    """Sizes of one run. Every figure is of ``threads`` threads, on both sides."""

    elements: int
    """fp32 elements of the arrays that are compacted and quantised."""
    replay_elements: int
    pairs: int
    threads: int
    setup: SetUp
    """The training whose gradients are taken; arrays longer than its parameters hold them several times."""
    encode_steps: int
    """Steps of which ``encode.total`` takes the median."""
    progress: Callable[[str], None] = lambda text: None


def clocked(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Repetition:
    """A repetition of the seconds that ``work`` takes; ``before`` does not count."""

    async def repetition() -> float:
        before()
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return repetition


async def compared(
    settings: KernelSettings,
    subject: Repetition,
    ceiling: Repetition,
    nbytes: int,
    details: Mapping[str, Any],
    *,
    device: str | None = None,
) -> Measured:
    """Rates in bytes a second, of ``nbytes`` on both sides."""
    pairs = await interleave(subject, ceiling, pairs=settings.pairs, warmups=WARMUPS)
    facts = {"threads": settings.threads, **details}
    return Measured(summarise(pairs, nbytes), "bytes/s", device or cpu_text(), nbytes, facts)
