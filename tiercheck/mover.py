"""The data mover: brings the tiers to what policy wants.

Level-triggered: observe what each tier holds, let policy say what should be where and what may go, copy,
delete, look again. No step depends on a notification having arrived, so a crash at any point is repaired by
looking again; notifications (:meth:`Mover.nudge`) only make it fast. Nothing is dropped to keep up: when a
capture would overrun what still drains, the capture waits (:meth:`Mover.room_for_base`).

Each tier is served by itself, so that the upload of a base that takes minutes keeps no differential from the
neighbour's memory. A tier in trouble does not stop the others either: its work is retried with growing pauses, and
its last error shows in :attr:`Mover.status` until it succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tiercheck import container
from tiercheck.attempts import RETRY_FIRST_S, Attempts
from tiercheck.errors import AlreadyExists, Corruption, DeadlineExceeded, JobConflict, NotFound
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey, Stream
from tiercheck.observer import Observer
from tiercheck.policy.commit import CommitRecord, Marker, superseded, to_commit, to_mark
from tiercheck.policy.lineage import Lineage
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Placement, Transfer, own_bases
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention, watermark
from tiercheck.records import read_record, seal
from tiercheck.streams.merge import Contents, as_stored, merge
from tiercheck.types import ByteRange, Payload, PutMode

__all__ = ["Mover", "MoverStatus", "Moving"]

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0
FRESH_S = 1.0
"""What was listed longer ago is no ground for committing or deleting anything."""
HEADER_GUESS_BYTES = 64 << 10
"""The beginning of a shard that is asked for first: most headers fit, and the rest is fetched where not."""


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


_Action = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class _Work:
    """What is to be done for one tier."""

    copies: tuple[_Action, ...] = ()
    decisive: tuple[_Action, ...] = ()
    """Commits and deletions: on an old view they could do harm, so they come first."""


@dataclass(frozen=True)
class _Outcome:
    """``acted``: something was done. ``done``: nothing is left to do."""

    acted: bool
    done: bool


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
        self.status = MoverStatus()
        self.conflict: JobConflict | None = None
        self._hierarchy = hierarchy
        self._world_size = world_size
        self._lineage = lineage
        self._placement = placement
        self._retention = retention
        self._attempts = Attempts()
        self._observer = Observer(
            hierarchy, self._attempts, rank=rank, world_size=world_size, generation=generation, lineage=lineage
        )
        self._nudged = [asyncio.Event() for _ in hierarchy.tiers]
        self._serving = [asyncio.Lock() for _ in hierarchy.tiers]
        self._idle = [False for _ in hierarchy.tiers]
        self._looked = asyncio.Condition()

    def nudge(self) -> None:
        """Something changed: look soon instead of at the next regular look."""
        for nudged in self._nudged:
            nudged.set()

    async def run(self) -> None:
        """Look and act until cancelled, or until a newer generation opens (:attr:`conflict`)."""
        try:
            async with asyncio.TaskGroup() as group:
                for tier in self._hierarchy.tiers:
                    group.create_task(self._keep_serving(tier))
        except* JobConflict as conflicts:
            self.conflict = next(each for each in conflicts.exceptions if isinstance(each, JobConflict))
            log.error("%s", self.conflict)

    async def cycle(self, *, closing: bool = False) -> bool:
        """Observe, decide, act, until nothing is left to do that can be done now. True where all was done.

        Errors: ``JobConflict`` once a newer generation has opened; nothing is written or deleted after that.
        """
        fresh = True
        while True:
            outcomes = await asyncio.gather(
                *(self._serve(tier, closing=closing, fresh=fresh) for tier in self._hierarchy.tiers),
                return_exceptions=True,
            )
            served: list[_Outcome] = []
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                served.append(outcome)
            if not any(outcome.acted for outcome in served):
                return all(outcome.done for outcome in served)
            fresh = False  # what one tier was given may make work for another

    async def _keep_serving(self, tier: OpenTier) -> None:
        nudged = self._nudged[tier.index]
        while True:
            outcome = await self._serve(tier, closing=False, fresh=False)
            if outcome.acted:
                self.nudge()
                nudged.clear()
            try:
                async with asyncio.timeout(LOOK_AGAIN_S if outcome.done else RETRY_FIRST_S):
                    await nudged.wait()
            except TimeoutError:
                pass
            nudged.clear()

    async def _serve(self, tier: OpenTier, *, closing: bool, fresh: bool) -> _Outcome:
        """Bring one tier to what policy wants, until nothing is left to do for it that can be done now."""
        everything = range(len(self._hierarchy.tiers))
        acted = False
        async with self._serving[tier.index]:
            seen = await self._look(everything if fresh else ())
            while True:
                work = self._work(seen, tier, closing)
                if work.decisive and (stale := self._stale(seen, tier)):
                    seen = await self._look(stale)
                    work = self._work(seen, tier, closing)
                    if self._stale(seen, tier):
                        work = replace(work, decisive=())  # it cannot be listed: nothing is decided on an old view
                outcomes = await self._act(seen, tier, work)
                visible = all(self._observer.visible(index) for index in everything)
                if not outcomes and self._observer.visible(tier.index):
                    self._attempts.settle(tier)  # what failed is no longer wanted
                acted |= any(outcomes)
                done = all(outcomes) and visible
                self._idle[tier.index] = done and not any(outcomes)
                self._note(seen)
                async with self._looked:
                    self._looked.notify_all()
                if not any(outcomes):
                    return _Outcome(acted, done)
                seen = await self._look(())

    async def _act(self, seen: Observation, tier: OpenTier, work: _Work) -> list[bool]:
        """Whether each action that was tried has succeeded. What the view has grown too old for is not tried."""
        outcomes: list[bool] = []
        for action in work.decisive:
            if outcomes and self._stale(seen, tier):
                break  # something was done, so that there is another look, and the rest follows
            outcomes.append(await self._attempts.run(tier, action))
        return outcomes + [await self._attempts.run(tier, action) for action in work.copies]

    async def _look(self, fresh: Sequence[int]) -> Observation:
        """Errors: ``JobConflict`` where a newer generation has opened."""
        seen = await self._observer.look(fresh)
        newer = superseded(seen)
        if newer is not None:
            raise JobConflict(
                f"generation {newer} of this job has opened while generation {seen.generation} (this process) "
                "is still running; this one stops saving. Two jobs must not share a hierarchy: end one of "
                "them, or give it a name of its own"
            )
        return seen

    def _stale(self, seen: Observation, tier: OpenTier) -> list[int]:
        """The tiers whose view is too old to commit or delete on: this one's own, and the durable one's."""
        return [index for index in {tier.index, seen.durable.index} if self._observer.age_s(index) > FRESH_S]

    async def room_for_base(self, deadline_s: float) -> None:
        """Wait until another base may be captured: fewer than two of this rank still drain.

        Errors: ``DeadlineExceeded`` naming the tier that does not drain and its last error; ``JobConflict``.
        """

        async def has_room() -> bool:
            return self.status.undrained_bases < BASES_IN_VOLATILE_TIERS

        self._note(await self._look(range(len(self._hierarchy.tiers))))
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
        damaged = [(index, key) for index, key in self._observer.damaged if key.last > mark]
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

    def _work(self, seen: Observation, tier: OpenTier, closing: bool) -> _Work:
        """What policy asks to be done for the tier."""
        if not self._observer.visible(tier.index):
            return _Work()
        copies: list[_Action] = [
            partial(self._transfer, transfer)
            for transfer in self._placement.transfers(seen, closing=closing)
            if transfer.target_tier == tier.index
        ]
        copies += [partial(self._mark, tier, key) for key in to_mark(seen, tier.index)]
        decisive: list[_Action] = [partial(self._commit, tier, key) for key in to_commit(seen, tier.index)]
        if gone := self._retention.reclaimable(seen)[tier.index]:
            decisive.append(partial(self._delete, tier, gone))
        return _Work(tuple(copies), tuple(decisive))

    async def _transfer(self, transfer: Transfer) -> None:
        """Verify the sources, then put them as one object."""
        source = self._hierarchy.tiers[transfer.source_tier]
        target = self._hierarchy.tiers[transfer.target_tier]
        # A tier's own codec is one of differentials. What keeps its codec is copied as it is.
        codec = target.codec if transfer.target.stream is Stream.DIFFERENTIAL else ""
        found: list[Contents] = []
        content = memoryview(b"")
        for key in transfer.sources:
            try:
                content = await source.driver.get(str(key))
                shard = container.parse(content, key=str(key), tier=source.name)
                self._check_token(source, key, shard.metadata.token)
                await asyncio.to_thread(shard.verify)
                found.append(await asyncio.to_thread(_reencoded, shard, codec) if codec else as_stored(shard))
            except NotFound:
                self._observer.gone(source.index, [key])
                return
            except Corruption as error:
                # The copy cannot be repaired from itself. It is left for a recovery to report, and not read again.
                self._observer.damaged.add((source.index, key))
                log.error("%s; it is not copied on", error)
                return
        copied = transfer.sources == (transfer.target,) and not codec
        payload: Payload = [content] if copied else await asyncio.to_thread(merge, found, transfer.target)
        info = await target.driver.put(str(transfer.target), payload)
        self._observer.put(target.index, transfer.target, info.nbytes)
        self._count(copied_bytes=info.nbytes, copied_objects=1)

    async def _mark(self, tier: OpenTier, key: MarkerKey) -> None:
        shard = ShardKey.base(key.generation, key.version, key.rank)
        marker = await self._marker_of(tier, shard)
        info = await tier.driver.put(str(key), [seal(key, marker.to_object())])
        self._observer.put(tier.index, key, info.nbytes)

    async def _commit(self, tier: OpenTier, key: CommitKey) -> None:
        """Check each rank's marker against the shard it speaks of, then publish the record."""
        markers: list[Marker] = []
        for rank in range(self._world_size):
            marker = MarkerKey(key.generation, key.version, rank)
            try:
                said = Marker.from_object(await read_record(tier.driver, marker))
            except ValueError as error:
                raise Corruption(str(error), tier=tier.name, key=str(marker)) from error
            shard = ShardKey.base(key.generation, key.version, rank)
            found = await self._marker_of(tier, shard)
            if said != found:
                raise Corruption(f"the shard is {found}, its marker says {said}", tier=tier.name, key=str(shard))
            self._check_token(tier, shard, found.token)
            markers.append(said)
        record = CommitRecord(key.generation, key.version, markers[0].token, tuple(markers))
        # Nobody but the coordinator of this generation writes it: where puts know no conditions, it may be repeated.
        mode = PutMode.CREATE if tier.capabilities.conditional_put else PutMode.OVERWRITE
        content = seal(key, record.to_object())
        try:
            await tier.driver.put(str(key), [content], mode=mode)
        except AlreadyExists:
            log.debug("base %d of generation %d is committed already", key.version, key.generation)
        self._observer.put(tier.index, key, len(content))

    async def _marker_of(self, tier: OpenTier, shard: ShardKey) -> Marker:
        """Length and header digest of a shard as it lies in the tier; only its header is fetched."""
        name = str(shard)
        nbytes = (await tier.driver.stat(name)).nbytes
        beginning = await self._beginning(tier, name, min(nbytes, HEADER_GUESS_BYTES))
        header_nbytes = container.header_length(beginning, key=name, tier=tier.name)
        if header_nbytes > len(beginning):
            beginning = await self._beginning(tier, name, min(nbytes, header_nbytes))
        header = container.parse_header(beginning, nbytes, key=name, tier=tier.name)
        return Marker(nbytes, container.checksum_of(beginning[:header_nbytes]), header.metadata.token)

    def _check_token(self, tier: OpenTier, shard: ShardKey, token: str) -> None:
        """Errors: ``Corruption`` for a shard of another job's generation of this number."""
        if (reason := self._lineage.disowns(shard.generation, token)) is not None:
            raise Corruption(reason, tier=tier.name, key=str(shard))

    async def _beginning(self, tier: OpenTier, name: str, nbytes: int) -> memoryview:
        if tier.capabilities.ranged_get:
            return await tier.driver.get(name, range=ByteRange(0, nbytes))
        return await tier.driver.get(name)

    async def _delete(self, tier: OpenTier, gone: Sequence[Key]) -> None:
        records = [str(key) for key in gone if isinstance(key, CommitKey)]
        if records:
            await tier.driver.delete(records)
        await tier.driver.delete([str(key) for key in gone if not isinstance(key, CommitKey)])
        self._observer.gone(tier.index, gone)
        self._count(deleted_objects=len(gone))

    def _count(self, *, copied_bytes: int = 0, copied_objects: int = 0, deleted_objects: int = 0) -> None:
        self.status = replace(
            self.status,
            copied_bytes=self.status.copied_bytes + copied_bytes,
            copied_objects=self.status.copied_objects + copied_objects,
            deleted_objects=self.status.deleted_objects + deleted_objects,
        )

    def _note(self, seen: Observation) -> None:
        mark = watermark(seen)
        captured = own_bases(seen, seen.contents[0])
        durable = own_bases(seen, seen.contents[seen.durable.index])
        newest = durable[-1].first if durable else -1
        self.status = replace(
            self.status,
            watermark=mark.version if mark else None,
            undrained_bases=sum(base.first > newest for base in captured),
            idle=all(self._idle),
            errors=self._attempts.errors,
        )


def _reencoded(shard: container.Shard, codec: str) -> Contents:
    from tiercheck.streams.reencode import reencoded  # brings NumPy, which few movers need

    return reencoded(shard, codec)
