"""One replication job taken up: its tiers open, its mover running, whatever becomes of the trainer."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from tiercheck.agent.client.trainer_lock import Trainer
from tiercheck.agent.jobs.job_store import as_agent_opens
from tiercheck.agent.jobs.opening import FirstTierGone, for_the_agent, is_leaving, lineage_of
from tiercheck.agent.jobs.states import FINAL, Event, State, life
from tiercheck.agent.status.throughput import Throughput
from tiercheck.errors import DeadlineExceeded, JobConflict, NotFound, TierCheckError, Transient
from tiercheck.folding.messages import FoldTarget
from tiercheck.folding.owner import FoldProcess
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.observation import Contents, Role
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.replication.handle import AGENT, MoverStatus
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.mover import Mover
from tiercheck.runtime.backoff import Backoff
from tiercheck.runtime.waiting import settled
from tiercheck.tiers.wrappers.lazy_open import CallsUnderWay

__all__ = ["RankReplicator"]

log = logging.getLogger(__name__)

T = TypeVar("T")

TICK_S = 1.0
RETRY = Backoff(0.5, 30.0)
SILENT_S = 15.0
"""A trainer that has said nothing for so long is taken for dead, and what it left behind goes out as it is. One that
was only slow loses nothing by it: a batch arrives in two pieces."""
OPEN_S_MAX = 120.0
CLOSE_S_MAX = 10.0


class RankReplicator:
    """Moves one rank's objects until it is closed. All methods run on one event loop.

    ``rest_s``: a trainer silent for so long, with nothing left to move, puts it to rest. ``abandon_s``: one silent for
    so long does so whatever is left, as where a neighbour never comes back; the next agent goes on with that.
    """

    def __init__(
        self,
        job: ReplicationJob,
        *,
        folds_in: FoldProcess,
        rest_s: float,
        abandon_s: float = math.inf,
        trainer: Callable[[], Trainer | None] = lambda: None,
    ) -> None:
        """``folds_in``: the process that folds, which all ranks share. ``trainer``: who holds the rank now."""
        self.job = job
        self.conflict: JobConflict | None = None
        self.trouble: str | None = None
        """Why the tiers cannot be opened, until they are."""
        self.throughput = Throughput()
        self._folds_in = folds_in
        self._rest_s = rest_s
        self._abandon_s = abandon_s
        self._mark: int | None = None
        """What the ranks have agreed on, as far as this agent was told."""
        self._mover: Mover | None = None
        self._before = MoverStatus()
        """The last one of the mover before, with what all movers before it counted."""
        self._heard_at = _now()
        self._trainer = trainer
        self._trainer_seen: Trainer | None = Trainer("unknown", recovering=True)
        """Until it was looked at once, nothing is moved."""
        self._registered = False
        """The trainer that recovers has registered this: its pause is over."""
        self._calls = CallsUnderWay()
        self._brought_home_at: float | None = None
        """Since when what a silent trainer left has all gone out."""
        self._changed = asyncio.Event()
        self._active = False
        """The mover is running."""
        self._operations: set[asyncio.Future[Any]] = set()
        self._life = life()
        self._living: asyncio.Task[None] | None = None

    # What others see

    @property
    def state(self) -> State:
        """Of two things it is not told, and looks for: whether the trainer recovers, and whether it is gone."""
        state = self._life.state
        if state in FINAL:
            return state
        recovering = self._recovering
        if recovering is not (state is State.PAUSED):
            self._life.on(Event.RECOVERING if recovering else Event.RECOVERED)
        if self._life.state in (State.OPENING, State.MOVING) and self._finished and self.silent_s >= self._rest_s:
            self._life.on(Event.LEFT)
        return self._life.state

    @property
    def gone(self) -> bool:
        """The first tier was removed, and with it all there was to move."""
        return self._life.state is State.GONE

    @property
    def status(self) -> MoverStatus:
        """The mover's, with the trouble of opening it among its errors, and counts that go on from mover to mover."""
        now = self._before if self._mover is None else self._mover.status.after(self._before)
        errors = now.errors if self.trouble is None else {**now.errors, AGENT: self.trouble}
        idle = now.idle and self.state is not State.PAUSED and self.trouble is None
        return replace(now, idle=idle, errors=errors)

    @property
    def silent_s(self) -> float:
        """Seconds since its trainer was last heard of."""
        return _now() - self._heard_at

    @property
    def left(self) -> bool:
        """Whether its trainer is gone: what it has captured may be of a generation that nobody goes back to."""
        return not self.gone and self.silent_s > SILENT_S and self._seen_trainer() is None

    @property
    def needed(self) -> bool:
        """Whether ending the agent now would leave something undone, or a trainer without its mover."""
        state = self.state
        return state not in FINAL and (state is State.PAUSED or self.silent_s < self._rest_s or not self._finished)

    @property
    def needed_at(self) -> float:
        """When its trainer was last heard of, or something was left to move (loop time, seconds)."""
        state = self.state
        if state in FINAL or self._abandoned:
            return self._heard_at
        if state is State.PAUSED or self._brought_home_at is None:
            return _now()
        return max(self._heard_at, self._brought_home_at)

    @property
    def seen(self) -> Sequence[tuple[Role, Contents | None]]:
        """What its mover saw last in each tier: see :attr:`Mover.seen`. Nothing while the tiers are not open."""
        return [] if self._mover is None else self._mover.seen

    # What its trainer asks

    def heard(self) -> None:
        """The trainer lives."""
        self._heard_at = _now()
        self._brought_home_at = None
        if self._life.state is State.RESTING:
            self._on(Event.HEARD)

    def nudge(self, *, hurry_s: float = 0.0, due: Sequence[int] = ()) -> None:
        """``due``: bases that are left to the mover. If it is not there, it is told of them with the next ones."""
        if self._mover is not None:
            self._mover.leave(due)
            self._mover.nudge(hurry_s=hurry_s)

    async def pause(self, deadline_s: float) -> None:
        """Stop moving for as long as the rank's trainer recovers: on return nothing moves. What was being done is
        broken off, and nothing is left half done; what a store is doing just then is waited for.

        Errors: ``DeadlineExceeded`` naming the store.
        """
        self._registered = False
        if self.state is State.PAUSED:
            for operation in self._operations:
                operation.cancel()
        self._wake()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: self.state is not State.PAUSED or not (self._active or self._operations))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._where}: what was being moved could not be broken off within {deadline_s:g} s "
                f"({self._calls or 'nothing is asked of a tier any more'})"
            ) from None

    def resume(self) -> None:
        self._registered = True
        self._wake()

    async def make_room(self, deadline_s: float) -> bool:
        """Errors: as :meth:`Mover.make_room`, and ``DeadlineExceeded``."""
        what = "making room in the first tier"
        return await self._perform(lambda mover, left_s: _within(left_s, mover.make_room(), what), deadline_s, what)

    async def agree(self, deadline_s: float, mark: int) -> None:
        """Errors: as :meth:`Mover.agree`, and ``DeadlineExceeded`` if the tiers cannot be opened."""
        self._mark = mark
        await self._perform(lambda mover, left_s: mover.agree(mark), deadline_s, "telling what the ranks agree on")

    async def room_for_base(self, deadline_s: float, due: Sequence[int] = (), *, patiently: bool = False) -> None:
        """Errors: as :meth:`Mover.room_for_base`, and ``DeadlineExceeded`` if the tiers cannot be opened."""
        await self._perform(
            lambda mover, left_s: mover.room_for_base(left_s, due, patiently=patiently),
            deadline_s,
            "making room for a base",
        )

    async def drain(self, deadline_s: float, *, closing: bool) -> None:
        """Errors: as :meth:`Mover.drain`, and ``DeadlineExceeded`` if the tiers cannot be opened."""
        await self._perform(
            lambda mover, left_s: mover.drain(left_s, closing=closing), deadline_s, "bringing everything to its tiers"
        )

    async def cycle(self, deadline_s: float, *, closing: bool) -> bool:
        """Errors: as :meth:`Mover.cycle`, and ``DeadlineExceeded``."""
        return await self._perform(
            lambda mover, left_s: _within(left_s, mover.cycle(closing=closing), "a cycle of the mover"),
            deadline_s,
            "a cycle of the mover",
        )

    # Its life

    def start(self) -> None:
        if self._living is None:
            self._living = asyncio.create_task(self._live(), name=f"rank {self.job.rank}")

    async def close(self) -> None:
        """Stop moving and close the tiers. Idempotent. What was captured stays where it is.

        A store that does not answer is not waited for: what was asked of it may still be done, and nothing more.
        """
        for operation in self._operations:
            operation.cancel()
        living, self._living = self._living, None
        if living is not None:
            living.cancel()
            await asyncio.wait([living], timeout=CLOSE_S_MAX)
            if not living.done():
                log.warning(
                    "%s: a tier, or what folds, has not answered for %g s; it is left open", self._where, CLOSE_S_MAX
                )

    async def _live(self) -> None:
        failures = 0
        while self.state not in FINAL:
            try:
                await self._until(lambda: self.state is State.OPENING)
                await self._open_and_move()
                failures = 0
                continue
            except FirstTierGone as error:
                log.info("%s: %s; nothing is left to move", self._where, error)
                self._on(Event.REMOVED)
                return
            except TierCheckError as error:
                self._note_trouble(str(error))
            except Exception as error:
                # A driver's bug is this rank's trouble alone: the other ranks' movers go on.
                log.exception("%s cannot be moved", self._where)
                self._note_trouble(f"{type(error).__name__}: {error}")
            failures += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY.pause_s(failures)):
                    await self._until(lambda: False)

    async def _open_and_move(self) -> None:
        job = self.job
        hierarchy = for_the_agent(job.hierarchy, self._calls).open()
        await self._opened(hierarchy)
        try:
            reading = lineage_of(hierarchy, job.generation)
            lineage = await _within(OPEN_S_MAX, reading, f"reading the lineage of {self._where}")
            self._begin(hierarchy, lineage)
            await self._keep_moving()
        finally:
            self._end_mover()
            await _closed(hierarchy)

    async def _opened(self, hierarchy: OpenHierarchy) -> None:
        # Not broken off half way, where a driver would stay open, unless its store does not answer at all.
        opening = settled(hierarchy.__aenter__(), undo=_closed, within_s=CLOSE_S_MAX)
        try:
            await _within(OPEN_S_MAX, opening, f"opening the tiers of {self._where}")
        except NotFound as error:  # of the first tier: the others open whether they are there or not
            raise FirstTierGone(error.message, tier=error.tier) from None

    def _begin(self, hierarchy: OpenHierarchy, lineage: Lineage) -> None:
        job, policies = self.job, self.job.policies()
        self._mover = Mover(
            hierarchy,
            rank=job.rank,
            world_size=job.world_size,
            generation=job.generation,
            placement=policies.placement,
            retention=policies.retention,
            pacing=policies.pacing,
            lineage=lineage,
            mark=self._mark,
            folds=None if job.folds == "no" else self._folds_in.at(self._fold_target),
        )
        if self.trouble is not None:
            log.info("%s: its tiers are open", self._where)
        self.trouble = None
        self._wake()

    def _end_mover(self) -> None:
        for operation in self._operations:
            operation.cancel()
        if self._mover is not None:
            self._before = self._mover.status.after(self._before)
        self._mover = None
        if self._life.state is State.MOVING:
            self._on(Event.CLOSED)

    async def _keep_moving(self) -> None:
        """Let the mover run, except while paused, until it is superseded or has come to rest."""
        mover = self._mover
        assert mover is not None
        while mover.conflict is None and (state := self.state) is not State.RESTING:
            if state is State.PAUSED:
                await self._until(lambda: self.state is not State.PAUSED)
                continue
            if state is State.OPENING:
                self._on(Event.OPENED)
            running = asyncio.ensure_future(mover.run())
            running.add_done_callback(lambda _: self._wake())
            self._active = True
            try:
                await self._attend(running)
            finally:
                running.cancel()
                await asyncio.wait([running])
                self._active = False
                self._wake()
            if not running.cancelled():
                running.result()
        if mover.conflict is not None:
            self.conflict = mover.conflict
            self._on(Event.CONFLICT)

    async def _attend(self, running: asyncio.Future[None]) -> None:
        """Look after a running mover until it ends, pauses or rests."""
        while not running.done() and self.state is State.MOVING:
            if is_leaving(self.job.namespace) and self._seen_trainer() is None:
                raise FirstTierGone("it is being removed", tier=self.job.namespace)
            self.throughput.note(_now(), self.status.copied_bytes)
            if self.silent_s > min(SILENT_S, self._rest_s) and self._brought_home_at is None:
                await self._bring_home()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._until(lambda: running.done() or self.state is not State.MOVING)

    async def _bring_home(self) -> None:
        """The trainer is gone: no further version will join an incomplete batch."""
        heard_at = self._heard_at
        try:
            done = await self.cycle(OPEN_S_MAX, closing=True)
        except JobConflict:
            return  # the running mover finds it too
        except TierCheckError as error:
            log.debug("%s: %s", self._where, error)
            return
        if done and self._heard_at == heard_at:
            self._brought_home_at = _now()

    async def _perform(self, work: Callable[[Mover, float], Awaitable[T]], deadline_s: float, what: str) -> T:
        """``work``, which is given the open mover and the seconds that are left."""
        until = _now() + deadline_s
        if self.state is State.RESTING:
            self.heard()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: self.state in FINAL or self._life.state is State.MOVING)
        except TimeoutError:
            reason = self.trouble or f"its replication job is {self.state}"
            raise DeadlineExceeded(f"{what} within {deadline_s:g} s: {self._where}: {reason}") from None
        if self.conflict is not None:
            raise self.conflict
        if self._mover is None:
            raise NotFound(f"{what}: the memory of {self._where} was removed")
        operation: asyncio.Future[T] = asyncio.ensure_future(work(self._mover, max(0.0, until - _now())))
        self._operations.add(operation)
        try:
            await asyncio.wait([operation])
            if operation.cancelled():
                raise Transient(f"{what} was broken off: {self._where} is {self.state}")
            return operation.result()
        finally:
            operation.cancel()
            self._operations.discard(operation)
            self._wake()

    # Waiting

    @property
    def _recovering(self) -> bool:
        if self._registered:
            return False
        trainer = self._seen_trainer()
        return trainer is not None and trainer.recovering

    def _seen_trainer(self) -> Trainer | None:
        """As it was, if the look fails: the system may have no descriptor to give just now."""
        with suppress(OSError):
            self._trainer_seen = self._trainer()
        return self._trainer_seen

    @property
    def _finished(self) -> bool:
        """Nothing is left to move and nobody waits for an answer, or whoever might ask was silent for too long."""
        return self._abandoned or (self._brought_home_at is not None and not self._operations)

    @property
    def _abandoned(self) -> bool:
        return self.silent_s >= self._abandon_s

    @property
    def _fold_target(self) -> FoldTarget:
        first = self.job.tiers[0]
        return FoldTarget(as_agent_opens(first.url), first.name, self.job.folds == "certified")

    @property
    def _where(self) -> str:
        return f"rank {self.job.rank} of {self.job.namespace}"

    def _note_trouble(self, text: str) -> None:
        level = logging.WARNING if text != self.trouble else logging.DEBUG
        log.log(level, "%s: %s; trying again, every %g s at most", self._where, text, RETRY.max_s)
        self.trouble = text
        self._wake()

    def _on(self, event: Event) -> None:
        self._life.on(event)
        self._wake()

    def _wake(self) -> None:
        """Whoever waits looks again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``; it is looked at again after each change, and once a tick, since time passes."""
        while not condition():
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _closed(hierarchy: OpenHierarchy) -> None:
    """To the end even if the caller is cancelled meanwhile, but not for ever."""
    await settled(hierarchy.__aexit__(None, None, None), within_s=CLOSE_S_MAX)


async def _within(deadline_s: float, work: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"{what} did not finish within {deadline_s:g} s") from None
