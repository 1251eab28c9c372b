"""Copies wait for their turn, as the pacing policy says; and a base lets differentials pass."""

from __future__ import annotations

import asyncio
from collections import Counter
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
"""No part of an object waits for longer: a store would take its sender for dead."""
YOUNG = 0.5
"""The weight of the newest measurement of how long a version takes."""


class Pacer:
    """One rank's copies to each tier.

    What was sent is paid for afterwards: the next copy to that tier, and the next part of this one, waits until the
    bytes before it have flowed at the rate that held then. So a copy never waits for its own bytes, and the mean is
    bounded, whatever the sizes.
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
        self._paid_at: dict[int, float] = {}
        """By tier index, when the copies before are paid for (loop time, seconds)."""
        self._passing: Counter[int] = Counter()
        """By tier index, the differentials under way."""
        self._passed = asyncio.Condition()
        self._newest: tuple[int, float] | None = None
        """The newest version that was seen, and when."""
        self._version_s: float | None = None

    @asynccontextmanager
    async def hurrying(self) -> AsyncIterator[None]:
        """Inside, somebody waits until everything, or another base, is where it belongs."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @asynccontextmanager
    async def copying(self, tier: OpenTier, key: ShardKey, nbytes: int) -> AsyncIterator[None]:
        """Inside, the shard is put into the tier. Waits for its turn first. What is cancelled before that has paid
        nothing."""
        turns = _Turns(self, tier, key, nbytes)
        if self._rate(turns) is not None:
            await self._until_paid(tier)
        began = _now()
        if key.stream is not Stream.BASE:
            self._passing[tier.index] += 1
            try:
                yield
            finally:
                self._passing[tier.index] -= 1
                async with self._passed:
                    self._passed.notify_all()
        else:
            with in_turns(turns):
                yield
        self._pay(turns, turns.left, began)

    async def turn(self, turns: _Turns, nbytes: int) -> None:
        """Wait until the next part of a base may go."""
        index, began = turns.tier.index, _now()
        with suppress(TimeoutError):
            async with asyncio.timeout(PART_S_MAX), self._passed:
                await self._passed.wait_for(lambda: not self._passing[index])
        at = max(began, self._paid_at.get(index, 0.0))
        if self._pay(turns, nbytes, began):
            await asyncio.sleep(min(began + PART_S_MAX, at) - _now())
        turns.left = max(0, turns.left - nbytes)

    async def _until_paid(self, tier: OpenTier) -> None:
        if (pause_s := self._paid_at.get(tier.index, 0.0) - _now()) > 0:
            await asyncio.sleep(pause_s)

    def _pay(self, turns: _Turns, nbytes: int, began: float) -> bool:
        """Whether there is anything to pay for bytes that go from ``began`` on."""
        if (rate := self._rate(turns)) is None:
            return False
        index = turns.tier.index
        self._paid_at[index] = max(self._paid_at.get(index, 0.0), began) + nbytes / rate
        return True

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
