"""What the tiers hold, listed no more often than it takes.

A tier inside the node is listed at each look. A store behind a network is listed when something may have changed: at
first, again when somebody asks for a fresh view, and else after a pause that doubles as long as nothing changes. In
between, and while a listing is under way, what this mover has itself put and deleted is added to what was listed. So a
mover that copies a differential every second does not list its bucket every second; and a view that is behind costs a
copy too many at most, since nothing is committed or deleted on it (:class:`tiercheck.mover.Mover` asks for a fresh one
first).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tiercheck import keys
from tiercheck.attempts import Attempts
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import Key, ShardKey
from tiercheck.policy.lineage import Lineage
from tiercheck.policy.observation import Contents, Observation

__all__ = ["Observer"]

RELIST_FIRST_S = 0.5
RELIST_MAX_S = 30.0


@dataclass
class _Known:
    """What is known of one tier. Times are the event loop's, in seconds."""

    objects: dict[Key, int] = field(default_factory=dict)
    changes: dict[Key, int | None] = field(default_factory=dict)
    """What this mover has put (bytes) and deleted (``None``) since the last listing began: one that was under way
    meanwhile shows some of it, and some not."""
    listed_at: float = float("-inf")
    pause_s: float = RELIST_FIRST_S
    visible: bool = False
    """The last attempt to list it succeeded."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Observer:
    """One rank's view of its tiers."""

    def __init__(
        self,
        hierarchy: OpenHierarchy,
        attempts: Attempts,
        *,
        rank: int,
        world_size: int,
        generation: int,
        lineage: Lineage,
    ) -> None:
        self.damaged: set[tuple[int, ShardKey]] = set()
        """Copies (tier index, key) that failed verification: they count as absent."""
        self._hierarchy = hierarchy
        self._attempts = attempts
        self._rank = rank
        self._world_size = world_size
        self._generation = generation
        self._lineage = lineage
        self._known = [_Known() for _ in hierarchy.tiers]

    async def look(self, fresh: Collection[int] = ()) -> Observation:
        """What every tier holds; those in ``fresh`` (tier indices) are listed now, whatever is known of them."""
        asked_at = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._list(tier, asked_at, tier.index in fresh) for tier in self._hierarchy.tiers))
        contents = tuple(
            Contents.of((key, nbytes) for key, nbytes in known.objects.items() if (tier.index, key) not in self.damaged)
            for tier, known in zip(self._hierarchy.tiers, self._known, strict=True)
        )
        return Observation(
            self._hierarchy.roles, contents, self._rank, self._world_size, self._generation, self._lineage
        )

    def visible(self, index: int) -> bool:
        """Whether the tier could be listed at the last attempt: else what there is to do for it is not known."""
        return self._known[index].visible

    def age_s(self, index: int) -> float:
        """Seconds since the tier was last listed."""
        return asyncio.get_running_loop().time() - self._known[index].listed_at

    def put(self, index: int, key: Key, nbytes: int) -> None:
        """This mover has put an object."""
        known = self._known[index]
        known.objects[key] = known.changes[key] = nbytes
        known.pause_s = RELIST_FIRST_S

    def gone(self, index: int, deleted: Iterable[Key]) -> None:
        """These objects are no longer there."""
        known = self._known[index]
        for key in deleted:
            known.objects.pop(key, None)
            known.changes[key] = None

    async def _list(self, tier: OpenTier, asked_at: float, fresh: bool) -> None:
        known = self._known[tier.index]
        nearby = tier.capabilities.mappable
        async with known.lock:
            # Another look may have listed it while this one waited.
            due = asked_at - known.listed_at >= (0.0 if nearby or fresh else known.pause_s)
            if due or not known.visible:
                found: dict[Key, int] = {}
                known.changes.clear()
                known.visible = await self._attempts.run(tier, lambda: self._read(tier, found), listing=True)
                if known.visible:
                    listed: dict[Key, int | None] = {**found, **known.changes}
                    found = {key: nbytes for key, nbytes in listed.items() if nbytes is not None}
                    known.pause_s = min(2 * known.pause_s, RELIST_MAX_S) if found == known.objects else RELIST_FIRST_S
                    known.objects = found
                    known.listed_at = asyncio.get_running_loop().time()

    async def _read(self, tier: OpenTier, found: dict[Key, int]) -> None:
        async for info in tier.driver.list():
            key = keys.parse(info.key)
            if key is not None:
                found[key] = info.nbytes
