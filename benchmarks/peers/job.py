"""What each process of ``python -m benchmarks peers`` runs: a training job that one way saves, or that it restarts.

Arguments: ``train | restart | restore | hold``, a JSON object (:class:`Order`). Prints JSON objects, a line each.

It knows nothing of TierCheck, and runs in an environment that has torch and the library of its way.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.ways import WAYS, Job, Way, hold_dlrover
from benchmarks.waking import wake

__all__ = ["Order", "main"]

WIDTH = 1024
STATE_BYTES = 12
"""Of a parameter: itself and two moments, in float32."""
ROWS = 64
"""Of a step: what makes it about as long as a step is on two cores, with so many parameters."""
WARM_UP = 3
GOES_ON = 10
"""Versions before the kill of a way that saves each step: by then it holds what it does in the middle of a job."""


@dataclass(frozen=True)
class Order:
    """What one process does."""

    way: str
    directory: str
    nbytes: int
    every: tuple[int, ...]
    blocks: int
    block: int
    wake_bytes: int = 0
    """Of memory that is touched before a restart."""


class Training:
    """Linear layers and fused AdamW, on one thread. ``version`` counts its steps."""

    def __init__(self, order: Order, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        layers = max(1, round(order.nbytes / STATE_BYTES / WIDTH**2))
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for parameter in model.parameters():
            # By default each layer shrinks what it is given, and behind a hundred of them all gradients are zeros.
            torch.nn.init.normal_(parameter, std=WIDTH**-0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.job = Job(model, optimizer, Path(order.directory))
        self.version = 0
        self._rows = torch.randn(ROWS, WIDTH)

    def step(self) -> None:
        self.job.optimizer.zero_grad(set_to_none=False)
        self.job.model(self._rows).square().mean().backward()
        self.job.optimizer.step()
        self.version += 1

    def digest(self) -> str:
        """Of parameters and moments."""
        found = hashlib.blake2b(digest_size=16)
        for parameter in self.job.model.parameters():
            state = self.job.optimizer.state[parameter]
            for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
                found.update(tensor.numpy().data)
        return found.hexdigest()


def main() -> None:
    what, given = sys.argv[1:]
    if what == "hold":
        hold_dlrover()
        say(ready=True)
        signal.pause()
    fields = json.loads(given)
    order = Order(**{**fields, "every": tuple(fields["every"])})
    {"train": train, "restart": restart, "restore": restore}[what](order)


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def train(order: Order) -> None:
    """Blocks of steps with and without the way in turns, for each interval; then two versions that are waited for, and
    more of a way that saves each step. The process waits for its kill."""
    training = Training(order, seed=1)
    for _ in range(WARM_UP):
        training.step()
    gc.collect()
    say(warm=True)
    way = WAYS[order.way].make(training.job)
    for every in order.every[:1] if way.every_step else order.every:
        for number in range(order.blocks):
            if number % 2:
                saved, unsaved = saving(training, way, order.block, every), plain(training, order.block)
            else:
                unsaved, saved = plain(training, order.block), saving(training, way, order.block, every)
            say(every=every, plain=unsaved, saving=saved)
    for first in (True, False):
        say(first=first, **one_version(training, way, first=first))
    if way.every_step:
        for _ in range(GOES_ON):
            stepped(training, way, due=True)
        way.wait()
    say(digest=training.digest())
    signal.pause()  # until the kill


def plain(training: Training, steps: int) -> list[float]:
    """Seconds of each step."""
    return [timed(training.step) for _ in range(steps)]


def saving(training: Training, way: Way, steps: int, every: int) -> list[tuple[float, bool]]:
    """Seconds of each step, with what the way does in it, and whether it was saved. The first one is; so the last save
    of a block has as many steps to be written in as there are to the next one."""
    way.begin()
    taken = []
    for number in range(steps):
        due = way.every_step or number % every == 0
        taken.append((timed(partial(stepped, training, way, due)), due))
    way.end()
    return taken


def stepped(training: Training, way: Way, due: bool) -> None:
    training.step()
    (way.save if due else way.after_step)(training.version)


def one_version(training: Training, way: Way, *, first: bool) -> dict[str, Any]:
    """How long a version takes to the disk while nothing is trained, and how many bytes are written for it. The first
    one of a way that has only begun may need more than the next."""
    before = files(training.job.directory)
    if first:
        way.begin()  # which may write a part of it already
    training.step()
    os.sync()  # what was written before is not waited for
    start = time.perf_counter()
    way.save(training.version)
    way.wait()
    flush(training.job.directory)
    seconds = time.perf_counter() - start
    after = files(training.job.directory)
    return {"durable_s": seconds, "bytes": sum(after[path][0] for path in after if after[path] != before.get(path))}


def restart(order: Order) -> None:
    """From a process that has its model, and everything imported, to the end of its first step."""
    training = Training(order, seed=2)
    way = WAYS[order.way].make(training.job)
    wake(order.wake_bytes)
    # One after the other, as a user's job: what a way still does beside training has no other time to do it in.
    say(load_s=timed(way.load), first_step_s=timed(training.step))
    signal.pause()


def restore(order: Order) -> None:
    """What a process that restarts has before its first step."""
    training = Training(order, seed=2)
    way = WAYS[order.way].make(training.job)
    way.load()
    say(digest=training.digest())
    signal.pause()


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def files(directory: Path) -> dict[Path, tuple[int, int]]:
    """The size of each file, and when it was written. Old versions, and their folders, may go meanwhile."""
    found = {}
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):
                told = path.stat()
                if stat.S_ISREG(told.st_mode):
                    found[path] = (told.st_size, told.st_mtime_ns)
    return found


def flush(directory: Path) -> None:
    """Most ways return when the kernel has the bytes; durable is what the disk has."""
    for path in files(directory):
        with suppress(FileNotFoundError), path.open("rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
