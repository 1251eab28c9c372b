"""``python -m benchmarks reshape``: what four ranks saved is resumed by three, and torch DCP does the same beside it.

A model under FSDP2 with AdamW's state is saved once by both into one folder, which stays in the page cache. Then three
ranks resume it in turns: by ``attach``, by ``torch.distributed.checkpoint``, and by reading the same bytes alone, which
is the ceiling. What is resumed is compared with what was saved, bit for bit, before anything counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.machine import file_system_text, machine_facts
from benchmarks.measure import pair_count, size
from benchmarks.pairs import Pair, summarise, summarise_times
from benchmarks.report import JsonReport, Report, TableReport, line_of, progress

__all__ = ["add_command", "report_lines"]

SAVED_BY, RESUMED_BY = 4, 3
LAUNCH_S_MAX = 1800.0
MMAP_BYTES = 1 << 18
"""What is allocated above this is given back when it is freed, so that one way's memory is not the next one's."""

TIME = Figure[Any]("reshape.resume/dcp", "bytes resumed a second, against torch DCP", goal=1.0)
READING = Figure[Any]("reshape.resume/reading", "the same, against reading the bytes alone")
PEAK = Figure[Any]("reshape.peak/dcp", "growth of a rank's memory, against torch DCP", goal=1.0, at_most=True)


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--size", type=size, default=10**9, help="bytes of parameters and moments (1 GB)")
    parser.add_argument("--pairs", type=pair_count, default=5, help="times that each way is measured (5)")
    parser.add_argument("--directory", type=Path, default=None, help="where both save")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    directory = Path(tempfile.mkdtemp(prefix="tiercheck-reshape-", dir=arguments.directory))
    report = JsonReport() if arguments.json else TableReport()
    try:
        progress(f"{SAVED_BY} ranks save {arguments.size / 1e9:.2f} GB")
        launch(SAVED_BY, "save", directory, arguments)
        progress(f"{RESUMED_BY} ranks resume it, {arguments.pairs} times each way")
        lines = launch(RESUMED_BY, "resume", directory, arguments)
        report_lines(report, lines, arguments.size, file_system_text(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def launch(ranks: int, what: str, directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 says. Errors: ``RuntimeError`` with the end of what the ranks wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.reshape.worker", what, str(directory), str(arguments.size), str(arguments.pairs)]
    variables = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LAUNCH_S_MAX, env={**os.environ, **variables}, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{ranks} ranks could not {what}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def report_lines(report: Report, lines: Sequence[Mapping[str, Any]], nbytes: int, device: str) -> None:
    """``lines``: of the workers, one of each way a pair."""
    taken: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for line in lines:
        taken[line["way"]][line["pair"]] = line
    report.machine(machine_facts())

    def pairs(other: str, what: str) -> list[Pair]:
        return [Pair(taken["tiercheck"][pair][what], taken[other][pair][what]) for pair in sorted(taken[other])]

    seconds = {
        f"{way}_s": round(statistics.median(each["seconds"] for each in taken[way].values()), 3) for way in taken
    }
    where = {"saved_by": SAVED_BY, "resumed_by": RESUMED_BY, **seconds}
    for figure, other in ((TIME, "dcp"), (READING, "reading")):
        summary = summarise(pairs(other, "seconds"), nbytes)
        report.figure(line_of(figure, Measured(summary, "bytes/s", device, nbytes, where)))
    summary = summarise_times(pairs("dcp", "peak"))  # of bytes here
    report.figure(line_of(PEAK, Measured(summary, "bytes", device, nbytes, where)))
    report.close()
