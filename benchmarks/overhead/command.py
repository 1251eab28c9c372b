"""``python -m benchmarks overhead``: what saving costs the step.

``step``: jobs of three sizes, by codec and tiers, against the same job unsaved. ``stall``: how long the differential of
such a step makes it stand still; and that of many small tensors, against the same elements in ten. Subject and ceiling
are measured in turns. Take the figures on a machine that does nothing else. ``--device cuda`` measures jobs on a GPU
instead (:mod:`benchmarks.overhead.on_gpu`).
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import gc
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Measured, Unavailable
from benchmarks.machine import machine_facts
from benchmarks.measure import pair_count
from benchmarks.overhead import on_gpu
from benchmarks.overhead.jobs import Twins, two_cores
from benchmarks.overhead.matrix import Cell, cells_of, figures_of, seconds_of
from benchmarks.overhead.small_tensors import FEW, MANY, stall_s
from benchmarks.pairs import Pair, interleave, summarise_times
from benchmarks.report import JsonReport, Report, TableReport, line_of, progress
from benchmarks.training import threads_of_torch

__all__ = ["add_command"]

ELEMENTS = 4 << 20
MEMORY = 96 << 30
RATIO_MAX = 3.0
SECONDS = 540.0
SIZES = ("demo", "40M", "127M")
QUICK_SECONDS = 0.0


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="such as '40M.exact.*' or 'tensors.*'")
    parser.add_argument("--list", action="store_true", help="the names, and no more")
    parser.add_argument("--quick", action="store_true", help="jobs of the smallest size: whether it works")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"that the jobs chosen train together, about ({SECONDS:.0f})"
    )
    parser.add_argument("--directory", type=Path, default=None, help="on the disk that is to be measured")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help=f"fp32 elements of a differential ({ELEMENTS})")
    parser.add_argument("--tensors", type=int, nargs="+", default=MANY, metavar="N", help="in so many tensors")
    parser.add_argument("--pairs", type=pair_count, default=5, help="pairs of a ratio of many tensors to few (5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the jobs train (cpu)")
    parser.add_argument(
        "--memory", type=int, default=MEMORY, help=f"bytes of the first tier of a job on a GPU ({MEMORY >> 30} GiB)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 if a job failed, 2 if there is no GPU and one was asked for."""
    if arguments.device == "cuda":
        return run_on_gpu(arguments)
    cells = chosen(cells_of(("quick",) if arguments.quick else SIZES), arguments.only)
    tensors = [each for each in arguments.tensors if is_chosen(f"tensors.{each}", arguments.only)]
    if arguments.list:
        print(*(cell.name for cell in cells), *(f"tensors.{each}" for each in tensors), sep="\n")
        return 0
    report = JsonReport() if arguments.json else TableReport()
    report.machine(machine_facts())
    with two_cores(), threads_of_torch(1):
        failed = report_jobs(report, cells, QUICK_SECONDS if arguments.quick else arguments.seconds, arguments)
        for count in tensors:
            progress(f"a differential of {arguments.elements} elements in {FEW} tensors and in {count}")
            pairs = asyncio.run(measured(arguments.elements, count, arguments.pairs))
            found = Measured(summarise_times(pairs), "s", "shm", 4 * arguments.elements, {"tensors": count})
            report.figure(line_of(figure_of(count), found))
    report.close()
    return failed


def run_on_gpu(arguments: argparse.Namespace) -> int:
    wanted = [name for name in on_gpu.names(tuple(on_gpu.SIZES)) if is_chosen(name, arguments.only)]
    if arguments.list:
        print(*wanted, sep="\n")
        return 0
    try:
        gpu = on_gpu.need_gpu()
    except Unavailable as reason:
        progress(f"error: {reason}")
        return 2
    report = JsonReport() if arguments.json else TableReport()
    report.machine({**machine_facts(), "gpu": gpu})
    failed = 0
    for name in wanted:
        progress(name)
        kind, _, of = name.removeprefix("cuda.").partition(".")
        try:
            if kind == "step":
                framework, size, codec = of.split(".")
                found = asyncio.run(on_gpu.step_figure(framework, size, codec, arguments.pairs, arguments.memory))
            else:
                found = asyncio.run(on_gpu.COPIES[name](arguments.pairs))
        except Exception as error:  # noqa: BLE001  (the others are measured all the same)
            failed = 1
            report.figure({"figure": name, "failed": f"{type(error).__name__}: {error}"})
            continue
        report.figure(line_of(*found))
    report.close()
    return failed


def report_jobs(report: Report, cells: Sequence[Cell], seconds: float, arguments: argparse.Namespace) -> int:
    shares, failed = seconds_of(cells, seconds), 0
    for model, of_model in groupby(cells, key=lambda cell: cell.model):
        twins = Twins(model)
        for cell in of_model:
            progress(f"{cell.name}, {shares[cell]:.0f} s")
            try:
                with tempfile.TemporaryDirectory(prefix="overhead-", dir=arguments.directory) as directory:
                    pairs = twins.pairs(cell, shares[cell], Path(directory))
            except Unavailable as reason:
                report.figure({"figure": f"step.{cell.name}", "skipped": str(reason)})
                continue
            except Exception as error:  # noqa: BLE001  (the others are measured all the same)
                failed = 1
                told = f"{type(error).__name__}: {error}"
                report.figure({"figure": f"step.{cell.name}", "failed": told})
                continue
            for figure, found in figures_of(cell, pairs):
                report.figure(line_of(figure, found))
        del twins
        gc.collect()
    return failed


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    return [cell for cell in cells if is_chosen(cell.name, patterns)]


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def figure_of(tensors: int) -> Figure[Any]:
    meaning = f"the stall of a differential of {tensors} tensors, against {FEW} of as many elements together"
    return Figure(f"stall.tensors.{tensors}/{FEW}", meaning, goal=RATIO_MAX, at_most=True)


async def measured(elements: int, tensors: int, pairs: int) -> tuple[Pair, ...]:
    async def many() -> float:
        return await asyncio.to_thread(stall_s, elements, tensors)

    async def few() -> float:
        return await asyncio.to_thread(stall_s, elements, FEW)

    return await interleave(many, few, pairs=pairs, warmups=0)
