"""When a copy to a tier may go on: the pacing policy bounds its rate, and bases let differentials pass."""

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
from tiercheck.replication.handle import HURRY_S_MAX
from tiercheck.replication.refusals import Refusals
from tiercheck.runtime.turns import in_turns

__all__ = ["Pacer"]

PART_S_MAX = 2.0
"""The longest wait of one part of an object, in seconds: after a longer silence a store would take the sender for dead.
The policy is also asked for the rate again after this time."""
PAUSE_S_MIN = 0.001
"""Shorter pauses, in seconds, are not made. They stay owed, and make the next pause longer."""
NEWEST_WEIGHT = 0.5
"""The weight of the newest measurement in the mean of how long a version takes."""


class Pacer:
    """Paces one rank's copies to each tier.

    A copy never waits for its own bytes. Before it starts, and before each further part of a base, it waits until the
    bytes that went to that tier earlier would have arrived at the rate that the policy gave for them. So the mean rate
    is bounded, whatever the sizes of the objects. If the policy gives no rate any more, nothing is owed for that
    stream. If somebody begins to wait for the tiers, the policy is asked again, and a pause may end early.
    """

    def __init__(
        self, policy: PacingPolicy, refusals: Refusals, placement: Placement, seen: Callable[[], Observation]
    ) -> None:
        self._policy = policy
        self._refusals = refusals
        self._placement = placement
        self._seen = seen
        self._waiting = 0
        """How many calls wait until everything, or one more base, is where it belongs."""
        self._hurry_until = -math.inf
        """Until then (seconds of the event loop) training waits, as a nudge has said."""
        self._debts: defaultdict[int, _Debt] = defaultdict(_Debt)
        """By tier index."""
        self._passing: Counter[int] = Counter()
        """By tier index, how many differentials are being copied."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when a differential has been copied, and when somebody begins to wait."""
        self._newest: tuple[int, float] | None = None
        """The newest version seen so far, and when (seconds of the event loop)."""
        self._version_s: float | None = None
        """Seconds from one version to the next, a running mean; ``None``: not known yet."""

    @asynccontextmanager
    async def hurrying(self) -> AsyncIterator[None]:
        """A context in which somebody waits until everything, or one more base, is where it belongs."""
        self._waiting += 1
        try:
            self._tell()
            yield
        finally:
            self._waiting -= 1

    def hurry(self, seconds: float) -> None:
        """For so long (:data:`HURRY_S_MAX` at most) somebody waits."""
        if seconds > 0:
            self._hurry_until = max(self._hurry_until, _now() + min(seconds, HURRY_S_MAX))
            self._tell()

    @asynccontextmanager
    async def copying(self, tier: OpenTier, key: ShardKey, nbytes: int) -> AsyncIterator[None]:
        """A context in which the shard is put into the tier. It is entered when the shard may go. A copy that is
        cancelled before that owes nothing."""
        turns = _Turns(self, tier, key, nbytes)
        await self._until_paid(turns, math.inf)
        began = _now()
        if key.stream is not Stream.BASE:
            self._passing[tier.index] += 1
            try:
                yield
            finally:  # what was sent was sent, though it failed; how much that is nobody knows
                self._passing[tier.index] -= 1
                self._tell()
                self._pay(turns, turns.left, began)
        else:
            with in_turns(turns):
                yield
            self._pay(turns, turns.left, began)

    async def turn(self, turns: _Turns, nbytes: int) -> None:
        """Wait until the next part of a base, of so many bytes, may go."""
        index, began = turns.tier.index, _now()
        while self._passing[index] and (left_s := began + PART_S_MAX - _now()) > 0:
            await self._change(left_s)
        await self._until_paid(turns, began + PART_S_MAX)
        self._pay(turns, nbytes, began)
        turns.left = max(0, turns.left - nbytes)

    async def _until_paid(self, turns: _Turns, until: float) -> None:
        """Wait until nothing is owed for earlier bytes, at the latest until the time ``until``."""
        debt = self._debts[turns.tier.index]
        while self._rate(turns) is not None:
            pause_s = min(until, debt.paid_at) - _now()
            if pause_s < PAUSE_S_MIN:
                return
            await self._change(min(pause_s, PART_S_MAX))
        debt.forgive(turns.key.stream)

    def _pay(self, turns: _Turns, nbytes: int, began: float) -> None:
        """Owe the time of the bytes that go from ``began`` on."""
        debt, stream = self._debts[turns.tier.index], turns.key.stream
        if (rate := self._rate(turns)) is None:
            debt.forgive(stream)
        else:
            debt.add(stream, began, nbytes / rate)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self, within_s: float) -> None:
        """Wait for one, but no longer than that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()

    def _rate(self, turns: _Turns) -> float | None:
        """Bytes a second, as the policy says now; ``None``: as fast as the tier takes them."""
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
            self._waiting > 0 or _now() < self._hurry_until,
        )
        rate, refusal = ask_pacing(self._policy, copying)
        self._refusals.note(f"pacing of {tier.name}", [] if refusal is None else [refusal])
        return rate

    def _measure(self, newest: int) -> None:
        """Measure how long a version takes, by when newer versions are seen."""
        now = _now()
        if self._newest is None or newest <= self._newest[0]:
            self._newest = self._newest or (newest, now)
            return
        version_s = (now - self._newest[1]) / (newest - self._newest[0])
        before = version_s if self._version_s is None else self._version_s
        self._newest, self._version_s = (newest, now), NEWEST_WEIGHT * version_s + (1 - NEWEST_WEIGHT) * before


class _Debt:
    """The bytes sent to one tier whose time is not over yet. Times are seconds of the event loop."""

    def __init__(self) -> None:
        self._items: list[tuple[Stream, float, float]] = []
        """In the order of sending: stream, when it began, and how long it takes at its rate."""

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
    """The turns of one base's parts. ``nbytes``: of its whole shard."""

    pacer: Pacer
    tier: OpenTier
    key: ShardKey
    nbytes: int

    def __post_init__(self) -> None:
        self.left = self.nbytes
        """Bytes that have not been sent."""

    async def turn(self, nbytes: int) -> None:
        await self.pacer.turn(self, nbytes)


def _now() -> float:
    return asyncio.get_running_loop().time()
