"""A figure of the kernels that the demo's trainers give, with ranks that are forked; the argument is where it goes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from benchmarks.kernels.figures import FIGURES
from benchmarks.kernels.settings import KernelSettings
from benchmarks.training import SetUp
from tests.cluster.forked_ranks import fork_ranks
from tiercheck.demo import launch

__all__ = ["STEPS"]

STEPS = 3
TINY = SetUp(width=32, layers=1, heads=2, seed=3, sequence=32, micro_batch=1)


def main() -> None:
    launch.torchrun = fork_ranks
    tiny = KernelSettings(elements=1 << 17, replay_elements=20_000, pairs=5, threads=1, setup=TINY, encode_steps=STEPS)
    (figure,) = (each for each in FIGURES if each.name == "encode.total.snapshot/step")
    measured = asyncio.run(figure.measure(tiny))
    summary = measured.summary
    found = {"pairs": summary.pairs, "value": summary.value, "ceiling": summary.ceiling, **measured.details}
    Path(sys.argv[1]).write_text(json.dumps(found))
