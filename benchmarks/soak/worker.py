"""A process of a soak: ``python -m benchmarks.soak.worker PLAN`` with the plan as JSON.

Runs its slots until its standard input ends, and then, where the plan says so, settles the accounts. It is killed
in the middle of that again and again, and goes on where the ledger says it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.soak.account import settle_accounts
from benchmarks.soak.attempts import TierBackoff
from benchmarks.soak.ledger import Counted, PoolAccounting
from benchmarks.soak.losses import Losses
from benchmarks.soak.shared import Shared
from benchmarks.soak.slot import Slot
from benchmarks.soak.wrapped import wrap
from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver

__all__ = ["Plan", "run_slots"]

OPEN_S_MAX = 120.0
OPEN_PAUSE_S = 0.1
SHARED_SHARE = 0.15
"""The part of all operations that goes to counters and claims."""


@dataclass(frozen=True)
class Plan:
    """What one worker does."""

    url: str
    ledger: str
    losses: str
    slots: int
    """Slots of all workers together."""
    own_slots: tuple[int, ...]
    seed: int
    linger_s: float
    large_bytes: int
    faults: float = 0.15
    """The share of calls that are cancelled, or that fail."""
    wrapped: bool = False
    settle: bool = False
    debris_s: float | None = 0.0
    """How long to wait for debris to become old enough to go; ``None``: do not ask whether there is any."""

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Plan:
        fields = json.loads(text)
        return cls(**{**fields, "own_slots": tuple(fields["own_slots"])})


async def run_slots(
    plan: Plan, driver: TierDriver, ledger: PoolAccounting, losses: Losses, stopped: Callable[[], bool]
) -> None:
    """The plan's slots, at the same time, until ``stopped``. Errors: only those that are no driver's."""

    async def run_one(number: int) -> None:
        chance = random.Random(f"{plan.seed} {number}")

        def count(what: Counted) -> None:
            ledger.count(number, what)

        attempts = TierBackoff(driver, chance, losses, count, faults=plan.faults)
        slot = Slot(number, ledger, attempts, losses, chance, linger_s=plan.linger_s, large_bytes=plan.large_bytes)
        shared = Shared(slot)
        while not stopped():
            which = shared if chance.random() < SHARED_SHARE else slot
            await which.one_operation()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as slots:
        for number in plan.own_slots:
            slots.create_task(run_one(number))


@contextlib.asynccontextmanager
async def opened(plan: Plan) -> AsyncIterator[TierDriver]:
    """The driver, open; while the tier is away or full this is tried again. Errors: the last try's."""
    until = time.monotonic() + OPEN_S_MAX
    while True:
        driver = make_driver(plan.url)
        if plan.wrapped:
            driver = wrap(driver, random.Random(plan.seed))
        try:
            await driver.open()
            break
        except (Transient, CapacityExceeded):
            if time.monotonic() > until:
                raise
            await asyncio.sleep(OPEN_PAUSE_S)
    try:
        yield driver
    finally:
        await driver.close()


async def work(plan: Plan) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    ledger, losses = PoolAccounting(Path(plan.ledger), plan.slots), Losses(Path(plan.losses))
    if plan.settle and plan.debris_s:
        await asyncio.sleep(plan.debris_s)  # opening the tier then removes it
    async with opened(plan) as driver:
        threading.Thread(target=wait_for_the_end, daemon=True).start()
        if plan.own_slots:
            ledger.count(plan.own_slots[0], Counted.OPENS)
            await run_slots(plan, driver, ledger, losses, stop.is_set)
        if plan.settle:
            await asyncio.sleep(plan.linger_s)
            debris = plan.debris_s is not None
            await settle_accounts(driver, ledger, losses, large_bytes=plan.large_bytes, debris=debris)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    asyncio.run(work(Plan.parse(sys.argv[1])))
