"""What a mover does for one tier: copying, marking, committing and deleting objects.

Each method here is one action on one object, but for deletions, which are asked of a tier many at a time. What may be
committed or deleted is fenced: right before, it is asked whether a newer generation of the job has opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiercheck.errors import AlreadyExists, Corruption, NotFound, TierError
from tiercheck.format import container
from tiercheck.format.container import HeaderTooLarge
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import CommitKey, Key, MarkerKey, MetricKey, ShardKey, Stream
from tiercheck.policy.commit import CommitRecord, to_commit
from tiercheck.policy.placement import Transfer
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.replication.backoff import CONCERNS_THE_TIER, TIER_AWAY_AFTER, Action, SourceError, TierBackoff
from tiercheck.replication.objects.records import marker_record, metric_record, seal
from tiercheck.replication.objects.shards import look_at
from tiercheck.replication.observer import Observer
from tiercheck.replication.pacing import Pacer
from tiercheck.streams.records.merge import ShardContents, as_stored, merge
from tiercheck.types import Payload, PutMode

__all__ = ["COMMITTING", "COPYING", "COPYING_BASES", "DELETING", "MARKING", "REPORTING", "Actions", "copying"]

log = logging.getLogger(__name__)

COPYING, MARKING, COMMITTING, DELETING = "copying", "marking", "committing", "deleting"
COPYING_BASES = "copying base"
REPORTING = "reporting"
CHECKS_IN_FLIGHT = 128
"""So many ranks' shards the coordinator checks at a time."""
DELETE_CALLS_MAX = 64
MISSING_MAX = 1000


def copying(shard: ShardKey) -> str:
    """What it is called to copy the shard. A constant is a part of the bases that refer to it."""
    return COPYING_BASES if shard.stream in (Stream.BASE, Stream.CONSTANT) else COPYING


class _Foreign(Corruption):
    """The shard is another job's."""


@dataclass(frozen=True)
class _VerifiedShard:
    """A verified shard: its bytes, what it holds, and that as the target's codec has it."""

    content: memoryview
    stored: ShardContents
    wanted: ShardContents


class Actions:
    """Carries out one rank's actions, and counts what they moved. ``fence``: see :meth:`Observer.fence`."""

    def __init__(
        self,
        hierarchy: OpenHierarchy,
        observer: Observer,
        attempts: TierBackoff,
        *,
        world_size: int,
        lineage: Lineage,
        fence: Callable[[OpenTier], Awaitable[None]],
        pacer: Pacer,
    ) -> None:
        self.copied_bytes = 0
        self.copied_objects = 0
        self.deleted_objects = 0
        self._hierarchy = hierarchy
        self._observer = observer
        self._attempts = attempts
        self._world_size = world_size
        self._lineage = lineage
        self._fence = fence
        self._pacer = pacer
        self._missing: set[tuple[int, ShardKey]] = set()
        """Copies (tier index, key) that were listed once, and were not there."""

    # Copying

    async def transfer(self, transfer: Transfer) -> None:
        """Verify the sources, then put them as one object; as several, if one cannot hold them."""
        source = self._hierarchy.tiers[transfer.source_tier]
        target = self._hierarchy.tiers[transfer.target_tier]
        # A tier's own codec is one of differentials. What keeps its codec is copied as it is.
        codec = target.codec if transfer.target.stream is Stream.DIFFERENTIAL else ""
        sources: list[_VerifiedShard] = []
        for key in transfer.sources:
            verified = await self._verified(source, key, codec)
            if verified is None:
                return  # the next look does without it
            sources.append(verified)
            if transfer.sources == (transfer.target,) and not codec:
                await self._put(target, transfer.target, [verified.content])
                return
        try:
            await self._put_merged(target, [each.wanted for each in sources])
        except HeaderTooLarge:
            if not codec:
                raise
            # What is encoded has more parts than what was captured.
            await self._put_merged(target, [each.stored for each in sources])

    async def _verified(self, source: OpenTier, key: ShardKey, codec: str) -> _VerifiedShard | None:
        """The shard, every byte of it verified; ``None`` if it is damaged or gone. Errors: ``SourceError``."""
        try:
            content = await source.driver.get(str(key))
            # Thousands of tensors take a while, and the ranks of an agent share this loop.
            shard = await asyncio.to_thread(container.parse, content, key=str(key), tier=source.name)
            self._check_token(source, key, shard.metadata.token)
            stored = await asyncio.to_thread(_verified_contents, shard)
            wanted = await asyncio.to_thread(_reencoded, shard, codec) if codec else stored
            return _VerifiedShard(content, stored, wanted)
        except NotFound as error:
            self._observer.gone(source.index, [key])
            if (source.index, key) in self._missing:
                raise SourceError(f"its source is listed, and is not there: {error}") from error
            # Once is in order: it was wanted no more, and deleted meanwhile.
            if len(self._missing) >= MISSING_MAX:
                self._missing.clear()
            self._missing.add((source.index, key))
            return None
        except Corruption as error:
            # The copy cannot be repaired from itself. It is not read again, and goes when it has been outlived.
            self._observer.found_damaged(source.index, key, foreign=isinstance(error, _Foreign))
            log.error("%s; it is not copied on", error)
            return None
        except TierError as error:
            raise SourceError(f"its source cannot be read: {error}") from error

    async def _put_merged(self, target: OpenTier, found: Sequence[ShardContents]) -> None:
        first, last = found[0].metadata.key, found[-1].metadata.key
        batch = ShardKey.differential(first.generation, first.first, last.last, first.rank)
        try:
            payload: Payload = await asyncio.to_thread(merge, found, batch)
        except HeaderTooLarge as error:
            if len(found) == 1:
                raise
            log.debug("%s becomes two objects: %s", batch, error)
            middle = len(found) // 2
            await self._put_merged(target, found[:middle])
            await self._put_merged(target, found[middle:])
            return
        await self._put(target, batch, payload)

    async def _put(self, target: OpenTier, key: ShardKey, payload: Payload) -> None:
        async with self._pacer.copying(target, key, sum(memoryview(each).nbytes for each in payload)):
            info = await target.driver.put(str(key), payload)
        self._observer.put(target.index, key, info.nbytes)
        self.copied_bytes += info.nbytes
        self.copied_objects += 1

    # Committing

    async def report(self, tier: OpenTier, key: MetricKey) -> None:
        """Put what the training loop has reported into the tier: its key says it all."""
        info = await tier.driver.put(str(key), [metric_record(key)])
        self._observer.put(tier.index, key, info.nbytes)

    async def mark(self, tier: OpenTier, shard: ShardKey) -> None:
        key, _ = await look_at(tier, shard)
        info = await tier.driver.put(str(key), [marker_record(key)])
        self._observer.put(tier.index, key, info.nbytes)

    async def commit(self, tier: OpenTier, key: CommitKey) -> None:
        """Check each rank's marker against the shard it speaks of, then publish the record."""
        said = self._observer.seen().contents[tier.index].marked(key)
        markers: list[MarkerKey] = []
        indexes: list[str] = []
        for start in range(0, self._world_size, CHECKS_IN_FLIGHT):
            ranks = range(start, min(start + CHECKS_IN_FLIGHT, self._world_size))
            checks = (self._checked(tier, key, rank, said.get(rank, ())) for rank in ranks)
            checked = await asyncio.gather(*checks, return_exceptions=True)
            for each in checked:
                if isinstance(each, BaseException):
                    raise each
                marker, index = each
                markers.append(marker)
                indexes.append(index)
        layout = container.checksum_of("".join(indexes).encode()) if all(indexes) else ""
        record = CommitRecord.of(key, markers, layout)
        # Nobody but the coordinator of this generation writes it: where puts know no conditions, it may be repeated.
        mode = PutMode.CREATE if tier.capabilities.conditional_put else PutMode.OVERWRITE
        content = seal(key, record)
        await self._fence(tier)
        if key not in to_commit(self._observer.seen(), tier.index):
            return  # a newer one is committed by now, and shards of this one may be on their way out
        try:
            await tier.driver.put(str(key), [content], mode=mode)
        except AlreadyExists:
            log.debug("version %d of generation %d is committed already", key.version, key.generation)
        self._observer.put(tier.index, key, len(content))
        await self._fence(tier)  # what is deleted elsewhere because of this commit need not wait for this tier then

    async def _checked(
        self, tier: OpenTier, commit: CommitKey, rank: int, said: Sequence[MarkerKey]
    ) -> tuple[MarkerKey, str]:
        """The marker that says of the rank's shard what is found, and the checksum of the shard's index. Two requests,
        one after the other; that what the shard refers to is there is asked meanwhile. Errors: ``Corruption`` if no
        marker does; ``NotFound``."""
        shard = said[0].shard if said else commit.shard(rank)
        looking = look_at(tier, shard, said[0].header_nbytes if said else 0)
        if (constants := shard.constants) is None:
            found, index = await looking
        else:
            (found, index), _ = await asyncio.gather(looking, tier.driver.stat(str(constants)))
        if found not in said:
            stated = " and ".join(each.said for each in said) or "nothing"
            raise Corruption(f"the shard has {found.said}, its marker says {stated}", tier=tier.name, key=str(shard))
        self._check_token(tier, shard, found.token)
        return found, index

    def _check_token(self, tier: OpenTier, shard: ShardKey, token: str) -> None:
        """Errors: ``_Foreign`` for a shard of another job's generation of this number."""
        if (reason := self._lineage.disowns(shard.generation, token)) is not None:
            raise _Foreign(reason, tier=tier.name, key=str(shard))

    # Deleting

    def deletions(self, tier: OpenTier, gone: Sequence[Key]) -> list[Action]:
        """The objects that may go: together, but for those that could not be deleted by themselves."""
        troubled = self._attempts.in_trouble(tier, DELETING)
        alone = [key for key in gone if str(key) in troubled]
        committed = {key for key in alone if isinstance(key, CommitKey)}
        together = [key for key in gone if str(key) not in troubled and _record_of(key) not in committed]
        actions = [self._deletion(tier, key) for key in alone]
        if together:
            actions.append(Action(DELETING, "", partial(self._delete, tier, together), into_tier=False))
        return actions

    def _deletion(self, tier: OpenTier, key: Key) -> Action:
        return Action(DELETING, str(key), partial(self._delete_one, tier, key), into_tier=False)

    async def _delete_one(self, tier: OpenTier, key: Key) -> None:
        await self._fence(tier)
        await self._deleted(tier, [key])

    async def _delete(self, tier: OpenTier, gone: Sequence[Key]) -> None:
        """Delete the commit records, then the other objects, but for those of which a commit record is left.

        An object that cannot be deleted by itself is in trouble of its own, and left alone by the next call.
        Errors: those of the tier, when it deletes nothing.
        """
        await self._fence(tier)
        left = await self._delete_most(tier, [key for key in gone if isinstance(key, CommitKey)])
        others = [key for key in gone if not isinstance(key, CommitKey) and _record_of(key) not in left]
        await self._delete_most(tier, others)

    async def _delete_most(self, tier: OpenTier, gone: Sequence[Key]) -> set[Key]:
        """Delete all at once, and what cannot be deleted so in smaller and smaller groups. Returns what is left."""
        # The more attempts have failed before, the smaller the groups to begin with.
        size = max(1, len(gone) >> self._attempts.failures(tier, (DELETING, "")))
        groups = deque(gone[start : start + size] for start in range(0, len(gone), size))
        left: set[Key] = set()
        in_a_row = 0
        for _ in range(DELETE_CALLS_MAX):
            if not groups:
                return left
            group = groups.popleft()
            try:
                await self._deleted(tier, group)
            except Exception as error:
                in_a_row += isinstance(error, CONCERNS_THE_TIER)
                if in_a_row >= TIER_AWAY_AFTER:
                    raise
                if len(group) == 1:
                    left.update(group)
                    self._attempts.failed(tier, self._deletion(tier, group[0]), error)
                else:
                    middle = len(group) // 2
                    groups += group[:middle], group[middle:]
            else:
                in_a_row = 0
        raise TierError(f"{sum(map(len, groups))} objects are left, since some cannot be deleted", tier=tier.name)

    async def _deleted(self, tier: OpenTier, gone: Sequence[Key]) -> None:
        await tier.driver.delete([str(key) for key in gone])
        self._observer.gone(tier.index, gone)
        self.deleted_objects += len(gone)


def _record_of(key: Key) -> CommitKey | None:
    """The commit record that says that this shard of a base or of a snapshot is whole."""
    match key:
        case ShardKey(stream=Stream.BASE | Stream.SNAPSHOT):
            return CommitKey.of(key)
    return None


def _verified_contents(shard: container.Shard) -> ShardContents:
    """What the shard holds, every byte of it verified. Errors: ``Corruption``."""
    shard.verify()
    return as_stored(shard)


def _reencoded(shard: container.Shard, codec: str) -> ShardContents:
    from tiercheck.streams.records.reencode import reencoded  # brings NumPy, which few movers need

    return reencoded(shard, codec)
