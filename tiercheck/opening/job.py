"""A job that is open: what one rank holds of it, how it ends, and how everything is given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tiercheck.agent.client.node_agent import NodeAgent
from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded, SaveError, TierCheckError, TierError
from tiercheck.folding.owner import FoldProcess
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import MetricKey
from tiercheck.recording.metrics import Metrics
from tiercheck.recording.recorder import Recorder
from tiercheck.recovery.ranks import Ranks, gather
from tiercheck.recovery.report import Recovery
from tiercheck.replication.mover import MoverHandle
from tiercheck.replication.objects.records import metric_record
from tiercheck.runtime.runtime import CLOSE_S, Lock, Scheduler

__all__ = ["MoverLife", "OpenedJob", "Resources"]

log = logging.getLogger(__name__)


class MoverLife:
    """The mover at work on the scheduler's loop. It is stopped before its tiers are closed, so that it meets no closed
    one."""

    def __init__(self, mover: MoverHandle, scheduler: Scheduler) -> None:
        self._task: asyncio.Task[None] | None = None
        self.ended: Future[None] = scheduler.start(self._run(mover))
        """Done when the mover has stopped."""

    async def _run(self, mover: MoverHandle) -> None:
        self._task = asyncio.current_task()
        await mover.run()

    async def stop(self) -> None:
        """Have it end, and wait for that. On the loop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


@dataclass
class Resources:
    """What this rank must give back. Each is noted here as soon as it is taken, so that an opening which fails half-way
    gives back what it has taken by then."""

    ranks: Ranks
    """Its group and its scheduler are given back, too."""
    agent: NodeAgent | None = None
    process_lock: Lock | None = None
    tiers: OpenHierarchy | None = None
    recorder: Recorder | None = None
    preparing: Future[None] | None = None
    """Makes memory ready, while there is any to make."""
    mover_life: MoverLife | None = None
    fold_process: FoldProcess | None = None
    on_end: list[Callable[[], None]] = field(default_factory=list)
    """Run before anything else is given back."""
    given_back: bool = False
    _copying: bool = field(default=False, init=False)
    """Whether something may still be copied into the first tier's memory."""

    async def give_back(self, error: BaseException | None = None) -> BaseException | None:
        """Flushes nothing: what was captured stays in the first tier. Idempotent.

        ``error``: why the job ends. Returns it, or the first error of ``on_end``; later ones are notes of it.
        """
        if self.given_back:
            return error
        self.given_back = True
        while self.on_end:
            try:
                self.on_end.pop(0)()
            except Exception as later:  # noqa: BLE001  returned, or a note of what is returned
                if error is None:
                    error = later
                else:
                    error.add_note(f"then, at the end: {type(later).__name__}: {later}")
        await self._let_go()
        return error

    async def _let_go(self) -> None:
        """One after the other, the last one taken first. Whatever becomes of one, an interrupt included, the others are
        given back."""
        if self.preparing is not None and not self.preparing.cancel() and (fault := self.preparing.exception()):
            log.error("memory could not be made ready", exc_info=fault)
        async with AsyncExitStack() as taken:
            taken.callback(self.ranks.group.close)
            if self.process_lock is not None:
                taken.callback(self.process_lock.release)
            end = partial(self.ranks.scheduler.close, deadline_s=min(self.ranks.deadline_s, CLOSE_S))
            taken.push_async_callback(self._give, "ending what still runs", end)
            if self.tiers is not None:
                taken.push_async_callback(self._close_tiers, self.tiers)
            if self.agent is not None:
                taken.push_async_callback(self._give, "leaving the agent", self.agent.end)
            if self.fold_process is not None:
                taken.push_async_callback(self._call, "ending the process that folds", self.fold_process.close)
            if self.mover_life is not None:
                taken.push_async_callback(self._call, "stopping the mover", self.mover_life.stop)
            if self.fold_process is not None:
                taken.push_async_callback(self._call, "folding no more", self.fold_process.will_end)
            if self.recorder is not None:
                taken.push_async_callback(self._end_copies, self.recorder)

    async def _end_copies(self, recorder: Recorder) -> None:
        self._copying = True
        self._copying = not await self._give("ending the copies to the first tier", recorder.close)

    async def _close_tiers(self, tiers: OpenHierarchy) -> None:
        if self._copying:
            log.warning("the tiers stay open until this process ends: something is still copied into their memory")
        else:
            await self._call("closing the tiers", partial(tiers.__aexit__, None, None, None))

    async def _call(self, what: str, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._give(what, lambda: self.ranks.call(act(), what))

    async def _give(self, what: str, act: Callable[[], Awaitable[None]]) -> bool:
        """Whether that succeeded."""
        try:
            await act()
        except TierCheckError as error:
            log.warning("%s: %s", what, error)
            return False
        return True


@dataclass(frozen=True)
class OpenedJob:
    """One rank's part of a job that is open: what :func:`tiercheck.opening.startup.open_job` returns."""

    config: CheckpointConfig
    ranks: Ranks
    tiers: OpenHierarchy
    generation: int
    recovery: Recovery | None
    """``None``: the tiers held nothing."""
    recorder: Recorder
    mover: MoverHandle
    mover_life: MoverLife
    agent: NodeAgent | None
    """``None``: the mover runs in this process."""
    resources: Resources
    metrics: Metrics

    def live(self) -> Recorder:
        """The recorder, if saving still makes sense. Errors: ``SaveError``; ``JobConflict``."""
        self._check_open()
        if self.mover.conflict is not None:
            raise self.mover.conflict
        if self.mover_life.ended.done():
            error = self.mover_life.ended.exception()
            raise SaveError(f"the mover has stopped: {error}" if error else "the mover has stopped") from error
        return self.recorder

    async def report(self, metrics: Mapping[str, float]) -> None:
        """Record what the loop has measured of the newest version. Errors: as of ``Checkpointer.report``."""
        self._check_open()
        found = self.metrics.of(self.recorder.trained, metrics)
        if self.ranks.rank == 0 and any(role.shared for role in self.tiers.roles):
            await self._put(found)

    async def _put(self, metrics: Sequence[MetricKey]) -> None:
        """Into the first tier, from where the mover takes them. Errors: ``SaveError`` (see ``on_save_error``)."""
        for key in metrics:
            what = f"reporting {key.name} of version {key.version}"
            try:
                await self.ranks.call(self.tiers.first.driver.put(str(key), [metric_record(key)]), what)
            except (TierError, DeadlineExceeded) as error:
                if self.config.on_save_error == "fail":
                    raise SaveError(f"{what}: {error}") from error
                log.error("%s: %s; training goes on", what, error)
        self.recorder.nudge()

    async def tier_bytes(self) -> dict[str, int]:
        """Bytes in use per tier. Errors: ``SaveError`` when the job has ended; ``TierError``."""
        self._check_open()
        return {
            tier.name: (await self.ranks.call(tier.driver.usage(), f"the usage of {tier.name}")).used_bytes
            for tier in self.tiers.tiers
        }

    async def flush(self) -> None:
        """Bring everything captured to where policy wants it. Errors: ``SaveError``; ``JobConflict``."""
        self._check_open()
        await self.recorder.flush()

    async def end(self, first: list[Callable[[], object]]) -> None:
        """Flush on all ranks, and let the coordinator commit what all of them have brought. Collective. It takes the
        actions of ``first`` out of the list and runs them before. Nothing is given back yet.

        Errors: ``SaveError``; ``JobConflict``; ``RecoveryError`` if another rank failed; ``GroupError``.
        """

        async def finish() -> bool:
            try:
                while first:
                    first.pop(0)()
            finally:  # what came before is worth as much, if the last version is not saved
                drained = await self._at_end(self.flush)
            return drained

        # A rank that fails tells the others, which may have to wait as long as it tried.
        deadline_s, failure = 3 * self.config.deadline_s, self.recorder.failure
        by_rank = await gather(self.ranks.group, "the end of the job", finish, deadline_s=deadline_s, after=failure)
        drained = await self._at_end(self.flush)  # the coordinator: the last commit
        if drained and all(by_rank):
            drained = await self._at_end(self.recorder.commit)
        if drained and self.agent is not None:
            await self.agent.withdraw()

    async def _at_end(self, save: Callable[[], Awaitable[None]]) -> bool:
        """Whether it succeeded. A job that went on after failed saves does not fail at its end for one more."""
        try:
            await save()
        except SaveError as error:
            if self.config.on_save_error == "fail":
                raise
            goes_on = "" if self.agent is None else ", and the node's agent goes on with it"
            log.error("%s; what was captured stays in the first tier%s", error, goes_on)
            return False
        return True

    def _check_open(self) -> None:
        if self.resources.given_back:
            raise SaveError("the checkpointer is closed")
