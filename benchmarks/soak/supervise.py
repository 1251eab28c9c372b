"""One store's soak: processes that race, and somebody who kills them, the server, and the room on the disk."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.soak.ledger import Counted, PoolAccounting
from benchmarks.soak.losses import Losses
from benchmarks.soak.stores import Store, Wrong
from benchmarks.soak.worker import Plan

__all__ = ["SLOTS_EACH", "Account", "soak"]

SLOTS_EACH = 3
"""Tasks of a process."""
PAUSE_S = (0.3, 3.0)
"""Between two faults."""
STALL_S_MAX = 200.0
"""A process that ends no operation for so long hangs: no driver waits longer for its tier."""
END_S_MAX = 200.0
STACKS_S = 2.0
"""A process that hangs has this long to say where it is."""
AT_ANY_MOMENT = 0.25
"""The share of kills that may strike a process that has done nothing since its start; the others strike one at work."""
LOSSES_SHOWN = 5


@dataclass
class Account:
    """What came of a soak."""

    store: str
    seed: int
    seconds: float = 0.0
    operations: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    losses: list[dict[str, Any]] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    def line(self) -> dict[str, Any]:
        """The JSON line."""
        line: dict[str, Any] = {
            "soak": self.store,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "operations": self.operations,
            **self.counts,
            "faults": dict(sorted(self.faults.items())),
            "lost": len(self.losses),
        }
        if self.notes:
            line["notes"] = list(self.notes)
        if self.losses:
            line["losses"] = self.losses[:LOSSES_SHOWN]
        return line


def soak(
    name: str,
    making: Callable[[], contextlib.AbstractContextManager[Store]],
    *,
    seconds: float,
    seed: int,
    stopping: threading.Event,
    seconds_max: float | None = None,
) -> Account:
    """Blocks for ``seconds`` and what it takes to settle; with ``seconds_max`` for up to that long until it was tried:
    until an operation's outcome was in doubt, and a worker that was killed came back.

    Errors: ``Unavailable``; those of the store's server.
    """
    account = Account(name, seed)
    begun = time.monotonic()
    with making() as store, working_directory() as directory:
        account.notes = store.notes
        patient = seconds >= 2 * store.debris_s
        if not patient:
            account.notes += (f"too short to see debris go, which may take {store.debris_s:.0f} s",)
        slots = store.processes * SLOTS_EACH
        ledger, losses = PoolAccounting.create(directory / "ledger", slots), Losses(directory / "losses")
        try:
            plan = Plan(
                url=store.url,
                ledger=str(directory / "ledger"),
                losses=str(directory / "losses"),
                slots=slots,
                own_slots=(),
                seed=seed,
                linger_s=store.linger_s,
                large_bytes=store.large_bytes,
                wrapped=store.wrapped,
                faults=store.faults,
                debris_s=store.debris_s if patient else None,
            )
            Supervisor(store, plan, ledger, losses, account, directory).run(seconds, seconds_max or seconds, stopping)
            account.operations = ledger.operations()
            account.counts = {
                what.name.lower(): ledger.counted(what) for what in Counted if what is not Counted.INJECTED
            }
            account.faults["failures injected"] = ledger.counted(Counted.INJECTED)
            account.losses = losses.read()
        finally:
            losses.close()
            ledger.close()
    account.seconds = time.monotonic() - begun
    return account


@contextlib.contextmanager
def working_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tiercheck-soak-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class Supervisor:
    """Starts the workers, makes things go wrong, and sees to it that all is well again at the end."""

    def __init__(
        self, store: Store, plan: Plan, ledger: PoolAccounting, losses: Losses, account: Account, directory: Path
    ) -> None:
        self._store = store
        self._plan = plan
        self._accounting = ledger
        self._losses = losses
        self._account = account
        self._directory = directory
        self._chance = random.Random(f"{plan.seed} {account.store}")
        self._workers = [Worker(number, self._plan_of(number), store, directory) for number in range(store.processes)]
        self._progress = [(0, time.monotonic())] * store.processes
        self._done_at_start = [0] * store.processes

    def _plan_of(self, number: int) -> Plan:
        own_slots = tuple(range(number * SLOTS_EACH, (number + 1) * SLOTS_EACH))
        # A store that lives in its only process must be looked at from inside.
        return replace(self._plan, own_slots=own_slots, settle=self._store.processes == 1)

    def run(self, seconds: float, seconds_max: float, stopping: threading.Event) -> None:
        """Errors: whatever heals a fault."""
        begun = time.monotonic()
        try:
            for worker in self._workers:
                worker.start()
            while True:
                until = begun + (seconds if self._was_tried() else seconds_max)
                pause = min(self._chance.uniform(*PAUSE_S), max(0.0, until - time.monotonic()))
                if stopping.wait(pause) or time.monotonic() >= until or not all(map(self._is_well, self._workers)):
                    break
                self._go_wrong(stopping)
            for worker in self._workers:
                self._end(worker)
        finally:
            for worker in self._workers:
                worker.kill()
        if self._store.processes > 1:
            self._settle()

    def _was_tried(self) -> bool:
        """Whether faults have struck operations, and each worker was there, one of them again."""
        in_doubt = sum(self._accounting.counted(each) for each in (Counted.TURNED_OUT_NEW, Counted.TURNED_OUT_OLD))
        opens = self._accounting.counted(Counted.OPENS)
        return in_doubt > 0 and opens > (self._store.processes if self._store.processes > 1 else 0)

    def _go_wrong(self, stopping: threading.Event) -> None:
        chosen = self._next_to_strike()
        if isinstance(chosen, Worker):
            self._account.faults[name_of(chosen)] += 1
            chosen.kill()
            self._done_at_start[chosen.number] = self._done(chosen)
            chosen.start(again=True)
        elif isinstance(chosen, Wrong):
            self._account.faults[name_of(chosen)] += 1
            try:
                chosen.start(self._chance)
                stopping.wait(self._chance.uniform(0, chosen.seconds_max))
            finally:
                chosen.heal()

    def _next_to_strike(self) -> Worker | Wrong | None:
        killable = self._workers if self._store.processes > 1 else []
        if self._chance.random() >= AT_ANY_MOMENT:
            killable = [worker for worker in killable if self._done(worker) > self._done_at_start[worker.number]]
        # A kind first, and then one of it: the server falls as often as the workers.
        kinds: list[Sequence[Worker | Wrong]] = [kind for kind in (killable, self._store.wrongs) if kind]
        # What has not struck yet comes before what has: a short soak, too, sees all there is.
        new = [kind for kind in kinds if not any(self._account.faults[name_of(each)] for each in kind)]
        return self._chance.choice(self._chance.choice(new or kinds)) if kinds else None

    def _done(self, worker: Worker) -> int:
        return sum(self._accounting.operations_of(slot) for slot in worker.plan.own_slots)

    def _is_well(self, worker: Worker) -> bool:
        """Whether it runs and gets on; reports it where not."""
        code = worker.code()
        if code is not None:
            self._losses.report("a worker ended by itself", None, f"code {code}: {worker.last_words()}")
            return False
        done = self._done(worker)
        before, since = self._progress[worker.number]
        if done != before:
            self._progress[worker.number] = (done, time.monotonic())
        elif time.monotonic() - since > STALL_S_MAX:
            self._losses.report("a worker hangs", None, worker.where_it_is())
            return False
        return True

    def _end(self, worker: Worker) -> None:
        if worker.code() is not None:
            return
        try:
            code = worker.end()
        except subprocess.TimeoutExpired:
            self._losses.report("a worker does not end", None, worker.where_it_is())
            return
        if code:
            self._losses.report("a worker ended by itself", None, f"code {code}: {worker.last_words()}")

    def _settle(self) -> None:
        accountant = Worker(len(self._workers), replace(self._plan, settle=True), self._store, self._directory)
        try:
            accountant.start()
            self._end(accountant)
        finally:
            accountant.kill()


def name_of(struck: Worker | Wrong) -> str:
    """What the account calls it."""
    return struck.name if isinstance(struck, Wrong) else "process killed"


class Worker:
    """A worker's process, and the file that takes what it says."""

    def __init__(self, number: int, plan: Plan, store: Store, directory: Path) -> None:
        self.number = number
        self.plan = plan
        self._environment = {**os.environ, **store.environment}
        self._log = directory / f"worker-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self, *, again: bool = False) -> None:
        """Each incarnation has chances of its own."""
        self._starts += 1
        plan = replace(self.plan, seed=self.plan.seed + 1_000_003 * self._starts)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.soak.worker", plan.text],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is the supervisor's: it lets them end
            )

    def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left. Idempotent."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(30)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def end(self) -> int:
        """Let it finish what it does; its exit code. Errors: ``TimeoutExpired``."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()
        return process.wait(END_S_MAX)

    def code(self) -> int | None:
        """The exit code of a process that has ended."""
        return self._running().poll()

    def last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-2000:]

    def where_it_is(self) -> str:
        """The stacks of a process that hangs."""
        process = self._running()
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_S)
        return self.last_words()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"worker {self.number} was never started")
        return self._process
