"""Training waits before the first tier holds more differentials than there is room for.

They go when a base after them is there, and the other tiers have what they are to hold. If those lag, memory would
grow: instead training waits, with a deadline, and the error says what for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiercheck.errors import SaveError, TierError
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey, Stream, parse, rank_prefix
from tiercheck.recording.modes import BaseEvent, Modes, Room, RoomEvent
from tiercheck.recording.saves import Saves
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler

__all__ = ["Backlog"]

log = logging.getLogger(__name__)

LOOK_S = 0.02
NUDGE_S = 0.5


class Backlog:
    """How many differentials of one rank may still come."""

    def __init__(
        self,
        tier: OpenTier,
        mover: MoverHandle,
        scheduler: Scheduler,
        hurry: Callable[[], None],
        *,
        saves: Saves,
        modes: Modes,
        rank: int,
        records_max: int | None,
        deadline_s: float,
        folds: bool,
    ) -> None:
        """``records_max``: so many may be in the tier, the one that is being captured among them; ``None``: any
        number. ``folds``: the mover makes the bases that let them go."""
        self._tier = tier
        self._mover = mover
        self._scheduler = scheduler
        self._hurry = hurry
        self._saves = saves
        self._modes = modes
        self._rank = rank
        self._records_max = records_max
        self._deadline_s = deadline_s
        self._folds = folds
        self._left = 0
        """So many may come before the tier is looked at again."""

    async def admit(self) -> None:
        """Wait until there is room for one more. If the mover was to fold, and does not, none can go before a base is
        captured: this version gets one. Errors: ``SaveError``."""
        if self._records_max is None:
            return
        if self._left <= 0:
            held = await self._held(self._records_max)
            if held >= self._records_max:
                held = await self._room(self._records_max)
            self._left = max(1, self._records_max - held)
        self._left -= 1

    async def _room(self, records_max: int) -> int:
        """How many are in the tier, when it has room for one more."""
        room = self._modes.record_room
        deadline_s = 0.0 if room.state is Room.IN_DOUBT else self._deadline_s
        room.on(RoomEvent.ASKED)
        began = nudged = self._scheduler.time()
        self._hurry()
        try:
            while (held := await self._held(records_max)) >= records_max:
                status, now = self._mover.status, self._scheduler.time()
                if self._folds and status.not_folded:
                    self._modes.base.on(BaseEvent.NEEDED)
                    return held
                if now - began >= deadline_s:
                    troubles = [f"{tier}: {error}" for tier, error in sorted(status.errors.items())]
                    why = "; ".join(filter(None, [status.held_up_by, *troubles])) or "the mover has not said why"
                    raise SaveError(
                        f"the first tier holds {held} differentials and has room for {records_max}; within "
                        f"{deadline_s:g} s none could go: {why}"
                    )
                if now - nudged >= NUDGE_S:
                    self._hurry()
                    nudged = now
                await self._scheduler.sleep(LOOK_S)
        finally:
            self._saves.count(drain_stall_s=self._scheduler.time() - began)
        room.on(RoomEvent.FOUND)
        return held

    async def _held(self, records_max: int) -> int:
        """How many are in the tier. If it cannot be listed just now, one more may come: the tier itself has a limit."""

        async def count() -> int:
            keys = [parse(info.key) async for info in self._tier.driver.list(rank_prefix(self._rank))]
            return sum(isinstance(key, ShardKey) and key.stream is Stream.DIFFERENTIAL for key in keys)

        what = f"counting what {self._tier} holds"
        try:
            return await self._scheduler.call(count(), what=what, deadline_s=self._deadline_s)
        except TierError as error:
            log.debug("%s: %s", what, error)
            return records_max - 1
