"""Copies wait for their turn, as the pacing policy says; and a base lets differentials pass."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.guard import ask_pacing
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Placement, own_bases, own_differentials
from tiercheck.policy.policies import Copying, PacingPolicy, Unpaced
from tiercheck.replication.refusals import Refusals
from tiercheck.runtime.turns import in_turns

__all__ = ["Pacer"]

PART_S_MAX = 2.0
"""No part of an object waits for longer: a store would take its sender for dead. The rate is asked for again after so
long."""
PAUSE_S_MIN = 0.001
"""A shorter pause is not worth its timer. It stays owed."""
YOUNG = 0.5
"""The weight of the newest measurement of how long a version takes."""


class Pacer:
    """One rank's copies to each tier.

    What was sent is paid for afterwards: the next copy to that tier, and the next part of this one, waits until the
    bytes before it have flowed at the rate that held then. So a copy never waits for its own bytes, and the mean is
    bounded, whatever the sizes. A stream that is not paced any more owes nothing. Whoever begins to wait for the tiers
    ends a pause, if the policy then says so.
    """

    def __init__(
        self, policy: PacingPolicy, refusals: Refusals, placement: Placement, seen: Callable[[], Observation]
    ) -> None:
        self._policy = policy
        self._refusals = refusals
        self._placement = placement
        self._seen = seen
        self._waiting = 0
        """So many wait until everything, or another base, is where it belongs."""
        self._debts: defaultdict[int, _Debt] = defaultdict(_Debt)
        """By tier index."""
        self._passing: Counter[int] = Counter()
        """By tier index, the differentials under way."""
        self._changed = asyncio.Condition()
        """Told when a differential has passed, and when somebody begins to wait."""
        self._newest: tuple[int, float] | None = None
        """The newest version that was seen, and when."""
        self._version_s: float | None = None

    @asynccontextmanager
    async def hurrying(self) -> AsyncIterator[None]:
        """Inside, somebody waits until everything, or another base, is where it belongs."""
        self._waiting += 1
        try:
            await self._tell()
            yield
        finally:
            self._waiting -= 1

    @asynccontextmanager
    async def copying(self, tier: OpenTier, key: ShardKey, nbytes: int) -> AsyncIterator[None]:
        """Inside, the shard is put into the tier. Waits for its turn first. What is cancelled before that has paid
        nothing."""
        turns = _Turns(self, tier, key, nbytes)
        await self._until_paid(turns, math.inf)
        began = _now()
        if key.stream is not Stream.BASE:
            self._passing[tier.index] += 1
            try:
                yield
            finally:
                self._passing[tier.index] -= 1
                await self._tell()
        else:
            with in_turns(turns):
                yield
        self._pay(turns, turns.left, began)

    async def turn(self, turns: _Turns, nbytes: int) -> None:
        """Wait until the next part of a base may go."""
        index, began = turns.tier.index, _now()
        with suppress(TimeoutError):
            async with asyncio.timeout(PART_S_MAX), self._changed:
                await self._changed.wait_for(lambda: not self._passing[index])
        await self._until_paid(turns, began + PART_S_MAX)
        self._pay(turns, nbytes, began)
        turns.left = max(0, turns.left - nbytes)

    async def _until_paid(self, turns: _Turns, until: float) -> None:
        """Wait until what went before is paid for, or until that time."""
        debt = self._debts[turns.tier.index]
        while self._rate(turns) is not None:
            pause_s = min(until, debt.paid_at) - _now()
            if pause_s < PAUSE_S_MIN:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, PART_S_MAX)), self._changed:
                    await self._changed.wait()
        debt.forgive(turns.key.stream)

    def _pay(self, turns: _Turns, nbytes: int, began: float) -> None:
        """For bytes that go from ``began`` on."""
        debt, stream = self._debts[turns.tier.index], turns.key.stream
        if (rate := self._rate(turns)) is None:
            debt.forgive(stream)
        else:
            debt.add(stream, began, nbytes / rate)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _rate(self, turns: _Turns) -> float | None:
        if isinstance(self._policy, Unpaced):
            return None
        tier, key, seen = turns.tier, turns.key, self._seen()
        newest = max((each.last for each in own_differentials(seen, seen.contents[0])), default=-1)
        newest = max(newest, *(base.first for base in own_bases(seen, seen.contents[0])), key.last)
        self._measure(newest)
        interval = self._placement.interval
        copying = Copying(
            tier.name,
            tier.role.survives,
            key.stream,
            turns.nbytes,
            self._placement.undrained(seen),
            turns.left,
            interval,
            key.first // interval * interval + interval - newest,
            self._version_s,
            self._waiting > 0,
        )
        rate, refusal = ask_pacing(self._policy, copying)
        self._refusals.note(f"pacing of {tier.name}", [] if refusal is None else [refusal])
        return rate

    def _measure(self, newest: int) -> None:
        """How long a version takes, from the versions that are seen to come."""
        now = _now()
        if self._newest is None or newest <= self._newest[0]:
            self._newest = self._newest or (newest, now)
            return
        version_s = (now - self._newest[1]) / (newest - self._newest[0])
        before = version_s if self._version_s is None else self._version_s
        self._newest, self._version_s = (newest, now), YOUNG * version_s + (1 - YOUNG) * before


class _Debt:
    """What went to one tier and is not paid for yet. Times are the event loop's, in seconds."""

    def __init__(self) -> None:
        self._items: list[tuple[Stream, float, float]] = []
        """In their order: when it began, and how long it takes at its rate."""

    @property
    def paid_at(self) -> float:
        at = -math.inf
        for _, began, seconds in self._items:
            at = max(at, began) + seconds
        return at

    def add(self, stream: Stream, began: float, seconds: float) -> None:
        if self.paid_at <= began:
            self._items.clear()
        elif self._items[-1][0] is stream:  # else each part of a base would be an item
            _, before, owed = self._items.pop()
            began, seconds = before, owed + seconds
        self._items.append((stream, began, seconds))

    def forgive(self, stream: Stream) -> None:
        self._items = [item for item in self._items if item[0] is not stream]


@dataclass(eq=False)
class _Turns:
    """Of one shard."""

    pacer: Pacer
    tier: OpenTier
    key: ShardKey
    nbytes: int

    def __post_init__(self) -> None:
        self.left = self.nbytes

    async def turn(self, nbytes: int) -> None:
        await self.pacer.turn(self, nbytes)


def _now() -> float:
    return asyncio.get_running_loop().time()
