"""Training waits before the first tier holds more differentials than there is room for.

They go when a base after them is there, and the other tiers have what they are to hold. If those lag, memory would
grow: instead training waits, with a deadline, and the error says what for.

Until what folds is ready, nothing makes those bases. Then training waits after the usual number of differentials until
the first base is folded (``bases="fold"``; if that takes half of the deadline, it waits no longer), or captures the
bases itself (``"auto"``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded, SaveError, TierError
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey, Stream, parse, rank_prefix
from tiercheck.policy.first_tier import Holding
from tiercheck.recording.modes import IN_FLIGHT, BaseEvent, Modes
from tiercheck.recording.waits import Wait, asking
from tiercheck.replication.mover import MoverHandle, MoverStatus
from tiercheck.runtime.runtime import Scheduler

__all__ = ["Backlog"]

log = logging.getLogger(__name__)

FOLD_S_MAX = 10.0
"""So long training waits for a fold if the base may be captured instead."""
NOT_READY = (
    "what folds is not ready after %.0f s: bases are captured until it is. The processors are busy, it seems: give it "
    'one (TIERCHECK_FOLD_CPUS), let it give way less (TIERCHECK_FOLD_NICE), or say bases="auto", which does not wait'
)
DRAIN_S_MAX = 10.0
"""So long it waits then, too, until the bases in the first tier have reached the durable one. There a newer base takes
their place, and if no other rank has it, it is committed by nobody."""


class Backlog:
    """How many differentials of one rank may still come."""

    def __init__(
        self,
        tier: OpenTier,
        mover: MoverHandle,
        scheduler: Scheduler,
        wait: Callable[[], Wait],
        *,
        modes: Modes,
        rank: int,
        holding: Holding | None,
        config: CheckpointConfig,
        folds: bool,
    ) -> None:
        """``holding``: how many may be in the tier, the one that is being captured among them; ``None``: any number.
        ``folds``: the mover makes the bases that let them go."""
        self._tier = tier
        self._mover = mover
        self._scheduler = scheduler
        self._wait = wait
        self._modes = modes
        self._rank = rank
        self._holding = holding
        self._records_max = None if holding is None else holding.records_max
        self._deadline_s = config.deadline_s
        self._waits_for_folds = config.bases == "fold"
        self._folds = folds
        self._late_while = range(0)
        """While the bases folded so far are so many, one of them was late, and none of a later fold is there: training
        captures those that are due, and waits for no others."""
        self._left = 0
        """So many may come before the tier is looked at again."""

    async def admit(self) -> None:
        """Wait until there is room for one more. If the mover was to fold, and does not, or not soon enough, none can
        go before a base is captured: this version gets one. Errors: ``SaveError``."""
        if self._records_max is None:
            return
        if self._left <= 0:
            held, most = await self._look(self._records_max)
            if held >= most:
                held, most = await self._room(self._records_max)
            # While training waits for the first fold, there may be fewer all of a sudden.
            varies = self._waits_for_folds and not self._is_known and most <= self._records_max
            self._left = 1 if varies else max(1, most - held)
        self._left -= 1

    async def stands_in(self) -> bool:
        """Whether training captures a base that is folded later on, as what folds is not ready, and the base lets as
        many differentials go as a folded one."""
        if not self._folds or self._waits_for_folds or self._holding is None or self._modes.base.state in IN_FLIGHT:
            return False
        status = self._mover.status
        if not (status.prepares_folding and status.has_room):
            return False
        return await self._unfolded() >= self._holding.records_stood_in

    @property
    def folds_late(self) -> bool:
        """Whether folds take longer than memory takes to fill: a base that is due is captured, and not left to them."""
        return self._mover.status.folded_bases in self._late_while

    @property
    def _begins_to_fold(self) -> bool:
        """Whether the first fold is to come: until then it may take long."""
        status = self._mover.status
        return self._folds and (status.prepares_folding or (status.folds and not status.folded_bases))

    @property
    def _is_known(self) -> bool:
        """Whether the mover has said if it folds, and will go on like that."""
        status = self._mover.status
        return not self._folds or (not self._begins_to_fold and (status.folds or bool(status.not_folded)))

    async def _look(self, records_max: int) -> tuple[int, int]:
        """How many are there of those that count, and how many there may be."""
        first = self._waits_for_folds and self._begins_to_fold and self._mover.status.has_room  # else it is held back
        if first and self._holding is not None:
            unfolded = await self._unfolded()
            if unfolded >= self._holding.records_unfolded:
                return unfolded, self._holding.records_unfolded
        return await self._held(records_max), records_max

    async def _room(self, records_max: int) -> tuple[int, int]:
        """As :meth:`_look`, when there is room for one more."""
        with asking(self._modes.record_room, self._deadline_s) as deadline_s, self._wait() as wait:
            held, most = await self._look(records_max)
            while held >= most:
                status = self._mover.status
                late = self._is_late(status, wait.waited_s)
                instead = late and wait.waited_s >= self._patience_s(status, deadline_s)
                if (instead or (self._folds and status.not_folded)) and most == records_max:
                    self._modes.base.on(BaseEvent.NEEDED)
                    # This version, and the one after its base, by which the base takes their place.
                    return held, held + 2
                if most < records_max and status.prepares_folding and wait.waited_s >= deadline_s / 2:
                    self._waits_for_folds = False
                    log.warning(NOT_READY, wait.waited_s)
                    held, most = await self._look(records_max)
                    continue
                why = status.holds_up or "the mover has not said why"
                full = f"the first tier holds {held} differentials and has room for {most}"
                if wait.waited_s >= deadline_s:
                    raise SaveError(f"{full}; within {deadline_s:g} s none could go: {why}")
                await wait.moment(f"{full}: {why}")
                held, most = await self._look(records_max)
        return held, most

    def _is_late(self, status: MoverStatus, waited_s: float) -> bool:
        """Whether the fold that lets differentials go has taken so long that bases are captured from here on."""
        if not self._folds or self._waits_for_folds or not status.awaits_base:
            return False
        if self.folds_late:
            return True
        if late := waited_s >= min(self._deadline_s, FOLD_S_MAX):
            what = "the base that is due is waited for" if status.unfolded_bases else "a base is captured"
            log.info("%s: none was folded within %.3g s, and memory is full", what, waited_s)
            self._late_while = range(status.folded_bases, status.folded_bases + status.unfolded_bases + 1)
        return late

    @staticmethod
    def _patience_s(status: MoverStatus, deadline_s: float) -> float:
        """How long all ranks' bases that are due are waited for: one that this rank alone captures takes their place
        only if they hang."""
        if status.unfolded_bases:
            return deadline_s
        return min(deadline_s, DRAIN_S_MAX) if status.undrained_bases else 0.0

    async def _held(self, records_max: int) -> int:
        """How many are in the tier. If it cannot be listed just now, one more may come: the tier itself has a limit."""
        if (shards := await self._listed()) is None:
            return records_max - 1
        return sum(key.stream is Stream.DIFFERENTIAL for key in shards)

    async def _unfolded(self) -> int:
        """How many there are after the newest base."""
        shards = await self._listed() or []
        newest = max(((key.generation, key.last) for key in shards if key.stream is Stream.BASE), default=(0, 0))
        return sum(key.stream is Stream.DIFFERENTIAL and (key.generation, key.last) > newest for key in shards)

    async def _listed(self) -> list[ShardKey] | None:
        """This rank's shards in the tier; ``None`` if it cannot be listed just now."""

        async def shards() -> list[ShardKey]:
            keys = [parse(info.key) async for info in self._tier.driver.list(rank_prefix(self._rank))]
            return [key for key in keys if isinstance(key, ShardKey)]

        what = f"listing what {self._tier} holds"
        try:
            return await self._scheduler.call(shards(), what=what, deadline_s=self._deadline_s)
        except (TierError, DeadlineExceeded) as error:
            log.debug("%s: %s", what, error)
            return None
