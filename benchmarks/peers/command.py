"""``python -m benchmarks peers``: what saving and restarting cost, with TierCheck and with what others use.

One job, linear layers under AdamW, is trained once by each way, in an environment of that way's own. Blocks of steps
with and without saving are in turns, so that a drift of the machine favours nobody. Then one version is written while
nothing is trained, the process is killed, and others restart from what there is, one after another. What was restored
is compared with what was saved, bit for bit, before any figure counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Self

import psutil
from rich.console import Console

from benchmarks.figures import Unavailable
from benchmarks.machine import machine_facts
from benchmarks.measure import size
from benchmarks.peers.environments import python_with
from benchmarks.peers.job import Order
from benchmarks.peers.plot import plot_peers
from benchmarks.peers.results import Result, StepCost, VersionCost, markdown, read_lines, results_of, tables_of
from benchmarks.peers.ways import WAYS, cleaned, delete
from benchmarks.report import progress
from benchmarks.waking import WAKE

__all__ = ["add_command"]

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
SAMPLE_S = 0.02
END_S_MAX = 60.0
TABLE_WIDTH = 120
RESTARTS = 5
VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "",  # what is imported is compiled once, as if it had been installed
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "ROLE_NAME": "dlrover-trainer",  # as dlrover-run names its trainers, which have a saver beside them
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",  # of the group that a process which writes for its trainer has with itself
}


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
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, as SVG or PNG")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="what --json printed before: measure nothing")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 if a way failed. One whose packages cannot be had is reported as skipped. Lines that are none of this command's
    are wrong usage: 2."""
    results: list[Result] = []
    failed = False
    if arguments.lines is None:
        for found in outcomes(arguments):
            if isinstance(found, (StepCost, VersionCost)):
                results.append(found)
                found = dataclasses.asdict(found)
            failed = failed or "failed" in found
            if arguments.json:
                print(json.dumps(found), flush=True)
            elif "failed" in found or "skipped" in found:
                progress(str(found))
    else:
        try:
            results = read_lines(arguments.lines)
        except (OSError, ValueError) as error:
            progress(f"error: {error}")
            return 2
    if arguments.markdown:
        print(markdown(results), end="")
    elif not arguments.json:
        Console(width=TABLE_WIDTH).print(*tables_of(results))
    if arguments.plot is not None and results:
        plot_peers(arguments.plot, results)
    return int(failed)


def outcomes(arguments: argparse.Namespace) -> Iterator[Result | dict[str, Any]]:
    """The machine's facts; then the results of each way, or why there are none."""
    yield machine_facts()
    for nbytes in arguments.size:
        for name in arguments.only:
            progress(f"{name}, {nbytes / 1e6:.0f} MB")
            try:
                yield from measured(name, nbytes, arguments)
            except Unavailable as missing:
                yield {"way": name, "skipped": str(missing)}
            except RuntimeError as error:
                yield {"way": name, "failed": str(error)}


def measured(name: str, nbytes: int, arguments: argparse.Namespace) -> list[Result]:
    """Errors: ``RuntimeError`` with what the process printed; ``Unavailable``."""
    kind = WAYS[name]
    python = sys.executable if kind.packages is None else python_with(kind.packages, arguments.environments / name)
    directory = Path(tempfile.mkdtemp(prefix="tiercheck-peers-", dir=arguments.directory))
    every = tuple(arguments.every)
    wake_bytes = min(WAKE * nbytes, psutil.virtual_memory().available // 2)
    order = Order(name, str(directory), nbytes, every, arguments.blocks, arguments.block, wake_bytes)
    try:
        with holder(python, order) if kind.holder else nullcontext(), Watch(directory) as watch:
            trained = list(launch(python, "train", order, watch))
            restarted = [line for _ in range(RESTARTS) for line in launch(python, "restart", order, watch)]
            (restored,) = launch(python, "restore", order, watch)
        return results_of(order, trained, restarted, restored, watch.peak - watch.level)
    finally:
        delete(directory)
        for left in SHARED_MEMORY.glob(f"*{directory.name}*"):
            delete(left)


def launch(python: str, what: str, order: Order, watch: Watch) -> Iterator[dict[str, Any]]:
    """What the process says, up to a digest or a first step. It ends by a signal, with all that it has started."""
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
                ended = not told.keys().isdisjoint(("digest", "first_step_s"))
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
