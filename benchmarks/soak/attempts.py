"""One call to a driver, sometimes with a fault in it, and what its caller knows afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from benchmarks.soak.ledger import Counted
from benchmarks.soak.losses import Losses
from tiercheck.errors import CapacityExceeded, TierError, Transient
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Moment
from tiercheck.tiers.driver import TierDriver

__all__ = ["Outcome", "Stuck", "TierBackoff"]

T = TypeVar("T")

CALL_S_MAX = 150.0
"""Any call ends by then, however many of its servers are away: each driver's own deadline is shorter."""
CANCEL_S_MEAN = 0.004
POINTS_MAX = 10
DELAY_S_MAX = 0.2


class Stuck(Exception):
    """A call did not end, not even when it was cancelled."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a call came to: ``done`` with a ``value``, ``refused`` (nothing was changed), or neither: nobody knows."""

    done: bool
    value: T | None = None
    error: BaseException | None = None

    @property
    def refused(self) -> bool:
        """The driver said no, and its contract says that nothing was changed."""
        return isinstance(self.error, TierError) and not isinstance(self.error, Transient)

    @property
    def full(self) -> bool:
        return isinstance(self.error, CapacityExceeded)

    @property
    def doubtful(self) -> bool:
        return not self.done and not self.refused


class TierBackoff:
    """Calls ``driver``; one in ``faults`` of them is cancelled, or fails before or after its work is done."""

    def __init__(
        self,
        driver: TierDriver,
        chance: random.Random,
        losses: Losses,
        count: Callable[[Counted], None],
        *,
        faults: float,
    ) -> None:
        self.driver = driver
        self._chance = chance
        self._losses = losses
        self._count = count
        self._faults = faults

    async def plain(self, work: Callable[[TierDriver], Awaitable[T]], key: str | None = None) -> Outcome[T]:
        """``work`` with no fault but those that come by themselves."""
        return await self._outcome(work, self.driver, None, key, cancelled=False)

    async def call(self, work: Callable[[TierDriver], Awaitable[T]], key: str | None = None) -> Outcome[T]:
        """``work``, with a fault now and then."""
        if self._chance.random() >= self._faults:
            return await self.plain(work, key)
        kind = self._chance.randrange(3)
        if kind == 0:  # at a moment that the clock chooses
            after_s = min(self._chance.expovariate(1 / CANCEL_S_MEAN), DELAY_S_MAX)
            return await self._outcome(work, self.driver, after_s, key, cancelled=True)
        index = self._chance.randrange(POINTS_MAX)
        if kind == 1:  # at one of the call's own suspensions
            plan = FaultPlan.cancel_at(index)
        else:  # with a failure where there was none, or none yet
            moment = self._chance.choice((Moment.BEFORE, Moment.AFTER))
            where = Fault(lambda point: point.moment is moment, lambda: Transient("injected"))
            plan = FaultPlan((where,))
        return await self._outcome(work, FaultyDriver(self.driver, plan), None, key, cancelled=kind == 1)

    async def _outcome(
        self,
        work: Callable[[TierDriver], Awaitable[T]],
        driver: TierDriver,
        cancel_after_s: float | None,
        key: str | None,
        *,
        cancelled: bool,
    ) -> Outcome[T]:
        task: asyncio.Task[T] = asyncio.create_task(awaited(work, driver))
        loop = asyncio.get_running_loop()
        timer = None if cancel_after_s is None else loop.call_later(cancel_after_s, task.cancel)
        await asyncio.wait({task}, timeout=CALL_S_MAX)
        if timer is not None:
            timer.cancel()
        if not task.done():
            await self._give_up(task, key)
        if task.cancelled():
            self._count(Counted.CANCELLED)
            if not cancelled:
                self._losses.report("a call was cancelled by nobody", key, "CancelledError")
            return Outcome(False, error=asyncio.CancelledError())
        error = task.exception()
        if error is None:
            return Outcome(True, task.result())
        self._judge(error, key)
        return Outcome(False, error=error)

    async def _give_up(self, task: asyncio.Task[Any], key: str | None) -> None:
        self._losses.report("a call has no end", key, f"no answer in {CALL_S_MAX:.0f} s")
        task.cancel()
        await asyncio.wait({task}, timeout=CALL_S_MAX)
        if not task.done():
            raise Stuck(f"a call on {key!r} goes on {CALL_S_MAX:.0f} s after it was cancelled")

    def _judge(self, error: BaseException, key: str | None) -> None:
        if isinstance(error, CapacityExceeded):
            self._count(Counted.FULL)
        elif isinstance(error, Transient):
            self._count(Counted.INJECTED if error.message == "injected" else Counted.TRANSIENT)
        elif not isinstance(error, TierError):
            self._losses.report("a call raised what is no TierError", key, f"{type(error).__name__}: {error}")


async def awaited(work: Callable[[TierDriver], Awaitable[T]], driver: TierDriver) -> T:
    return await work(driver)
