"""One rank of a node fetches what several of its ranks are to read, from the tiers outside the node: each byte once.

Under another layout the ranks of a node need the same old ranks. One of them copies those objects into the node's first
tier, under their own keys, so that to the others they are one more copy there, and the cheapest one. What does not fit,
or cannot be fetched in time, is read by each rank itself. When all ranks are done, each deletes what it has put.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from tiercheck.errors import AlreadyExists, TierCheckError, TierError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Plan, plan
from tiercheck.policy.recovery.relayout import fetchers
from tiercheck.recovery.ranks import TOLD_S, Ranks
from tiercheck.types import PutMode

__all__ = ["Fetching"]

log = logging.getLogger(__name__)

OBJECTS_AT_ONCE = 2


class Fetching:
    """What one rank fetches for those of its ``place``: the ranks that say the same see the same first tier. Empty:
    nobody else does."""

    def __init__(self, reading: OpenHierarchy, ranks: Ranks, place: str) -> None:
        self._reading = reading
        self._ranks = ranks
        self._place = place
        self._put: set[ShardKey] = set()
        self._brought: Counter[str] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was fetched, and from where."""
        said = (f"{count} from {tier}" for tier, count in sorted(self._brought.items()))
        return (f"objects that this rank fetched for several of its node: {', '.join(said)}",) if self._brought else ()

    async def fetch(self, needed: Mapping[int, RecoveryPoint], sound: Collection[Copy]) -> tuple[int, set[int]]:
        """``needed``: the old ranks that this one is to read, and how. ``sound``: the copies that it knows. Collective.
        Returns the most that any rank is to read, and the old ranks of which there is something in the first tier now.
        """
        objects = {old: self._outside(old, point, sound) for old, point in needed.items()}
        told = self._place, sorted(old for old in objects if objects[old]), len(needed)
        answers = await self._ranks.gather("what each is to read", lambda: told, kind=tuple[str, list[int], int])
        by_place = fetchers([(place, olds) for place, olds, _ in answers])
        here = {old: rank for (place, old), rank in by_place.items() if place == self._place}
        most = max(count for _, _, count in answers)
        if by_place:
            mine = [copy for old, rank in here.items() if rank == self._ranks.rank for copy in objects[old]]
            await self._ranks.gather("fetching what several ranks read", partial(self._fetch, mine), more_s=TOLD_S)
        return most, {old for old in here if old in needed}

    async def forget(self) -> None:
        """Delete what was put. It lies where it came from."""
        gone, self._put = self._put, set()
        if gone:
            deleting = self._reading.first.driver.delete([str(key) for key in gone])
            try:
                await self._ranks.scheduler.call(deleting, what="deleting what was fetched", deadline_s=TOLD_S)
            except TierCheckError as error:
                log.warning("what was fetched for other ranks of this node stays: %s", error)

    def _outside(self, old: int, point: RecoveryPoint, sound: Collection[Copy]) -> list[Copy]:
        """What is to be read of it from outside the node."""
        chosen = plan(point, old, sound, self._reading.order)
        found = chosen.sources if isinstance(chosen, Plan) else ()
        return [source for source in found if self._reading.tiers[source.tier].seen_by_all]

    async def _fetch(self, objects: Sequence[Copy]) -> None:
        """As many of them as fit, and come in time."""
        slots = asyncio.Semaphore(OBJECTS_AT_ONCE)
        first = self._reading.first.driver

        async def bring(copy: Copy) -> None:
            async with slots:
                content = await self._reading.tiers[copy.tier].driver.get(str(copy.key))
                try:
                    await first.put(str(copy.key), [content], mode=PutMode.CREATE)
                    self._put.add(copy.key)
                    self._brought[self._reading.tiers[copy.tier].name] += 1
                except AlreadyExists:
                    pass

        async def bring_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for copy in objects:
                        group.create_task(bring(copy))
            except* TierError as errors:
                said = errors.exceptions[0]
                log.warning("not all that several ranks of this node read is fetched by one of them: %s", said)

        if objects:
            deadline_s = self._ranks.deadline_s
            try:
                await self._ranks.scheduler.call(bring_all(), what="fetching shards", deadline_s=deadline_s)
            except TierCheckError as error:
                log.warning("not all that several ranks of this node read is fetched by one of them: %s", error)
