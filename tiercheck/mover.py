"""The data mover: brings the tiers to what policy wants.

Level-triggered: observe what each tier holds, let policy say what should be where and what may go, copy,
delete, look again. No step depends on a notification having arrived, so a crash at any point is repaired by
looking again; notifications (:meth:`Mover.nudge`) only make it fast. Nothing is dropped to keep up: when a
capture would overrun what still drains, the capture waits (:meth:`Mover.room_for_base`).

A tier in trouble does not stop the others: its work is retried with growing pauses, and its last error shows
in :attr:`Mover.status` until it succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tiercheck import container, keys, objects
from tiercheck.errors import AlreadyExists, Corruption, DeadlineExceeded, JobConflict, NotFound, TierError
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey
from tiercheck.policy.commit import CommitRecord, Marker, superseded, to_commit, to_mark
from tiercheck.policy.lineage import Lineage
from tiercheck.policy.observation import Contents, Observation
from tiercheck.policy.placement import Placement, Transfer, own_bases
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention, watermark
from tiercheck.streams.merge import merge
from tiercheck.types import Payload, PutMode

__all__ = ["Mover", "MoverStatus", "Moving"]

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0


@dataclass(frozen=True)
class MoverStatus:
    """What the mover last saw and did."""

    watermark: int | None = None
    """The newest base version committed in the tier that survives most."""
    undrained_bases: int = 0
    """Bases of this rank that the durable tier still lacks."""
    idle: bool = False
    """Nothing was left to do at the last look."""
    copied_bytes: int = 0
    copied_objects: int = 0
    deleted_objects: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    """Per tier, the error of its last failed action, until one succeeds."""


class Moving(Protocol):
    """A rank's mover, as its trainer sees it: in the trainer's own process, or in the node agent's."""

    @property
    def status(self) -> MoverStatus: ...

    @property
    def conflict(self) -> JobConflict | None:
        """Why the mover has stopped for good: a newer generation has opened."""
        ...

    def nudge(self) -> None: ...

    async def run(self) -> None: ...

    async def cycle(self, *, closing: bool = False) -> bool: ...

    async def room_for_base(self, deadline_s: float) -> None: ...

    async def drain(self, deadline_s: float, *, closing: bool) -> None: ...


@dataclass
class _Trouble:
    """A tier's failures in a row, and when it is worth another try (loop time, seconds)."""

    failures: int
    retry_at: float
    listing: bool
    """It could not even be listed. Otherwise that goes on, and what it holds is known."""
    error: str


class Mover:
    """Moves one rank's objects. All methods run on one event loop; ``run`` is its life."""

    def __init__(
        self,
        hierarchy: OpenHierarchy,
        *,
        rank: int,
        world_size: int,
        generation: int,
        placement: Placement,
        retention: Retention,
        lineage: Lineage,
    ) -> None:
        self._hierarchy = hierarchy
        self._rank = rank
        self._world_size = world_size
        self._generation = generation
        self._placement = placement
        self._retention = retention
        self._lineage = lineage
        self._nudged = asyncio.Event()
        self._looked = asyncio.Condition()
        self._cycle = asyncio.Lock()
        self._trouble: dict[int, _Trouble] = {}
        self._unseen: set[int] = set()
        """Tiers that could not be listed at the last look: what there is to do for them is not known."""
        self._corrupt: set[tuple[int, ShardKey]] = set()
        self.status = MoverStatus()
        self.conflict: JobConflict | None = None

    def nudge(self) -> None:
        """Something changed: look soon instead of at the next regular look."""
        self._nudged.set()

    async def run(self) -> None:
        """Look and act until cancelled."""
        while True:
            try:
                await self.cycle()
            except JobConflict as conflict:
                self.conflict = conflict
                log.error("%s", conflict)
                return
            try:
                async with asyncio.timeout(LOOK_AGAIN_S if self.status.idle else RETRY_FIRST_S):
                    await self._nudged.wait()
            except TimeoutError:
                pass
            self._nudged.clear()

    async def cycle(self, *, closing: bool = False) -> bool:
        """Observe, decide, act, until nothing is left to do that can be done now. True where all was done.

        Errors: ``JobConflict`` once a newer generation has opened; nothing is written or deleted after that.
        """
        async with self._cycle:
            while True:
                seen = await self.observe()
                newer = superseded(seen)
                if newer is not None:
                    raise JobConflict(
                        f"generation {newer} of this job has opened while generation {seen.generation} (this process) "
                        "is still running; this one stops saving. Two jobs must not share a hierarchy: end one of "
                        "them, or give it a name of its own"
                    )
                acted, failed = await self._act(seen, closing)
                failed = failed or bool(self._unseen)
                self._note(seen, idle=not acted and not failed)
                async with self._looked:
                    self._looked.notify_all()
                if not acted:
                    return not failed

    async def observe(self) -> Observation:
        """What every tier holds now. A tier that cannot be listed counts as empty, and gets no work this time."""
        contents = await asyncio.gather(*(self._contents(tier) for tier in self._hierarchy.tiers))
        return Observation(
            self._hierarchy.roles,
            tuple(contents),
            self._rank,
            self._world_size,
            self._generation,
            self._lineage,
        )

    async def room_for_base(self, deadline_s: float) -> None:
        """Wait until another base may be captured: fewer than two of this rank still drain.

        Errors: ``DeadlineExceeded`` naming the tier that does not drain and its last error; ``JobConflict``.
        """

        async def has_room() -> bool:
            return self.status.undrained_bases < BASES_IN_VOLATILE_TIERS

        self._note(await self.observe(), idle=False)
        await self._until(
            has_room, deadline_s, f"{self.status.undrained_bases} bases have not reached the durable tier"
        )

    async def drain(self, deadline_s: float, *, closing: bool) -> None:
        """Bring everything this rank has captured to where policy wants it.

        ``closing`` sends an incomplete batch as it is. Errors: as :meth:`room_for_base`; ``Corruption`` where
        something newer than the watermark was damaged before it could be copied.
        """

        async def done() -> bool:
            return await self.cycle(closing=closing)

        await self._until(done, deadline_s, "not everything captured has reached its tiers")
        mark = -1 if self.status.watermark is None else self.status.watermark
        damaged = [(index, key) for index, key in self._corrupt if key.last > mark]
        if damaged:
            index, key = min(damaged)
            raise Corruption(
                f"{len(damaged)} captured objects were damaged before they could be copied on; versions from "
                f"{key.first} on are safe again with the next base",
                tier=self._hierarchy.tiers[index].name,
                key=str(key),
            )

    async def _until(self, condition: Callable[[], Awaitable[bool]], deadline_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not await condition():
                    if self.conflict is not None:
                        raise self.conflict
                    self.nudge()
                    async with self._looked:
                        try:
                            async with asyncio.timeout(RETRY_FIRST_S):
                                await self._looked.wait()
                        except TimeoutError:
                            continue
        except TimeoutError:
            errors = "; ".join(f"{tier}: {error}" for tier, error in self.status.errors.items())
            raise DeadlineExceeded(f"{what} within {deadline_s:g} s" + (f" ({errors})" if errors else "")) from None

    async def _contents(self, tier: OpenTier) -> Contents:
        found: list[tuple[Key, int]] = []

        async def listed() -> None:
            async for info in tier.driver.list():
                key = keys.parse(info.key)
                if key is not None and (tier.index, key) not in self._corrupt:
                    found.append((key, info.nbytes))

        if await self._try(tier.index, listed, listing=True):
            self._unseen.discard(tier.index)
            return Contents.of(found)
        self._unseen.add(tier.index)
        return Contents()

    async def _act(self, seen: Observation, closing: bool) -> tuple[bool, bool]:
        """Do what policy asks for. Returns whether anything was done, and whether anything was not."""
        actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (transfer.target_tier, partial(self._transfer, transfer))
            for transfer in self._placement.transfers(seen, closing=closing)
        ]
        for tier in self._hierarchy.tiers:
            actions += [(tier.index, partial(self._mark, tier, key)) for key in to_mark(seen, tier.index)]
            actions += [(tier.index, partial(self._commit, tier, key)) for key in to_commit(seen, tier.index)]
        for index, gone in self._retention.reclaimable(seen).items():
            if gone:
                actions.append((index, partial(self._delete, self._hierarchy.tiers[index], gone)))
        outcomes = [await self._try(index, action) for index, action in actions]
        for index in self._trouble.keys() - self._unseen - {index for index, _ in actions}:
            self._settle(index)
        return any(outcomes), not all(outcomes)

    async def _try(self, index: int, action: Callable[[], Awaitable[None]], *, listing: bool = False) -> bool:
        """Run an action against a tier unless the tier is pausing; note its failure or its recovery.

        That a tier can be listed ends no trouble with writing to it: its pauses go on growing.
        """
        now = asyncio.get_running_loop().time()
        trouble = self._trouble.get(index)
        if trouble is not None and now < trouble.retry_at and (trouble.listing or not listing):
            return False
        name = self._hierarchy.tiers[index].name
        try:
            await action()
        except TierError as error:
            failures = trouble.failures + 1 if trouble else 1
            pause = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(failures - 1, 10))
            self._trouble[index] = _Trouble(failures, now + pause, listing, str(error))
            self.status = replace(self.status, errors={**self.status.errors, name: str(error)})
            level = logging.WARNING if trouble is None or str(error) != trouble.error else logging.DEBUG
            log.log(level, "tier %s: %s; trying again, every %g s at most", name, error, RETRY_MAX_S)
            return False
        if trouble is not None and (trouble.listing or not listing):
            self._settle(index)
        return True

    def _settle(self, index: int) -> None:
        """The tier's trouble is over."""
        name = self._hierarchy.tiers[index].name
        del self._trouble[index]
        self.status = replace(self.status, errors={k: v for k, v in self.status.errors.items() if k != name})

    async def _transfer(self, transfer: Transfer) -> None:
        """Verify the sources, then put them as one object."""
        source = self._hierarchy.tiers[transfer.source_tier]
        target = self._hierarchy.tiers[transfer.target_tier]
        shards: list[container.Shard] = []
        content = memoryview(b"")
        for key in transfer.sources:
            try:
                content = await source.driver.get(str(key))
                shard = container.parse(content, key=str(key), tier=source.name)
                await asyncio.to_thread(shard.verify)
            except (Corruption, NotFound) as error:
                # The copy cannot be repaired from itself. It is left for a recovery to report, and not read again.
                if isinstance(error, Corruption):
                    self._corrupt.add((source.index, key))
                    log.error("%s; it is not copied on", error)
                return
            shards.append(shard)
        copied = transfer.sources == (transfer.target,)
        payload: Payload = [content] if copied else merge(shards, transfer.target)
        await target.driver.put(str(transfer.target), payload)
        self._count(copied_bytes=sum(len(part) for part in payload), copied_objects=1)

    async def _mark(self, tier: OpenTier, key: MarkerKey) -> None:
        shard = ShardKey.base(key.generation, key.version, key.rank)
        marker = await self._marker_of(tier, shard)
        await tier.driver.put(str(key), [objects.pack(marker.to_object())])

    async def _commit(self, tier: OpenTier, key: CommitKey) -> None:
        """Check each rank's marker against the shard it speaks of, then publish the record."""
        markers: list[Marker] = []
        for rank in range(self._world_size):
            name = str(MarkerKey(key.generation, key.version, rank))
            try:
                said = Marker.from_object(objects.unpack(await tier.driver.get(name)))
            except ValueError as error:
                raise Corruption(str(error), tier=tier.name, key=name) from error
            shard = ShardKey.base(key.generation, key.version, rank)
            found = await self._marker_of(tier, shard)
            if said != found:
                raise Corruption(f"the shard is {found}, its marker says {said}", tier=tier.name, key=str(shard))
            markers.append(said)
        record = CommitRecord(key.generation, key.version, tuple(markers))
        # Only the coordinator of this very generation writes it: where the tier knows no conditions, it may be repeated.
        mode = PutMode.CREATE if tier.capabilities.conditional_put else PutMode.OVERWRITE
        try:
            await tier.driver.put(str(key), [objects.pack(record.to_object())], mode=mode)
        except AlreadyExists:
            log.debug("base %d of generation %d is committed already", key.version, key.generation)

    async def _marker_of(self, tier: OpenTier, shard: ShardKey) -> Marker:
        """Length and header digest of a shard as it lies in the tier."""
        content = await tier.driver.get(str(shard))
        parsed = container.parse(content, key=str(shard), tier=tier.name)
        return Marker(len(content), parsed.digest)

    async def _delete(self, tier: OpenTier, gone: Sequence[Key]) -> None:
        records = [str(key) for key in gone if isinstance(key, CommitKey)]
        if records:
            await tier.driver.delete(records)
        await tier.driver.delete([str(key) for key in gone if not isinstance(key, CommitKey)])
        self._count(deleted_objects=len(gone))

    def _count(self, *, copied_bytes: int = 0, copied_objects: int = 0, deleted_objects: int = 0) -> None:
        self.status = replace(
            self.status,
            copied_bytes=self.status.copied_bytes + copied_bytes,
            copied_objects=self.status.copied_objects + copied_objects,
            deleted_objects=self.status.deleted_objects + deleted_objects,
        )

    def _note(self, seen: Observation, *, idle: bool) -> None:
        mark = watermark(seen)
        captured = own_bases(seen, seen.contents[0])
        durable = own_bases(seen, seen.contents[seen.durable.index])
        newest = durable[-1].first if durable else -1
        self.status = replace(
            self.status,
            watermark=mark.version if mark else None,
            undrained_bases=sum(base.first > newest for base in captured),
            idle=idle,
        )
