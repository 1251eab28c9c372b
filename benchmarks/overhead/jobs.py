"""Trains the jobs of the matrix: two models of one shape in one process, of which one is saved, in turns.

Both see the same machine: a block of steps with saving, a block without, and the other way round. What is still on its
way to the tiers is waited for between the blocks, which is not measured.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
import xxhash

from benchmarks.ceilings.child import Child
from benchmarks.figures import Unavailable
from benchmarks.overhead.matrix import BASE_EVERY, CODECS, MODELS, Block, BlockPair, Cell
from benchmarks.training import Training
from benchmarks.waking import wake
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.checkpointer import Checkpointer
from tiercheck.demo.nodes import kill_agent, remove_run_files
from tiercheck.errors import NotFound
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach
from tiercheck.tiers.shm.namespaces import namespaces, remove_namespace
from tiercheck.types import bytes_text

__all__ = ["Twins", "two_cores"]

CORES = 2
"""One trains, and one is left to whatever moves what is saved."""
PAIRS_MIN = 2
"""As many as have a base."""
WARM_UP_STEPS = 2
WARM_UP_VERSIONS = BASE_EVERY + 1
"""Saved before anything is measured, of the gradients that there are: pools are filled, and what folds is ready."""
MOVE_S_MAX = 120.0
AGENT = "TIERCHECK_AGENT_NODE"
NEIGHBOUR = "kept"
"""What the neighbour calls what it keeps of the job."""
STATES_HELD = {"shm": 8, "shm+durable": 10, "shm+peer": 20}
"""Memory that a job takes at most beside its model, in states: what its first tier holds, and what folds, or is on its
way; and the same of the neighbour's."""
STATE_OF_GRADIENTS = 3
"""Bytes of the state, for each byte of gradients: parameters and two moments."""


class Saving(Protocol):
    """What goes on beside the steps of a block with saving."""

    def after_step(self) -> float:
        """The step is done. Returns for how long its differential made training stand still."""

    def settle(self) -> None:
        """Wait until nothing moves any more."""

    @property
    def other_stall(self) -> float:
        """So far, for bases and for room."""

    @property
    def captured(self) -> int:
        """Bytes so far."""


class Twins:
    """Two models of one shape: of one the steps are saved."""

    def __init__(self, model: str) -> None:
        self._block = MODELS[model].block
        self._saved, self._plain = (Training(MODELS[model].setup) for _ in range(2))
        self.train(self._plain, WARM_UP_STEPS)
        self.train(self._saved, WARM_UP_STEPS)
        gradients = self._plain.gradients()
        self.gradient_nbytes = sum(each.nbytes for each in gradients.values())
        self._copy = np.ones(self.gradient_nbytes // 4, np.float32)

    @staticmethod
    def train(training: Training, steps: int) -> None:
        for _ in range(steps):
            training.backward()
            training.step()

    def pairs(self, cell: Cell, seconds: float, directory: Path) -> list[BlockPair]:
        """As many as fit into so many seconds, and two at least."""
        until = time.monotonic() + seconds
        found: list[BlockPair] = []
        with ExitStack() as stack:
            make = outside if cell.is_outside else saved
            saving = stack.enter_context(make(cell, self._saved, self.gradient_nbytes, directory))
            for _ in range(WARM_UP_VERSIONS):
                self._saved.step()
                saving.after_step()
            saving.settle()
            longest = 0.0
            while len(found) < PAIRS_MIN or time.monotonic() + longest < until:
                began = time.monotonic()
                found.append(self._pair(saving, saved_first=len(found) % 2 == 0))
                longest = max(longest, time.monotonic() - began)
        return found

    def _pair(self, saving: Saving, *, saved_first: bool) -> BlockPair:
        if saved_first:
            with_saving = self._saving_block(saving)
            without = self._plain_block()
        else:
            without = self._plain_block()
            with_saving = self._saving_block(saving)
        return BlockPair(with_saving, without, self._ceiling())

    def _plain_block(self) -> Block:
        begun = Clocks.now()
        steps = [timed(lambda: self.train(self._plain, 1)) for _ in range(self._block // 2)]
        return begun.block(Clocks.now(), steps)

    def _saving_block(self, saving: Saving) -> Block:
        stalls: list[float] = []
        other, captured, begun = saving.other_stall, saving.captured, Clocks.now()
        steps = [timed(lambda: stalls.append(step_saved(self._saved, saving))) for _ in range(self._block)]
        ended = Clocks.now()
        other, captured = saving.other_stall - other, saving.captured - captured
        saving.settle()
        return begun.block(ended, steps, tuple(stalls), other, captured)

    def _ceiling(self) -> float:
        """Each pass by itself, as the slower of two programs would make them."""
        gradients = self._plain.gradients().values()

        def passes() -> None:
            start = 0
            for each in gradients:
                np.copyto(self._copy[start : start + each.size], each)
                start += each.size
            xxhash.xxh3_64_intdigest(self._copy.data)

        return statistics.median(timed(passes) for _ in range(3))


def step_saved(training: Training, saving: Saving) -> float:
    training.backward()
    training.step()
    return saving.after_step()


class Saved:
    """By TierCheck."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._stall = 0.0

    def after_step(self) -> float:
        self._checkpointer.end_iteration()
        before, self._stall = self._stall, self._checkpointer.stats.differential_stall_s
        return self._stall - before

    def settle(self) -> None:
        self._checkpointer.flush()

    @property
    def other_stall(self) -> float:
        stats = self._checkpointer.stats
        return stats.base_stall_s + stats.drain_stall_s

    @property
    def captured(self) -> int:
        return self._checkpointer.stats.captured_bytes


class Outside:
    """Nothing is saved: a process outside moves as many bytes."""

    other_stall = 0.0
    captured = 0

    def __init__(self, child: Child) -> None:
        self._child = child
        self._moves = 0

    def after_step(self) -> float:
        self._child.tell("move")
        self._moves += 1
        return 0.0

    def settle(self) -> None:
        while self._moves:
            self._child.read_line(MOVE_S_MAX)
            self._moves -= 1


@contextmanager
def saved(cell: Cell, training: Training, nbytes: int, directory: Path) -> Iterator[Saving]:
    """Whatever the job had in its tiers goes at the end. ``nbytes``: of a step's gradients. Errors: ``Unavailable``."""
    held = STATES_HELD[cell.tiers] * STATE_OF_GRADIENTS * nbytes
    check_memory(held)
    wake(held)
    name = f"benchmark-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        stack.callback(remove_memory, name)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="overhead-", dir=directory))
        tiers, config = [f"shm://{name}"], CODECS[cell.codec]
        if cell.tiers == "shm+durable":
            tiers.append(f"nvme://{folder}/run?survives=rack")
        if cell.tiers == "shm+peer":
            stack.enter_context(agent_named(name))
            server = stack.enter_context(Child("benchmarks.peer_server", f"shm://{name}"))
            address = server.ready.split()[0].removeprefix("tcp://")
            tiers.append(f"peer://{NEIGHBOUR}?at={address}")
            config = replace(config, mover="agent")
        checkpointer = attach(training.model, training.optimizer, Hierarchy.of(*tiers), config=config)
        stack.callback(checkpointer.abort)
        yield Saved(checkpointer)


def check_memory(nbytes: int) -> None:
    """Errors: ``Unavailable``. A machine without memory would kill this process, or another one."""
    free = psutil.virtual_memory().available
    if free < nbytes:
        raise Unavailable(f"it takes {bytes_text(nbytes)} of memory, and {bytes_text(free)} are free")


@contextmanager
def outside(cell: Cell, training: Training, nbytes: int, directory: Path) -> Iterator[Saving]:
    """As many bytes as differentials and bases have."""
    each = nbytes + STATE_OF_GRADIENTS * nbytes // BASE_EVERY
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=directory) as folder:
        file = (f"{folder}/raw",) if cell.tiers == "disk" else ()
        with Child("benchmarks.overhead.outside", str(each), *file) as child:
            yield Outside(child)


@contextmanager
def agent_named(name: str) -> Iterator[None]:
    """The node's agent has this name, and ends with the context."""
    before = os.environ.get(AGENT)
    os.environ[AGENT] = name
    try:
        yield
    finally:
        kill_agent(name)
        remove_run_files(name)
        os.environ.pop(AGENT)
        if before is not None:
            os.environ[AGENT] = before


def remove_memory(name: str) -> None:
    """The job's, and what its neighbour kept."""
    for each in list(namespaces()):
        if name in each.name:
            with suppress(NotFound):
                remove_namespace(each.name)


@dataclass(frozen=True)
class Clocks:
    """Processor time so far."""

    training: float
    process: float
    others: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.thread_time(), time.process_time(), sum(map(cpu_of, others())))

    def block(
        self,
        ended: Clocks,
        steps: list[float],
        stalls: tuple[float, ...] = (),
        other_stall: float = 0.0,
        captured: int = 0,
    ) -> Block:
        """The block of steps between these and those."""
        training = ended.training - self.training
        threads = ended.process - self.process - training
        others = max(0.0, ended.others - self.others)
        return Block(tuple(steps), training, threads, others, stalls, other_stall, captured)


def others() -> list[psutil.Process]:
    """The processes that this one has started, and the agent, which is on its own."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    if node := os.environ.get(AGENT):
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            agent = psutil.Process(json.loads(RunDirectory.of(node).info.read_text(encoding="utf-8"))["pid"])
            found += [agent, *agent.children(recursive=True)]
    return found


def cpu_of(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextmanager
def two_cores() -> Iterator[None]:
    """This process, and those that it starts, have two processors, as far as the machine has more."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
