"""The lineage record of the present generation in each tier behind the first: before it is there nothing is put there,
and without it nobody reads what is there.

It is put at attach, or, if a tier was away then, as soon as it answers. Each listing shows it. If a later one does not,
somebody else has removed it. If what is committed is there still, it is put again. Else the tier was emptied, or
something else is mounted in its place: nothing more is put there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable

from tiercheck.errors import NotFound, Transient
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import LineageKey
from tiercheck.policy.observation import Observation
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.replication.objects.generation import record_generation
from tiercheck.replication.observer import Observer

__all__ = ["GenerationRecord"]

log = logging.getLogger(__name__)


class GenerationRecord:
    """``first``: the rank's first tier, which has the record."""

    def __init__(self, lineage: Lineage, generation: int, observer: Observer, first: OpenTier) -> None:
        self.key = LineageKey(generation)
        self._branch = lineage.branches.get(generation)
        self._lineage = lineage
        self._observer = observer
        self._first = first
        self._known_at: dict[int, float] = {}
        """By tier, when the record was there last, in the event loop's seconds."""

    @property
    def state(self) -> Hashable:
        """Equal as long as :meth:`lacks` answers the same of the same observation."""
        return frozenset(self._known_at.items())

    def lacks(self, seen: Observation, tier: OpenTier) -> bool:
        """Whether the tier is not known to have it."""
        if self._branch is None or tier.index == self._first.index:
            return False
        known_at = self._known_at.get(tier.index)
        if known_at is None:
            return True
        listed_since = self._observer.listed_at(tier.index) > known_at
        return listed_since and self.key.generation not in seen.contents[tier.index].recorded

    async def put(self, tier: OpenTier) -> None:
        """Idempotent. Errors: as :func:`record_generation`; ``Transient`` for a tier that was emptied."""
        assert self._branch is not None
        again = tier.index in self._known_at and tier.role.shared and not await self._is_there(tier)
        if again:
            if not self._observer.seen().contents[tier.index].commits:
                raise Transient(
                    "it no longer has what this job has saved there: it was emptied, or something else is mounted in "
                    "its place. Mount it; if it was emptied on purpose, start again with another place for it",
                    tier=tier.driver.url,
                )
            log.warning(
                "somebody has removed %s from the tier %s, and perhaps more; it is put there again, since nobody can "
                "read what is there without it",
                self.key,
                tier.name,
            )
        rank = self._observer.rank
        await record_generation(tier, self._branch, self._lineage, rank, self._first, again=again)
        self._known_at[tier.index] = asyncio.get_running_loop().time()

    async def _is_there(self, tier: OpenTier) -> bool:
        """Whether it is, though the last listing has not shown it."""
        try:
            await tier.driver.stat(str(self.key))
        except NotFound:
            return False
        return True
