"""``python -m benchmarks peers``: what saving and restarting cost, with TierCheck and with what others use.

One job, linear layers under AdamW, is trained once by each way, in an environment of that way's own. Blocks of steps
with and without saving are in turns, so that a drift of the machine favours nobody. Then one version is written while
nothing is trained, the process is killed, and another one restarts from what there is. What was restored is compared
with what was saved, bit for bit, before any figure counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Unavailable
from benchmarks.machine import machine_facts
from benchmarks.measure import size
from benchmarks.peers.environments import python_with
from benchmarks.peers.job import Order
from benchmarks.peers.ways import WAYS, cleaned, delete
from benchmarks.report import progress
from tiercheck.types import bytes_text

__all__ = ["Result", "add_command", "results_of"]

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
SAMPLE_S = 0.02
END_S_MAX = 60.0
TABLE_WIDTH = 120
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "ROLE_NAME": "dlrover-trainer",  # as dlrover-run names its trainers, which have a saver beside them
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",  # of the group that a process which writes for its trainer has with itself
}


@dataclass(frozen=True)
class Result:
    """What one way costs at one interval. Seconds and bytes; medians over the blocks."""

    way: str
    every: int
    """Steps from one save to the next; 1 for what saves each step by itself."""
    step_s: float
    """Without saving."""
    stall_s: float
    """By how much a saved step is longer."""
    step_ratio: float
    """The mean step with saving, against the mean step without it."""
    durable_s: float
    """Until one whole version is on the disk, while nothing is trained."""
    restart_s: float
    """From a process with its model to the end of its first step."""
    peak_bytes: int
    """Of memory, shared memory included, beyond what training alone takes."""
    saved_bytes: int
    """Of one whole version on the disk."""


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--size", type=size, nargs="+", default=[500_000_000], help="bytes of parameters and moments")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 8, 50], metavar="STEPS", help="from save to save")
    parser.add_argument(
        "--only", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY", help=", ".join(WAYS)
    )
    parser.add_argument("--blocks", type=int, default=3, help="pairs of blocks, with and without saving (3)")
    parser.add_argument("--block", type=int, default=50, metavar="STEPS", help="of a block (50)")
    parser.add_argument("--directory", type=Path, default=None, help="where all of them save")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venv" / "peers", help="where their environments are, or are made"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 if a way failed. One whose packages cannot be had is reported as skipped."""
    results: list[Result] = []
    failed = 0
    if arguments.json:
        print(json.dumps(machine_facts()), flush=True)
    for nbytes in arguments.size:
        for name in arguments.only:
            progress(f"{name}, {nbytes / 1e6:.0f} MB")
            try:
                found = measured(name, nbytes, arguments)
            except Unavailable as missing:
                told: dict[str, Any] = {"way": name, "skipped": str(missing)}
            except RuntimeError as error:
                failed, told = 1, {"way": name, "failed": str(error)}
            else:
                results += found
                told = {}
            lines = [told] if told else [{"state_bytes": nbytes, **dataclasses.asdict(each)} for each in found]
            for line in lines:
                if arguments.json:
                    print(json.dumps(line), flush=True)
                elif told:
                    progress(str(told))
    if not arguments.json:
        Console(width=TABLE_WIDTH).print(table_of(results))
    return failed


def measured(name: str, nbytes: int, arguments: argparse.Namespace) -> list[Result]:
    """Errors: ``RuntimeError`` with what the process printed; ``Unavailable``."""
    kind = WAYS[name]
    python = sys.executable if kind.packages is None else python_with(kind.packages, arguments.environments / name)
    directory = Path(tempfile.mkdtemp(prefix="tiercheck-peers-", dir=arguments.directory))
    order = Order(name, str(directory), nbytes, tuple(arguments.every), arguments.blocks, arguments.block)
    try:
        with holder(python, order) if kind.holder else nullcontext(), Watch(directory) as watch:
            trained = list(launch(python, "train", order, watch))
            restarted = list(launch(python, "restart", order, watch))
        return results_of(order, trained, restarted, watch.peak - watch.level)
    finally:
        delete(directory)
        for left in SHARED_MEMORY.glob(f"*{directory.name}*"):
            delete(left)


def launch(python: str, what: str, order: Order, watch: Watch) -> Iterator[dict[str, Any]]:
    """What the process says; the last line has a digest. It ends by a signal, with all that it has started."""
    with tempfile.TemporaryFile("w+") as errors:
        job = started(python, what, order, errors)
        ended = False
        try:
            assert job.stdout is not None
            while not ended and (line := job.stdout.readline()):
                if not line.startswith("{"):
                    continue
                told = json.loads(line)
                if "warm" in told:
                    watch.begin(job.pid)
                    continue
                ended = "digest" in told
                yield told
            if not ended:
                job.wait(END_S_MAX)
                errors.seek(0)
                raise RuntimeError(f"{what} ended with {job.returncode}: {errors.read()[-2000:]}")
        finally:
            watch.end()
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait(END_S_MAX)


def started(python: str, what: str, order: Order, errors: IO[str]) -> subprocess.Popen[str]:
    name = Path(order.directory).name  # what is left in shared memory has it in its name
    environment = {**os.environ, **VARIABLES, "TORCHELASTIC_RUN_ID": name, "PYTHONPATH": str(ROOT)}
    command = [python, "-m", "benchmarks.peers.job", what, json.dumps(dataclasses.asdict(order))]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
        start_new_session=True,
    )


@contextmanager
def holder(python: str, order: Order) -> Iterator[None]:
    """The process that runs beside the training, and outlives it."""
    with tempfile.TemporaryFile("w+") as errors:
        process = started(python, "hold", order, errors)
        try:
            assert process.stdout is not None
            while '"ready"' not in (line := process.stdout.readline()):
                if not line:
                    errors.seek(0)
                    raise RuntimeError(f"what runs beside the training has ended: {errors.read()[-2000:]}")
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S_MAX)


class Watch:
    """Memory of the job, shared memory included, sampled; and old versions deleted, as every user has it done."""

    def __init__(self, directory: Path) -> None:
        self.level = self.peak = 0
        self._directory = directory
        self._watched: psutil.Process | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def begin(self, pid: int) -> None:
        """The job has its model, gradients and moments; what it takes from here on is the way's."""
        process = psutil.Process(pid)
        self.level = self.peak = taken_by(process)
        self._watched = process

    def end(self) -> None:
        self._watched = None

    def _run(self) -> None:
        while not self._done.wait(SAMPLE_S):
            process = self._watched
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    self.peak = max(self.peak, taken_by(process))
                cleaned(self._directory)


def taken_by(process: psutil.Process) -> int:
    """Bytes: private memory of the process and its children, and all shared memory."""
    files = os.statvfs(SHARED_MEMORY)
    nbytes = (files.f_blocks - files.f_bfree) * files.f_frsize
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            memory = each.memory_info()
            nbytes += memory.rss - memory.shared
    return nbytes


def results_of(
    order: Order, trained: Sequence[Mapping[str, Any]], restarted: Sequence[Mapping[str, Any]], peak_bytes: int
) -> list[Result]:
    """A result for each interval. Errors: ``RuntimeError`` if another state was restored than was saved."""
    *blocks, single, last = trained
    (again,) = restarted
    if again["digest"] != last["digest"]:
        raise RuntimeError("what was restored is not what was saved last")
    found = []
    for every in dict.fromkeys(block["every"] for block in blocks):
        own = [block for block in blocks if block["every"] == every]
        steps = [statistics.median(block["plain"]) for block in own]
        stalls = [
            statistics.median(seconds for seconds, saved in block["saving"] if saved) - step
            for block, step in zip(own, steps, strict=True)
        ]
        ratios = [
            statistics.fmean(seconds for seconds, _ in block["saving"]) / statistics.fmean(block["plain"])
            for block in own
        ]
        found.append(
            Result(
                way=order.way,
                every=every,
                step_s=round(statistics.median(steps), 6),
                stall_s=round(statistics.median(stalls), 6),
                step_ratio=round(statistics.median(ratios), 4),
                durable_s=round(single["durable_s"], 4),
                restart_s=round(again["load_s"] + again["first_step_s"], 4),
                peak_bytes=peak_bytes,
                saved_bytes=single["bytes"],
            )
        )
    return found


def table_of(results: Sequence[Result]) -> Table:
    table = Table()
    for column in ("way", "every", "step", "stall", "step ratio", "durable", "restart", "peak", "saved"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    for each in results:
        seconds = (f"{1e3 * taken:.1f} ms" for taken in (each.step_s, each.stall_s))
        longer = (f"{taken:.2f} s" for taken in (each.durable_s, each.restart_s))
        sizes = map(bytes_text, (each.peak_bytes, each.saved_bytes))
        table.add_row(each.way, str(each.every), *seconds, f"{each.step_ratio:.3f}", *longer, *sizes)
    return table
