"""Compaction of the largest hundredth, against one read of the array, and against torch.topk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ceilings.read import Read
from benchmarks.figures import Figure, Measured
from benchmarks.kernels.gradients import RATIO, harvest, repeated, shuffled
from benchmarks.kernels.settings import KernelSettings, clocked, compared
from benchmarks.training import Floats, SetUp
from tiercheck import kernels

__all__ = ["FIGURES"]

CAPACITY = 1.25
"""Room for survivors, as a multiple of those wanted: what the codec ``sparse`` reserves."""


def whole(setup: SetUp) -> Floats:
    return harvest(setup).gradient


def one_matrix(setup: SetUp) -> Floats:
    return harvest(setup).matrix


def in_random_order(setup: SetUp) -> Floats:
    return shuffled(harvest(setup).gradient)


@dataclass
class Compaction:
    """What is compacted, and where to: memory of the caller's, as in a tier."""

    values: Floats
    threshold: float
    indices: NDArray[np.uint32]
    survivors: Floats
    residual: Floats | None
    threads: int

    @classmethod
    def of(cls, values: Floats, threads: int, *, feedback: bool = False) -> Compaction:
        room = math.ceil(CAPACITY * RATIO * values.size)
        residual = np.zeros_like(values) if feedback else None
        threshold = kernels.select_threshold(values, RATIO, 0)
        return cls(values, threshold, np.empty(room, np.uint32), np.empty(room, np.float32), residual, threads)

    def __call__(self) -> int:
        return kernels.compact_into(
            self.values, self.threshold, self.indices, self.survivors, residual=self.residual, threads=self.threads
        )

    def clear(self) -> None:
        """No residual, as after a base."""
        if self.residual is not None:
            self.residual.fill(0)

    def check(self) -> int:
        """How many survived. Errors: ``RuntimeError`` where they are not what NumPy finds."""
        self.clear()
        count = self()
        wanted = np.flatnonzero(np.abs(self.values) >= np.float32(self.threshold))[: self.indices.size]
        kept = slice(min(count, self.indices.size))
        if not (
            np.array_equal(self.indices[kept], wanted) and np.array_equal(self.survivors[kept], self.values[wanted])
        ):
            raise RuntimeError("compaction found other elements than NumPy")
        return count


async def against_read(
    settings: KernelSettings, *, source: Callable[[SetUp], Floats], feedback: bool = False
) -> Measured:
    values = repeated(source(settings.setup), settings.elements)
    compaction = Compaction.of(values, settings.threads, feedback=feedback)
    read = Read(values, settings.threads)
    read.calibrate()
    count = compaction.check()
    details = {"kept": round(count / values.size, 5), "ceiling_shape": read.shape}
    subject = clocked(compaction, compaction.clear)
    return await compared(settings, subject, clocked(read), values.nbytes, details)


async def against_topk(settings: KernelSettings) -> Measured:
    """torch.topk of magnitudes that it finds ready, unsorted; nothing is gathered afterwards."""
    values = repeated(whole(settings.setup), settings.elements)
    compaction = Compaction.of(values, settings.threads)
    magnitudes = torch.from_numpy(values).abs()
    wanted = round(RATIO * values.size)
    ceiling = clocked(lambda: torch.topk(magnitudes, wanted, sorted=False))
    details = {"kept": round(compaction.check() / values.size, 5)}
    return await compared(settings, clocked(compaction), ceiling, values.nbytes, details)


FIGURES: tuple[Figure[KernelSettings], ...] = (
    Figure(
        "compaction/read_ceiling",
        "the largest hundredth of a real gradient, all parameters in one array, against one read",
        partial(against_read, source=whole),
        0.65,
    ),
    Figure(
        "compaction.matrix/read_ceiling",
        "the same of the gradient of one matrix: one tensor, one threshold",
        partial(against_read, source=one_matrix),
        0.65,
    ),
    Figure(
        "compaction.shuffled/read_ceiling",
        "the same of the gradient in random order: nothing is clustered",
        partial(against_read, source=in_random_order),
        0.5,
    ),
    Figure(
        "compaction.feedback/read_ceiling",
        "the real gradient and a residual: two arrays are read, and one is written",
        partial(against_read, source=whole, feedback=True),
    ),
    Figure("compaction/torch_topk", "times as fast as torch.topk of the magnitudes", against_topk, 50),
)
