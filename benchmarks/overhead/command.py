"""``python -m benchmarks overhead``: what saving costs the step.

So far: the stall of a differential of many small tensors, against that of the same elements in ten. A pair is measured
in turns, each side in a job of its own. Take the figures on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.machine import machine_facts
from benchmarks.measure import pair_count
from benchmarks.overhead.small_tensors import FEW, MANY, stall_s
from benchmarks.pairs import Pair, Summary, interleave
from benchmarks.report import JsonReport, TableReport, line_of, progress

__all__ = ["add_command", "summary_of"]

ELEMENTS = 4 << 20
RATIO_MAX = 3.0


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"fp32 elements of a differential ({ELEMENTS})")
    parser.add_argument("--tensors", type=int, nargs="+", default=MANY, metavar="N", help="in so many tensors")
    parser.add_argument("--pairs", type=pair_count, default=9, help="pairs a ratio (9)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    report = JsonReport() if arguments.json else TableReport()
    report.machine(machine_facts())
    for tensors in arguments.tensors:
        progress(f"a differential of {arguments.elements} elements in {FEW} tensors and in {tensors}")
        pairs = asyncio.run(measured(arguments.elements, tensors, arguments.pairs))
        found = Measured(summary_of(pairs), "s", "shm", 4 * arguments.elements, {"tensors": tensors})
        report.figure(line_of(figure_of(tensors), found))
    report.close()
    return 0


def figure_of(tensors: int) -> Figure[Any]:
    meaning = f"the stall of a differential of {tensors} tensors, against {FEW} of as many elements together"
    return Figure(f"stall.tensors.{tensors}/{FEW}", meaning, goal=RATIO_MAX, at_most=True)


async def measured(elements: int, tensors: int, pairs: int) -> tuple[Pair, ...]:
    async def many() -> float:
        return await asyncio.to_thread(stall_s, elements, tensors)

    async def few() -> float:
        return await asyncio.to_thread(stall_s, elements, FEW)

    return await interleave(many, few, pairs=pairs, warmups=0)


def summary_of(pairs: Sequence[Pair]) -> Summary:
    """Seconds of both sides, and how many times as long the subject took."""
    ratios = [pair.subject_s / pair.ceiling_s for pair in pairs]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    subject = statistics.median(pair.subject_s for pair in pairs)
    ceiling = statistics.median(pair.ceiling_s for pair in pairs)
    return Summary(subject, ceiling, statistics.median(ratios), (low, high), len(ratios))
