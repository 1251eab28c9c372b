"""Reading every byte of every shard in every tier, and saying what would be lost without those that are damaged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiercheck import keys
from tiercheck.archive.inventory import Inventory
from tiercheck.archive.shards import verify_shard
from tiercheck.archive.tiers import answered, look_into
from tiercheck.errors import ConfigurationError, Corruption, DeadlineExceeded, NotFound, TierError, Transient
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import CommitKey, LineageKey, ShardKey
from tiercheck.policy.commit import CommitRecord
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.spans import Span, spans_of
from tiercheck.recovery.reading.patience import time_to_read
from tiercheck.replication.objects.lineage_records import read_lineage
from tiercheck.replication.objects.records import read_record
from tiercheck.runtime.waiting import each_of
from tiercheck.types import ObjectInfo

__all__ = ["Damaged", "Progress", "Verified", "verify"]

OBJECTS_AT_ONCE = 4

Progress = Callable[[int, int], None]
"""Told bytes verified, and bytes in all."""


@dataclass(frozen=True)
class Damaged:
    """An object whose bytes are not those that were written, or that could not be read (``unread``)."""

    key: str
    tier: str
    reason: str
    unread: bool = False


@dataclass(frozen=True)
class Verified:
    """What :func:`verify` found."""

    objects: int
    nbytes: int
    damaged: tuple[Damaged, ...]
    gone: int
    """Objects that were deleted since the tiers were listed: a live job does that."""
    lost: tuple[Span, ...]
    """Versions that could be read if nothing were damaged, and cannot."""
    newest: int | None
    """The newest version that can be read by what is whole."""
    away: tuple[str, ...] = ()
    """Tiers that were not read, since they could not be opened or listed."""

    @property
    def healthy(self) -> bool:
        """Whether every tier was read, and every version that the listings promise can be read: one at least, if
        anything is there."""
        return not self.lost and not self.away and (self.newest is not None or self.objects == self.gone)


async def verify(hierarchy: OpenHierarchy, inventory: Inventory, deadline_s: float, progress: Progress) -> Verified:
    """Verify all objects. ``deadline_s``: how long a tier may keep silent. Each tier is read by itself,
    :data:`OBJECTS_AT_ONCE` objects at a time; of each of them at most a chunk is in memory
    (:data:`tiercheck.archive.shards.CHUNK_NBYTES`), if the tier reads ranges."""
    work = _Work(inventory, deadline_s, progress)
    await asyncio.gather(*(work.tier(tier) for tier in hierarchy.tiers))
    before = inventory.readable
    after = inventory.less(work.bad).readable
    whole = inventory.less([*work.bad, *work.gone_shards]).readable
    return Verified(
        objects=work.objects,
        nbytes=work.done_nbytes,
        damaged=tuple(sorted(work.damaged, key=lambda each: (each.tier, each.key))),
        gone=work.gone,
        lost=spans_of(before.keys() - after.keys()),
        newest=max(whole, default=None),
        away=tuple(tier.name for tier in inventory.tiers if tier.away is not None),
    )


class _Work:
    def __init__(self, inventory: Inventory, deadline_s: float, progress: Progress) -> None:
        self._inventory = inventory
        self._deadline_s = deadline_s
        self._silent: set[int] = set()
        """Tiers that did not answer in time."""
        self._lineage = inventory.lineage()
        self._progress = progress
        self._total_nbytes = sum(tier.nbytes for tier in inventory.tiers)
        self.objects = self.done_nbytes = self.gone = 0
        self.damaged: list[Damaged] = []
        self.bad: list[Copy] = []
        self.gone_shards: list[Copy] = []

    async def tier(self, tier: OpenTier) -> None:
        contents = self._inventory.tiers[tier.index]
        absent: list[tuple[keys.Key, NotFound]] = []

        async def take(listed: tuple[keys.Key, ObjectInfo]) -> None:
            await self._object(tier, *listed, absent)

        await each_of(sorted(contents.objects.items(), key=lambda each: str(each[0])), take, OBJECTS_AT_ONCE)
        if absent:
            await self._look_again(tier, absent)

    async def _look_again(self, tier: OpenTier, absent: Sequence[tuple[keys.Key, NotFound]]) -> None:
        """What is not there any more has been deleted. What is listed, and cannot be read, is damage."""
        now = await look_into(tier, None, self._deadline_s)
        for key, not_found in absent:
            if now.away is not None or key in now.objects:
                self._note(tier, key, now.error or not_found)
                continue
            self.gone += 1
            if isinstance(key, ShardKey):
                self.gone_shards.append(Copy(tier.index, key))

    async def _object(
        self, tier: OpenTier, key: keys.Key, info: ObjectInfo, absent: list[tuple[keys.Key, NotFound]]
    ) -> None:
        try:
            await self._in_time(tier, key, info)
        except NotFound as error:
            absent.append((key, error))
        except (TierError, ConfigurationError) as error:
            self._note(tier, key, error)
        self.objects += 1
        self.done_nbytes += info.nbytes
        self._progress(self.done_nbytes, self._total_nbytes)

    async def _in_time(self, tier: OpenTier, key: keys.Key, info: ObjectInfo) -> None:
        """Errors: as :meth:`_verified`; ``Transient`` for a tier that keeps silent, and then at once for all else that
        is in it."""
        deadline_s = self._deadline_s + time_to_read(info.nbytes)
        if tier.index not in self._silent:
            try:
                return await answered(self._verified(tier, key, info), deadline_s)
            except DeadlineExceeded:
                self._silent.add(tier.index)
        raise Transient(f"the tier did not answer within {deadline_s:.3g} s", tier=tier.driver.url, key=str(key))

    async def _verified(self, tier: OpenTier, key: keys.Key, info: ObjectInfo) -> None:
        match key:
            case ShardKey():
                header = await verify_shard(tier, key, info.nbytes)
                reason = self._lineage.disowns(key.generation, header.metadata.token)
                if reason is not None:
                    raise Corruption(reason, tier=tier.name, key=str(key))
            case LineageKey():
                await read_lineage(tier, key, nbytes=info.nbytes)
            case CommitKey():
                await read_record(tier.driver, key, CommitRecord, nbytes=info.nbytes)
            case _:
                await read_record(tier.driver, key, dict[str, Any], nbytes=info.nbytes)

    def _note(self, tier: OpenTier, key: keys.Key, error: TierError | ConfigurationError) -> None:
        reason = error.message if isinstance(error, TierError) else str(error)
        self.damaged.append(Damaged(str(key), tier.name, reason, unread=not isinstance(error, Corruption)))
        if isinstance(key, ShardKey):
            self.bad.append(Copy(tier.index, key))
