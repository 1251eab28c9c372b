"""The data mover: brings the tiers to what policy wants.

Level-triggered: observe what each tier holds, let policy say what should be where and what may go, copy,
delete, look again. No step depends on a notification having arrived, so a crash at any point is repaired by
looking again; notifications (:meth:`Mover.nudge`) only make it fast. Nothing is dropped to keep up: when a
capture would overrun what still drains, the capture waits (:meth:`Mover.room_for_base`).

Each tier is served by itself, and works with what is known of the others, so that neither an upload nor a listing
that takes minutes keeps a differential from the neighbour's memory. The coordinator commits in a lane of its own, so
that the check of all ranks' shards keeps no copy waiting. Within a tier each action is tried by itself, too: one that
fails is repeated with growing pauses (:mod:`tiercheck.replication.backoff`), and shows in :attr:`Mover.status` until
it succeeds or is wanted no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiercheck.errors import DeadlineExceeded, JobConflict, SaveError
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import Key, ShardKey
from tiercheck.policy.commit import COORDINATOR, lagging, superseded, to_commit, to_mark
from tiercheck.policy.damage import lost, outlived
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.observation import Contents, Copy, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import PacingPolicy, Unpaced
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention
from tiercheck.replication.actions import COMMITTING, COPYING_BASES, DELETING, MARKING, REPORTING, Actions, copying
from tiercheck.replication.backoff import RETRY, Action, ProcessEnds, TierBackoff
from tiercheck.replication.decisions import Decisions
from tiercheck.replication.fold_controller import FOLDING, FoldController
from tiercheck.replication.fold_executor import FoldExecutor
from tiercheck.replication.generation_record import GenerationRecord
from tiercheck.replication.handle import MOVER, POLICIES, MoverHandle, MoverStatus
from tiercheck.replication.lanes import RECORDING, Lane
from tiercheck.replication.observer import Observer
from tiercheck.replication.pacing import Pacer
from tiercheck.replication.refusals import Refusals
from tiercheck.replication.room import Room, RoomMakingEnded
from tiercheck.replication.shortfalls import check_all_arrived
from tiercheck.replication.standing import standing
from tiercheck.runtime.backoff import Backoff

__all__ = ["Mover", "MoverHandle", "MoverStatus"]

log = logging.getLogger(__name__)

LOOK_AGAIN = Backoff(2.0, 8.0)
"""The pauses between looks at a tier for which nothing is left to do, and of which nobody says that it has changed."""
LOOK_S_MAX = 5.0
"""Whoever waits for nothing waits for a look at the node's memory all the same."""
NAMED_MAX = 3
"""Of the objects that a wait ended for, so many are named."""


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
        pacing: PacingPolicy | None = None,
        mark: int | None = None,
        folds: FoldExecutor | None = None,
    ) -> None:
        """``folds``: makes bases of what lies in the first tier; ``None``: all are captured."""
        self.status = MoverStatus()
        self.conflict: JobConflict | None = None
        self._stopped: SaveError | None = None
        self._hierarchy = hierarchy
        self._placement = placement
        self._retention = retention
        self._refusals = Refusals()
        self._attempts = TierBackoff()
        self._observer = Observer(
            hierarchy, self._attempts, rank=rank, world_size=world_size, generation=generation, lineage=lineage
        )
        self._observer.mark = mark
        self._pacer = Pacer(pacing or Unpaced(), self._refusals, placement, self._observer.seen)
        self._actions = Actions(
            hierarchy,
            self._observer,
            self._attempts,
            world_size=world_size,
            lineage=lineage,
            fence=self._check_generation,
            pacer=self._pacer,
        )
        first = hierarchy.first
        self._folding = None if folds is None else FoldController(folds, first, self._observer, placement)
        commits = [rank == COORDINATOR and tier.role.shared for tier in hierarchy.tiers]
        self._lanes = [Lane.of(tier, commits=each) for tier, each in zip(hierarchy.tiers, commits, strict=True)]
        """By tier."""
        self._making_room = list(self._lanes[0])
        if self._folding is not None:
            self._lanes[0].append(Lane(first, (FOLDING,)))
        self._idle = {lane: False for lanes in self._lanes for lane in lanes}
        self._decisions = Decisions(placement, retention)
        self._noted: tuple[Observation, set[Copy]] | None = None
        """What the status speaks of, besides counts and errors."""
        self._nudged_at: float | None = None
        self._at_rest: dict[Lane, object] = {}
        """What was known when nothing was left to do: while that is all that is known, nothing is."""
        self._looked = asyncio.Condition()
        self._room = Room()
        self._life: asyncio.TaskGroup | None = None
        """All that :meth:`run` does, while it does."""
        self._record = GenerationRecord(lineage, generation, self._observer, first)

    @property
    def seen(self) -> list[tuple[Role, Contents | None]]:
        """Each tier, and what it holds as far as is known now; ``None`` for one that was never listed. No tier is
        asked."""
        seen, listed = self._observer.seen(), self._observer.listed
        return [(role, seen.contents[role.index] if listed(role.index) else None) for role in seen.roles]

    def nudge(self, *, hurry_s: float = 0.0) -> None:
        """As of :class:`MoverHandle`."""
        self._pacer.hurry(hurry_s)
        self._attempts.hurry(hurry_s)
        self._nudge(self._idle)

    async def run(self) -> None:
        """Look and act until cancelled, or until a newer generation opens (:attr:`conflict`).

        Errors: ``SaveError`` if it fails for another reason, which is a fault of TierCheck: no driver's error and no
        object's ends it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._life = group
                for tier in self._hierarchy.tiers:
                    group.create_task(self._observer.keep_listing(tier, self.nudge))
                for lane in self._idle:
                    group.create_task(self._keep_serving(lane))
                if self._folding is not None and self._folding.preparing:
                    group.create_task(self._prepare_folding(self._folding))
        except* JobConflict as conflicts:
            self.conflict = next(each for each in conflicts.exceptions if isinstance(each, JobConflict))
            log.warning("%s", self.conflict)  # an agent may have taken up what a node that has come back has left
        except* ProcessEnds as ends:
            self._stopped = next(each for each in ends.exceptions if isinstance(each, ProcessEnds))
            if lacking := "; ".join(filter(None, map(self._lacking, self._hierarchy.tiers))):
                log.warning(
                    "the process ends before everything that was captured is where it belongs: call "
                    "checkpointer.close() at the end of training, which waits for that (%s)",
                    lacking,
                )
        except* Exception as errors:
            error = errors.exceptions[0]
            log.error("the mover has stopped", exc_info=error)
            self._stopped = SaveError(f"a fault of TierCheck has ended the mover: {type(error).__name__}: {error}")
            self._note()
        finally:
            self._life = None
        if self._stopped is not None:
            raise self._stopped

    async def cycle(self, *, closing: bool = False) -> bool:
        """Observe, decide, act, until nothing is left to do that can be done now. True if all was done.

        Errors: ``JobConflict`` once a newer generation has opened; nothing is written or deleted after that.
        """
        return await self._cycle(self._lanes, closing=closing)

    async def _cycle(self, lanes_by_tier: Sequence[Sequence[Lane]], *, closing: bool) -> bool:
        """As :meth:`cycle`, in these lanes."""
        asked_at = asyncio.get_running_loop().time()
        tiers = self._hierarchy.tiers
        async with self._pacer.hurrying():
            while True:
                listed = all(self._observer.attempted_since(tier.index, asked_at) for tier in tiers)
                serving = (self._serve(*lanes, closing=closing, since=asked_at) for lanes in lanes_by_tier)
                outcomes = await asyncio.gather(*serving, return_exceptions=True)
                served: list[_Outcome] = []
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    served.append(outcome)
                # What one tier was given, or what was found in it, may make work for another.
                if listed and not any(outcome.acted for outcome in served):
                    return all(outcome.done for outcome in served)

    async def _prepare_folding(self, controller: FoldController) -> None:
        """Only once training steps: what never trains needs no process that folds."""
        async with self._looked:
            await self._looked.wait_for(lambda: controller.begun(self._observer.seen()))
        await controller.prepare(self._observer.seen())
        self._at_rest.clear()  # what was seen before may be folded now
        self._note()
        self.nudge()

    async def make_room(self) -> bool:
        """As of :class:`MoverHandle`."""
        try:
            return await self._room.make(lambda: self._serve(*self._making_room, closing=False), self._start_cycle)
        except RoomMakingEnded:
            raise self.conflict or self._stopped or SaveError("the mover ended while it made room") from None

    def _start_cycle(self) -> asyncio.Task[bool]:
        return (self._life or asyncio).create_task(self.cycle())

    def _nudge(self, lanes: Iterable[Lane]) -> None:
        self._nudged_at = asyncio.get_running_loop().time()
        for lane in lanes:
            lane.nudged.set()

    async def _keep_serving(self, lane: Lane) -> None:
        in_vain, since = 0, None
        while True:
            outcome = await self._serve(lane, closing=False, nearby_since=since)
            if outcome.acted:
                self._nudge(self._idle.keys() - {lane})
            in_vain += 1
            try:
                async with asyncio.timeout(LOOK_AGAIN.pause_s(in_vain) if outcome.done else RETRY.first_s):
                    await lane.nudged.wait()
                in_vain, since = 0, self._nudged_at
            except TimeoutError:
                since = None
            lane.nudged.clear()

    async def _serve(
        self, *lanes: Lane, closing: bool, since: float | None = None, nearby_since: float | None = None
    ) -> _Outcome:
        """Do what policy wants of lanes of one tier, until nothing is left to do in them that can be done now.

        ``since``: the tier is listed first, if its last listing began before that. ``nearby_since``: the same for those
        inside the node, which are listed in any case without it.
        """
        tier, kinds = lanes[0].tier, [kind for lane in lanes for kind in lane.kinds]
        if since is not None:
            await self._observer.refresh(tier, since)
        acted = False
        async with AsyncExitStack() as stack:
            for lane in lanes:
                await stack.enter_async_context(lane.serving)
            while True:
                await self._observer.refresh_nearby(nearby_since)
                nearby_since = None
                folding = None if self._folding is None else self._folding.state
                state = self._observer.state, self._record.state, closing, folding
                if all(self._at_rest.get(lane) == state for lane in lanes):
                    self._seen()
                    if (slow := self._observer.slow_views_s) or self.status.slow_views_s:
                        self.status = replace(self.status, slow_views_s=slow)
                    return _Outcome(acted, done=True)
                actions = [each for each in self._wanted(self._seen(), tier, closing) if each.kind in kinds]
                if self._observer.visible(tier.index):
                    self._attempts.keep(tier, kinds, actions)
                outcomes: list[bool] = []
                for action in self._attempts.ordered(tier, actions):
                    outcomes.append(await self._try(tier, action))
                    if outcomes[-1] and action.kind == COPYING_BASES:
                        break  # its marker, its commit and the room that they make come before the next copy
                acted |= any(outcomes)
                done = all(outcomes) and all(self._observer.visible(each.index) for each in self._hierarchy.tiers)
                self._idle |= dict.fromkeys(lanes, done and not outcomes)
                self._at_rest |= dict.fromkeys(lanes, state if done and not outcomes else None)
                self._note()
                async with self._looked:
                    self._looked.notify_all()
                if not any(outcomes):
                    return _Outcome(acted, done)
                for other in set(self._lanes[tier.index]).difference(lanes):
                    other.nudged.set()

    async def _try(self, tier: OpenTier, action: Action) -> bool:
        succeeded = await self._attempts.run(tier, action)
        if succeeded and action.kind == DELETING and tier is self._hierarchy.first:
            self._room.freed()
        # What the whole of a view is needed for is noted after each look.
        self.status = replace(
            self.status,
            copied_bytes=self._actions.copied_bytes,
            copied_objects=self._actions.copied_objects,
            deleted_objects=self._actions.deleted_objects,
            errors=self._errors,
        )
        return succeeded

    def _wanted(self, seen: Observation, tier: OpenTier, closing: bool) -> list[Action]:
        """What policy asks to be done for the tier. Of a tier that cannot be listed nobody knows."""
        visible, sure, actions = self._observer.visible, self._observer.sure, self._actions
        if not visible(tier.index):
            return []
        if self._record.lacks(seen, tier):
            return [Action(RECORDING, str(self._record.key), partial(self._record.put, tier))]
        reports = self._retention.reports(seen, tier.index)
        return [
            *(self._folds(seen) if tier.index == 0 else ()),
            *(Action(REPORTING, str(key), partial(actions.report, tier, key)) for key in reports),
            *(Action(COMMITTING, str(key), partial(actions.commit, tier, key)) for key in to_commit(seen, tier.index)),
            *(Action(MARKING, str(shard), partial(actions.mark, tier, shard)) for shard in to_mark(seen, tier.index)),
            # Room is made before anything more is brought.
            *(actions.deletions(tier, self._reclaimable(seen, tier)) if sure(tier.index) else ()),
            *(
                Action(copying(transfer.target), str(transfer.target), partial(actions.transfer, transfer))
                for transfer in self._decisions.transfers(seen, closing=closing)
                if transfer.target_tier == tier.index and visible(transfer.source_tier)
            ),
        ]

    def _folds(self, seen: Observation) -> list[Action]:
        if self._folding is None or (fold := self._folding.next(seen)) is None or not self._has_room(seen):
            return []
        target = ShardKey.base(fold.base.generation, fold.version, fold.base.rank)
        return [Action(FOLDING, str(target), partial(self._folding.fold, fold))]

    def _has_room(self, seen: Observation) -> bool:
        """Whether the first tier may take one more base."""
        if self._placement.undrained(seen) >= BASES_IN_VOLATILE_TIERS:
            return False
        return self._retention.has_room(seen, self._decisions.reclaimable(seen)[0])

    def _reclaimable(self, seen: Observation, tier: OpenTier) -> list[Key]:
        decided = self._decisions.reclaimable(seen)
        allowed, refused = checked_deletions(seen, decided, repr(self._retention.policy))
        self._refusals.note("deletions", refused)
        damaged = outlived(seen, self._retention, self._observer.damaged_there)
        return [*allowed[tier.index], *damaged.get(tier.index, ())]

    def _seen(self) -> Observation:
        """What is known now. Errors: ``JobConflict`` if a newer generation has opened."""
        seen = self._observer.seen()
        newer = superseded(seen)
        if newer is not None:
            raise JobConflict(
                f"generation {newer} of this job has opened: generation {seen.generation} saves nothing more. If it "
                "still trains, two jobs share a hierarchy: end one of them, or give it a name of its own"
            )
        return seen

    async def _check_generation(self, tier: OpenTier) -> None:
        """Right before something is committed or deleted. Errors: ``JobConflict``; ``TierError``."""
        await self._observer.fence(tier)
        self._seen()

    async def agree(self, mark: int) -> None:
        """As of :class:`MoverHandle`."""
        if mark != self._observer.mark:
            self._observer.under_pressure = False
        self._observer.mark = mark
        await self._observer.refresh_nearby()
        self._seen()
        self._note()
        self.nudge()

    async def room_for_base(self, deadline_s: float, due: Sequence[int] = (), *, patiently: bool = False) -> None:
        """Errors: ``DeadlineExceeded`` naming the tier that does not drain and its last error; ``JobConflict``."""
        asked_at = asyncio.get_running_loop().time()
        durable = self._hierarchy.tiers[self._observer.seen().durable.index]

        def has_room() -> bool:
            self._seen()
            self._note()
            awaited = False
            if patiently and self._folding is not None:
                early = asyncio.get_running_loop().time() < asked_at + deadline_s / 2
                awaited = bool(self.status.unfolded_bases) or (early and self._folding.preparing)
            return self.status.has_room and not awaited

        async def room() -> bool:
            await self._observer.refresh_nearby()
            if deadline_s and not has_room():
                await self._observer.refresh(durable, asked_at)
            if not (has_room() or due or self.status.undrained_bases) and self._observer.mark is not None:
                self._observer.under_pressure = True  # the ranks agree on a newer mark when a base is due
            return has_room()

        def what() -> str:
            if self._folding is not None and self.status.has_room and (fold := self._folding.awaited(self.status)):
                return fold
            if self.status.undrained_bases < BASES_IN_VOLATILE_TIERS:
                return f"the first tier holds as many bases as it may: {lagging(self._observer.seen())}"
            return f"{self.status.undrained_bases} bases have not reached the durable tier"

        folding = [] if self._folding is None else [self._hierarchy.first]
        await self._until(room, deadline_s, what, [*folding, durable])
        self.leave(due)

    def leave(self, due: Sequence[int]) -> None:
        """As of :class:`MoverHandle`."""
        if self._folding is not None and due:
            self._folding.take(due, self._observer.seen())
            self._note()
            self.nudge()

    async def drain(self, deadline_s: float, *, closing: bool) -> None:
        """Bring everything this rank has captured to where policy wants it.

        ``closing`` sends an incomplete batch as it is. A base that is folded for the first tier alone is not waited
        for: it makes a recovery shorter, and adds no version. Errors: as :meth:`room_for_base` and of
        :func:`check_all_arrived`.
        """
        lanes = [[lane for lane in each if FOLDING not in lane.kinds] for each in self._lanes]

        async def done() -> bool:
            return await self._cycle(lanes, closing=closing) and not self._folds_one_that_is_due()

        await self._until(
            done, deadline_s, lambda: "not everything captured has reached its tiers", self._hierarchy.tiers
        )
        check_all_arrived(self._observer.seen(), self._observer.damaged, self._placement, closing=closing)

    def _folds_one_that_is_due(self) -> bool:
        """Whether it can be made now, in its lane."""
        seen, folding = self._seen(), self._folding
        if folding is None or (fold := folding.next(seen)) is None or not self._has_room(seen):
            return False
        return fold.version in folding.waiting(seen)

    async def _until(
        self,
        condition: Callable[[], Awaitable[bool]],
        deadline_s: float,
        what: Callable[[], str],
        tiers: Sequence[OpenTier],
    ) -> None:
        """Wait for the condition; if the deadline is 0, look once. Errors: ``DeadlineExceeded`` saying ``what``, and
        what these tiers lack."""
        within_s = deadline_s or LOOK_S_MAX
        try:
            async with self._pacer.hurrying(), self._attempts.waited_for(deadline_s), asyncio.timeout(within_s):
                self.nudge()
                while not await condition():
                    if not deadline_s:
                        raise TimeoutError
                    if self.conflict is not None:
                        raise self.conflict
                    if self._stopped is not None:
                        raise self._stopped
                    async with self._looked:
                        try:
                            async with asyncio.timeout(RETRY.first_s):
                                await self._looked.wait()
                        except TimeoutError:
                            self.nudge()  # not after each look: it would have the next one, and so on without a pause
        except TimeoutError:
            self._note()
            lacking = "; ".join(filter(None, map(self._lacking, tiers)))
            raise DeadlineExceeded(f"{what()} within {deadline_s:g} s" + (f" ({lacking})" if lacking else "")) from None

    def _lacking(self, tier: OpenTier) -> str:
        """What is left to do for a tier, and its trouble; empty if there is neither."""
        error = self.status.errors.get(tier.name)
        left = [f"{each.kind} {each.key}".strip() for each in self._wanted(self._observer.seen(), tier, closing=True)]
        if not self._observer.visible(tier.index):
            text = "what it holds is not known"
        elif left:
            more = ", ..." if len(left) > NAMED_MAX else ""
            text = f"{len(left)} actions are left: {', '.join(left[:NAMED_MAX])}{more}"
        elif error is None:
            return ""
        else:
            return f"{tier}: {error}"
        return f"{tier}: {text}; its trouble: {error}" if error else f"{tier}: {text}"

    @property
    def _errors(self) -> dict[str, str]:
        refused = {POLICIES: text} if (text := self._refusals.text) else {}
        return {**self._attempts.errors, **refused, **({MOVER: str(self._stopped)} if self._stopped else {})}

    def _note(self) -> None:
        """Make the status what is known now. It is read by other threads, so it is a value."""
        seen = self._observer.seen()
        noted = seen, set(self._observer.damaged)
        known: dict[str, Any] = {}
        if self._noted is None or self._noted[0] is not seen or self._noted[1] != noted[1]:
            self._noted = noted
            self._refusals.note("policies", self._retention.refusals(seen))
            without_copy = lost(seen, self._observer.damaged, self._placement)
            self._observer.remember(without_copy)
            known = standing(seen, self._placement, without_copy, has_room=self._has_room(seen))
        self.status = replace(
            self.status,
            **known,
            idle=all(self._idle.values()),
            **({} if self._folding is None else self._folding.noted(seen)),
            copied_bytes=self._actions.copied_bytes,
            copied_objects=self._actions.copied_objects,
            deleted_objects=self._actions.deleted_objects,
            errors=self._errors,
            slow_views_s=self._observer.slow_views_s,
            refused_decisions=self._refusals.count,
        )
