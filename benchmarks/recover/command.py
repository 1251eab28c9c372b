"""``python -m benchmarks recover``: what a recovery takes, against what the machine needs for its bytes.

From shared memory: against one memcpy and one XXH3 of the state, by as many threads. From a disk: against raw reads
past the page cache. Each pair is measured in a process of its own, which has just made its model, in turns; what is
restored is compared with what was saved, bit for bit, before any figure counts.
Opening tiers and capturing the next base are no part of it. Take the figures on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.ceilings.buffers import filled_buffer
from benchmarks.ceilings.direct import DirectFile
from benchmarks.figures import Figure, Measured, Unavailable
from benchmarks.machine import cpu_text, file_system_text, machine_facts
from benchmarks.measure import pair_count, size
from benchmarks.pairs import PAIRS_MIN, Pair, Summary, summarise, summarise_times
from benchmarks.recover.job import STATE_BYTES, WIDTH, Order, layers_of
from benchmarks.report import JsonReport, Report, TableReport, line_of, progress
from tiercheck.errors import NotFound
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["add_command"]

SIZES = (500_000_000, 2_000_000_000)
QUICK_WIDTH, QUICK_SIZE = 256, 4 << 20
TIERS = ("shm", "nvme")
THREADS = 2
TIMES_MAX, SHARE_MIN = 1.5, 0.8
CALIBRATIONS = 1
PROCESS_S_MAX = 600.0


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--size", type=size, nargs="+", default=list(SIZES), help="bytes of parameters and moments")
    parser.add_argument("--tier", nargs="+", default=list(TIERS), choices=TIERS, help="read from there")
    parser.add_argument("--replayed", type=int, nargs="+", default=[0], metavar="N", help="steps after the base")
    parser.add_argument("--threads", type=int, default=THREADS, help=f"of the recovery and of its ceiling ({THREADS})")
    parser.add_argument("--pairs", type=pair_count, default=9, help="pairs a ratio (9)")
    parser.add_argument("--quick", action="store_true", help="a small state and few pairs: does it run at all?")
    parser.add_argument("--directory", type=Path, default=None, help="where the disk to be measured is mounted")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 if one failed."""
    report: Report = JsonReport() if arguments.json else TableReport()
    report.machine(machine_facts())
    failed = 0
    for nbytes in [QUICK_SIZE] if arguments.quick else arguments.size:
        for tier in arguments.tier:
            for replayed in arguments.replayed:
                figure = figure_of(tier, nbytes, replayed)
                progress(f"{figure.name}: {figure.meaning}")
                try:
                    found = measured(tier, nbytes, replayed, arguments)
                except Unavailable as error:
                    report.figure({"figure": figure.name, "skipped": str(error)})
                except RuntimeError as error:
                    failed = 1
                    report.figure({"figure": figure.name, "failed": str(error)})
                else:
                    report.figure(line_of(figure, found))
    report.close()
    return failed


def figure_of(tier: str, nbytes: int, replayed: int) -> Figure[Any]:
    after = f".replayed.{replayed}" if replayed else ""
    name = f"recover.{tier}.{nbytes / 1e6:.0f}MB{after}"
    steps = f", and {replayed} steps replayed" if replayed else ""
    if tier == "shm":
        meaning = f"a state brought back from shared memory{steps}, against one memcpy and one XXH3 of its bytes"
        return Figure(f"{name}/memcpy+xxh3", meaning, goal=None if replayed else TIMES_MAX, at_most=True)
    meaning = f"a state brought back from the disk{steps}, against raw reads past the page cache"
    return Figure(f"{name}/raw_direct", meaning, goal=None if replayed else SHARE_MIN)


def measured(tier: str, nbytes: int, replayed: int, arguments: argparse.Namespace) -> Measured:
    """Errors: ``RuntimeError`` with what a process printed; ``Unavailable``."""
    width = QUICK_WIDTH if arguments.quick else WIDTH
    nbytes = layers_of(nbytes, width) * width**2 * STATE_BYTES
    count = PAIRS_MIN if arguments.quick else arguments.pairs
    with places(tier, nbytes, arguments.directory) as (saving, reading, directory):
        shape = asyncio.run(shape_of(directory, nbytes)) if tier == "nvme" else None
        order = Order(saving, nbytes, width, replayed, arguments.threads, str(directory))
        saved = launch("save", order)
        if tier == "nvme":
            remove_namespace(name_of(saving[0]))
        lines = []
        for number in range(count + 1):
            pair = dataclasses.replace(order, urls=reading, shape=shape, ceiling_first=number % 2 == 1)
            found = launch("recover", pair)
            if found["digest"] != saved["digest"]:
                raise RuntimeError("what was restored is not what was saved")
            progress(f"  {found['recovery_s']:.3f} s against {found['ceiling_s']:.3f} s: {found['phases']}")
            lines.append(found)
        device = cpu_text() if shape is None else file_system_text(directory)
    lines = lines[1:]  # the first one wakes the machine
    pairs = [Pair(line["recovery_s"], line["ceiling_s"]) for line in lines]
    summary: Summary = summarise_times(pairs) if shape is None else summarise(pairs, nbytes)
    phases = medians([line["phases"] for line in lines])
    details = {"replayed": replayed, "threads": arguments.threads, "phases": phases}
    return Measured(summary, "s" if shape is None else "bytes/s", device, nbytes, details)


@contextmanager
def places(tier: str, nbytes: int, disk: Path | None) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Path]]:
    """The tiers that are saved to, those that are read, and a directory."""
    names = [f"tiercheck-benchmark-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    directory = Path(tempfile.mkdtemp(prefix="tiercheck-benchmark-", dir=disk))
    memory, other = (f"shm://{name}" for name in names)
    durable = f"nvme://{quote(str(directory / 'tier'))}?survives=rack"
    try:
        yield ((memory,), (memory,), directory) if tier == "shm" else ((memory, durable), (other, durable), directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for name in names:
            with suppress(NotFound):
                remove_namespace(name)


def name_of(url: str) -> str:
    return url.partition("://")[2]


async def shape_of(directory: Path, nbytes: int) -> tuple[int, int]:
    """Write a file of so many bytes, and find how it is read fastest. Errors: ``Unavailable``."""
    raw = DirectFile(directory, filled_buffer(-(-nbytes // 4096) * 4096))
    raw.check()
    await raw.write()
    await raw.read_as(directory / "raw", filled_buffer(-(-nbytes // 4096) * 4096), CALIBRATIONS)
    return raw.read_shape.block_bytes, raw.read_shape.depth


def launch(what: str, order: Order) -> dict[str, Any]:
    """What the process says. Errors: ``RuntimeError``."""
    command = [sys.executable, "-m", "benchmarks.recover.job", what, json.dumps(dataclasses.asdict(order))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S_MAX, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{what} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def medians(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in phases for name in each)
    return {name: round(statistics.median(each.get(name, 0.0) for each in phases), 5) for name in names}
