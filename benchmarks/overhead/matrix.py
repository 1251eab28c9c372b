"""What saving costs the step, by model, codec and tiers: which jobs are trained, and what is made of their times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.pairs import Summary
from benchmarks.training import SetUp
from tiercheck.config import CheckpointConfig

__all__ = [
    "BASE_EVERY",
    "CODECS",
    "MODELS",
    "OUTSIDE",
    "TIERS",
    "Block",
    "BlockPair",
    "Cell",
    "cells_of",
    "figures_of",
    "seconds_of",
]

BASE_EVERY = 8
STEP_RATIO_MAX, STALL_RATIO_MAX = 1.02, 1.6
SEED = 1


@dataclass(frozen=True)
class Model:
    """``weight``: how much of the run's time one of its cells gets, against the others."""

    setup: SetUp
    weight: float
    block: int
    """Saved steps of a block. Two blocks at least have a base. A block without saving is half as long."""

    @property
    def tokens(self) -> int:
        return self.setup.micro_batch * self.setup.sequence


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "quick": Model(SetUp(width=32, layers=1, heads=1, seed=SEED, sequence=16, micro_batch=1), 1, 4),
        "demo": Model(SetUp(width=320, layers=5, heads=5, seed=SEED, micro_batch=4), 1, 8),
        "40M": Model(SetUp(width=640, layers=8, heads=10, seed=SEED, micro_batch=4), 3, 4),
        "127M": Model(SetUp(width=1024, layers=10, heads=16, seed=SEED, micro_batch=4), 8, 4),
    }
)
CODECS: Mapping[str, CheckpointConfig] = MappingProxyType(
    {
        "exact": CheckpointConfig(base_every=BASE_EVERY, bases="capture"),
        "nf4+feedback": CheckpointConfig(base_every=BASE_EVERY, bases="capture", codec="nf4+feedback"),
        "adaptive": CheckpointConfig(base_every=BASE_EVERY, bases="capture", codec="adaptive"),
        "folded": CheckpointConfig(base_every=BASE_EVERY, bases="fold"),
    }
)
EXACT = ("exact", "folded")
TIERS = ("shm", "shm+peer", "shm+durable")
OUTSIDE = ("memory", "disk")
"""Nothing is saved, and a process outside moves as many bytes."""
WITH_OUTSIDE = ("quick", "40M")
LARGEST = "127M"


@dataclass(frozen=True)
class Cell:
    """One job of the matrix. ``codec`` is ``outside`` for those that save nothing."""

    model: str
    codec: str
    tiers: str

    @property
    def name(self) -> str:
        return f"{self.model}.{self.codec}.{self.tiers}"

    @property
    def is_outside(self) -> bool:
        return self.codec == "outside"


@dataclass(frozen=True)
class Block:
    """Some steps in a row. Seconds, of the clock unless a name says of a processor."""

    steps: tuple[float, ...]
    training_cpu: float
    """Of the thread that trains."""
    threads_cpu: float
    """Of the other threads of its process, which share Python's lock with it."""
    processes_cpu: float
    """Of the processes that move what it saves: the agent, the neighbour, those that fold."""
    stalls: tuple[float, ...] = ()
    """Of each step, for its differential."""
    other_stall: float = 0.0
    """For bases, and for room in the tiers."""
    captured: int = 0
    """Bytes of its differentials and bases."""


@dataclass(frozen=True)
class BlockPair:
    """A block with saving and one without, one right after the other, and what the machine allows beside them."""

    saving: Block
    plain: Block
    ceiling: float
    """One memcpy of a step's gradients, and one pass of the checksum over them."""


def cells_of(models: Sequence[str]) -> list[Cell]:
    """By model, so that those of one follow each other. Of the largest, whose steps are long, those that matter."""
    found: list[Cell] = []
    for model in models:
        for codec in CODECS:
            tiers = TIERS if model != LARGEST or codec in EXACT else TIERS[-1:]
            found += [Cell(model, codec, each) for each in tiers]
        if model in WITH_OUTSIDE:
            found += [Cell(model, "outside", what) for what in OUTSIDE]
    return found


def seconds_of(cells: Sequence[Cell], seconds: float) -> dict[Cell, float]:
    """What each of them may take, of so many seconds together."""
    whole = sum(MODELS[cell.model].weight for cell in cells)
    return {cell: seconds * MODELS[cell.model].weight / whole for cell in cells}


def figures_of(cell: Cell, pairs: Sequence[BlockPair]) -> list[tuple[Figure[Any], Measured]]:
    """The step with saving against the step without; and the stall of a differential against its ceiling."""
    model = MODELS[cell.model]
    gradient_nbytes = 4 * model.setup.parameters
    judged = cell.codec in EXACT
    saving, plain = [pair.saving for pair in pairs], [pair.plain for pair in pairs]
    count = sum(len(block.steps) for block in saving)
    with_s, without_s = mean_step(saving), mean_step(plain)
    ratios = [mean_step([pair.saving]) / mean_step([pair.plain]) for pair in pairs]
    stall_s = sum(sum(block.stalls) + block.other_stall for block in saving) / count
    more_cpu_s = per_step(saving, "training_cpu") - per_step(plain, "training_cpu")
    details = {
        "parameters": model.setup.parameters,
        "tokens": model.tokens,
        "base_every": BASE_EVERY,
        "steps": count,
        "median_ratio": round(median_step(saving) / median_step(plain), 4),
        "stall_s": round(stall_s, 6),
        "interference_s": round(with_s - without_s - stall_s, 6),
        "more_cpu_s": round(more_cpu_s, 6),
        "waiting_s": round(with_s - without_s - more_cpu_s, 6),
        "threads_cpu_s": round(per_step(saving, "threads_cpu"), 6),
        "processes_cpu_s": round(per_step(saving, "processes_cpu"), 6),
        "captured_bytes": round(sum(block.captured for block in saving) / count),
    }
    step = Figure[Any](
        f"step.{cell.name}",
        "the mean step with saving, against the mean step without",
        goal=STEP_RATIO_MAX if judged and cell.tiers == "shm+durable" and cell.model in ("40M", "127M") else None,
        at_most=True,
    )
    summary = Summary(with_s, without_s, with_s / without_s, quartiles(ratios), len(pairs))
    found = [(step, Measured(summary, "s", cell.tiers, gradient_nbytes, details))]
    if not cell.is_outside:
        stall = Figure[Any](
            f"stall.{cell.name}",
            "the stall of a differential, against one memcpy and one checksum of its gradients",
            goal=STALL_RATIO_MAX if judged else None,
            at_most=True,
        )
        stalls = [statistics.median(pair.saving.stalls) for pair in pairs]
        against = [each / pair.ceiling for each, pair in zip(stalls, pairs, strict=True)]
        ceiling = statistics.median(pair.ceiling for pair in pairs)
        summary = Summary(
            statistics.median(stalls), ceiling, statistics.median(against), quartiles(against), len(pairs)
        )
        found.append((stall, Measured(summary, "s", "shm", gradient_nbytes)))
    return found


def mean_step(blocks: Sequence[Block]) -> float:
    return statistics.fmean(step for block in blocks for step in block.steps)


def median_step(blocks: Sequence[Block]) -> float:
    return statistics.median(step for block in blocks for step in block.steps)


def per_step(blocks: Sequence[Block], what: str) -> float:
    seconds: float = sum(getattr(block, what) for block in blocks)
    return seconds / sum(len(block.steps) for block in blocks)


def quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high
