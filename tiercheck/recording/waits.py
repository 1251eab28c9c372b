"""Training waits for the mover, or for room that others hold: it looks again and again whether it may go on, and says
once what it waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from tiercheck.errors import TierCheckError
from tiercheck.recording.modes import Room, RoomEvent
from tiercheck.recording.saves import TELL_S, Saves
from tiercheck.runtime.machine import Machine
from tiercheck.runtime.runtime import Scheduler

__all__ = ["Wait", "asking"]

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often a wait looks whether it may end, in seconds."""
NUDGE_S = 0.5
"""How often a wait asks the mover to look at the tiers, in seconds."""


@contextmanager
def asking(room: Machine[Room, RoomEvent], deadline_s: float) -> Iterator[float]:
    """Ask for room, in a context. Yields how long it may be waited for. It counts as found unless the context raises.

    Who has waited in vain does not wait for the same again: with ``on_save_error="warn"`` each version would.
    """
    patience_s = 0.0 if room.state is Room.IN_DOUBT else deadline_s
    room.on(RoomEvent.ASKED)
    try:
        yield patience_s
    except TierCheckError:
        raise
    except BaseException:
        if patience_s:  # an interrupt is no answer
            room.on(RoomEvent.FOUND)
        raise
    room.on(RoomEvent.FOUND)


class Wait:
    """One wait, from entering it to leaving it. It counts as a stall for the tiers, however it ends."""

    def __init__(self, scheduler: Scheduler, hurry: Callable[[], None], saves: Saves) -> None:
        self._scheduler = scheduler
        self._hurry = hurry
        self._saves = saves
        self._began = self._nudged = scheduler.time()
        self._told = False

    def __enter__(self) -> Wait:
        self._hurry()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._saves.count(drain_stall_s=self.waited_s)

    @property
    def waited_s(self) -> float:
        return self._scheduler.time() - self._began

    async def moment(self, why: str, *, look_s: float = LOOK_S) -> None:
        """Wait until it is time to look again, ``look_s``. ``why``: for the warning, if the wait has become long."""
        now = self._scheduler.time()
        if now - self._began >= TELL_S and not self._told:
            self._told = True
            log.warning("training waits: %s", why)
        if now - self._nudged >= NUDGE_S:
            self._hurry()
            self._nudged = now
        await self._scheduler.sleep(look_s)
