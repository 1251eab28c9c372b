"""How long a recovery would take, from what this machine has just measured: a range, and what it rests on.

Of each tier that the recovery would read, parts of the very objects are read and hashed, as a recovery does. Nothing is
written. The range is honest about what one machine cannot know. Its lower end has every rank read at the fastest rate
that was measured, all at the same time, and read and replay at once. Its upper end has all ranks share the slowest rate
that was measured, with a round trip for each object, read twice what a recovery may read twice, and replay afterwards.
Starting processes, finding tiers and capturing the next base are no part of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck.errors import DeadlineExceeded, TierError
from tiercheck.format.checksums import checksum_of
from tiercheck.hierarchy import OpenTier
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.plan import Plan, Unreachable
from tiercheck.recovery.ranks import Ranks
from tiercheck.replication.objects.shards import read
from tiercheck.streams.state import ReplayRate, TrainingState
from tiercheck.types import ByteRange, seconds_text

__all__ = ["Duration", "TierRate", "duration", "probe", "say_expected"]

log = logging.getLogger(__name__)

PROBE_NBYTES = 16 << 20
"""Of one object, so much is read."""
PROBES = 3
PROBE_S = 2.0
"""No further object of a tier is read after so long."""
SMALL_NBYTES = 4 << 10
WORTH_NBYTES = 256 << 20
"""A rank that reads less than this does not measure: what is read to measure is some part in a hundred of more."""
MAPPED_TIMES = 16
"""Of what a tier maps, a rank may have so many times as much: it is read so much faster."""
SAYING_S = 10.0
"""A recovery waits no longer than this for all of the measuring."""

Span = tuple[float, float]
"""The slowest and the fastest that was measured, or the shortest and the longest time."""


@dataclass(frozen=True)
class TierRate:
    """What one tier would be asked for, and what it gave this machine."""

    tier: str
    nbytes: int
    """That all ranks together read there."""
    objects: int
    bytes_per_s: Span | None
    """Read and hashed; ``None``: it could not be measured."""
    latency_s: float
    """Of a small read."""
    probed_nbytes: int
    why_not: str = ""
    """Why it could not be measured."""


@dataclass(frozen=True)
class Duration:
    """How long a recovery would take, if the ranks are machines like this one."""

    tiers: tuple[TierRate, ...]
    steps: int
    """The most that any rank replays."""
    elements: int
    """Of the trained tensors of rank 0."""
    replay: ReplayRate | None
    """``None``: nothing is replayed."""
    seconds: Span | None
    """The range; ``None`` if something that it rests on was not measured."""

    def __str__(self) -> str:
        if self.seconds is None:
            return f"expected to take an unknown time: {'; '.join(self.unknown)}"
        shortest, longest = map(seconds_text, self.seconds)
        steps = f", {self.steps} replayed step{'s' if self.steps > 1 else ''} included" if self.steps else ""
        return f"expected to take {shortest} to {longest}{steps}"

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why there is no range."""
        replay = [] if self.replay is None or self.replay.elements_per_s else [f"the replay: {self.replay.why_not}"]
        return (*(f"{each.tier}: {each.why_not}" for each in self.tiers if each.bytes_per_s is None), *replay)

    def to_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": None if self.seconds is None else list(self.seconds),
            "unknown": list(self.unknown),
            "tiers": [
                {
                    "tier": each.tier,
                    "bytes": each.nbytes,
                    "objects": each.objects,
                    "bytes_per_s": None if each.bytes_per_s is None else list(each.bytes_per_s),
                    "latency_s": each.latency_s,
                    "probed_bytes": each.probed_nbytes,
                }
                for each in self.tiers
            ],
            "replay": self.replay
            and {
                "steps": self.steps,
                "elements": self.elements,
                "elements_per_s": self.replay.elements_per_s and list(self.replay.elements_per_s),
                "kernel": self.replay.kernel,
            },
        }


async def probe(
    tiers: Sequence[OpenTier],
    nbytes_of: Mapping[Copy, int],
    *,
    deadline_s: float,
    clock: Callable[[], float],
) -> tuple[TierRate, ...]:
    """Of each tier that a recovery reads, in their order. ``nbytes_of``: the copies that it reads; ``deadline_s``: how
    long a tier may take."""
    by_tier: dict[int, dict[Copy, int]] = defaultdict(dict)
    for copy, nbytes in nbytes_of.items():
        by_tier[copy.tier][copy] = nbytes
    found = []
    for index, sizes in sorted(by_tier.items()):
        tier, rates, latency_s, probed, why = tiers[index], list[float](), 0.0, 0, ""
        try:
            async with asyncio.timeout(deadline_s):
                asked = chosen_of(sizes, ranged=tier.capabilities.ranged_get)
                latency_s, _ = await timed(tier, asked[-1], sizes[asked[-1]], SMALL_NBYTES, clock)
                began = clock()
                for copy in asked:
                    seconds, nbytes = await timed(tier, copy, sizes[copy], PROBE_NBYTES, clock)
                    rates.append(nbytes / max(seconds, 1e-9))
                    probed += nbytes
                    if clock() - began > PROBE_S:
                        break
        except TierError as error:
            why = str(error)
        except TimeoutError:
            why = f"it gave nothing within {deadline_s:g} s"
        measured = (min(rates), max(rates)) if rates else None
        found.append(TierRate(tier.name, sum(sizes.values()), len(sizes), measured, latency_s, probed, why))
    return tuple(found)


def chosen_of(sizes: Mapping[Copy, int], *, ranged: bool) -> list[Copy]:
    """What is read: parts of the largest ones; the smallest one, if it must be read whole."""
    largest = sorted(sizes, key=lambda copy: (-sizes[copy], copy))
    return largest[:PROBES] if ranged else largest[-1:]


async def timed(
    tier: OpenTier, copy: Copy, nbytes: int, nbytes_max: int, clock: Callable[[], float]
) -> tuple[float, int]:
    """Read the object's first bytes, and hash them. Errors: ``TierError``."""
    wanted = min(nbytes, nbytes_max) if tier.capabilities.ranged_get else nbytes
    began = clock()
    content = await read(tier, copy.key, ByteRange(0, wanted), nbytes)
    await asyncio.to_thread(checksum_of, content)
    return clock() - began, wanted


def duration(
    plans: Sequence[Plan],
    tiers: Sequence[OpenTier],
    nbytes_of: Mapping[Copy, int],
    rates: Sequence[TierRate],
    *,
    alike: int = 1,
    elements: int = 0,
    replay: ReplayRate | None = None,
) -> Duration:
    """``plans``: of the ranks; ``alike``: so many ranks have each of them. ``elements``, ``replay``: if steps are
    replayed."""
    steps = max((0 if plan.point.by_snapshot else plan.point.replayed for plan in plans), default=0)
    known = {each.tier: each for each in rates if each.bytes_per_s is not None}
    given = None if replay is None else replay.elements_per_s
    if len(known) < len(rates) or (replay is not None and given is None):
        return Duration(tuple(rates), steps, elements, replay, None)
    fastest, slowest = 0.0, 0.0
    for plan in plans:
        reading = 0.0
        for copy in plan.sources:
            tier, nbytes = tiers[copy.tier], nbytes_of[copy]
            slow, fast = known[tier.name].bytes_per_s or (1.0, 1.0)
            times = 2 if copy != plan.anchor and not tier.capabilities.mappable else 1
            reading += nbytes / fast
            slowest += alike * times * (known[tier.name].latency_s + nbytes / slow)
        fastest = max(fastest, reading)
    if given is not None:
        fastest, slowest = max(fastest, steps * elements / given[1]), slowest + steps * elements / given[0]
    return Duration(tuple(rates), steps, elements, replay, (fastest, slowest))


async def say_expected(
    chosen: Plan | Unreachable,
    nbytes_of: Mapping[Copy, int],
    tiers: Sequence[OpenTier],
    state: TrainingState,
    ranks: Ranks,
) -> None:
    """Rank 0 says how long the recovery will take, by its own plan, as if the other ranks had one like it. It measures
    for that, unless there is so little to read that the recovery would be over meanwhile. No error of it is raised:
    the other ranks would wait for this one."""
    if ranks.rank or isinstance(chosen, Unreachable):
        return
    try:
        sizes = {copy: nbytes_of[copy] for copy in chosen.sources}
        if not is_worth_measuring(sizes, tiers):
            return
        found = str(await _expected(chosen, sizes, tiers, state, ranks))
    except DeadlineExceeded as error:
        found = f"expected to take an unknown time: {error}"
    except Exception as error:
        log.debug("measuring how long a recovery takes", exc_info=True)
        found = f"expected to take an unknown time: {type(error).__name__}: {error}"
    log.info("the recovery of version %d from base %d is %s", chosen.point.last, chosen.point.anchor, found)


def is_worth_measuring(sizes: Mapping[Copy, int], tiers: Sequence[OpenTier]) -> bool:
    mapped = sum(nbytes for copy, nbytes in sizes.items() if tiers[copy.tier].capabilities.mappable)
    return sum(sizes.values()) - mapped + mapped / MAPPED_TIMES >= WORTH_NBYTES


async def _expected(
    chosen: Plan, sizes: Mapping[Copy, int], tiers: Sequence[OpenTier], state: TrainingState, ranks: Ranks
) -> Duration:
    """Errors: ``DeadlineExceeded``."""
    clock, within_s = ranks.scheduler.time, min(SAYING_S, ranks.deadline_s / 4)
    replays = chosen.point.replayed and not chosen.point.by_snapshot
    elements, rate = state.replay_rate() if replays else (0, None)

    async def measured() -> Duration:
        rates = await probe(tiers, sizes, deadline_s=within_s / len(tiers), clock=clock)
        replay = None if rate is None else await asyncio.to_thread(rate)
        return duration([chosen], tiers, sizes, rates, alike=ranks.world_size, elements=elements, replay=replay)

    what = "measuring the tiers and the replay" if replays else "measuring the tiers"
    return await ranks.scheduler.call(measured(), what=what, deadline_s=within_s)
