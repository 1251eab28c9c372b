"""What a recorder asks of its mover, each with the deadline of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tiercheck.errors import DeadlineExceeded
from tiercheck.recording.saves import ask_mover
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler

__all__ = ["MoverRequests"]

T = TypeVar("T")

LOOK_S = 0.5
"""From one look at what is committed to the next."""
HURRY_S = 10.0
"""Training that waits for the tiers says so each half second, and an agent hears of it about once a second."""


class MoverRequests:
    """Each waits for the mover, says so if that takes long, and names what holds it up."""

    def __init__(self, mover: MoverHandle, scheduler: Scheduler, deadline_s: float) -> None:
        self._mover = mover
        self._scheduler = scheduler
        self._deadline_s = deadline_s

    async def drain(self) -> None:
        """Have everything captured moved to where policy wants it. Errors: ``SaveError``; ``JobConflict``."""
        draining = self._mover.drain(self._deadline_s, closing=True)
        await self._ask(draining, "flushing the tiers", flushes=True)

    async def commit(self) -> None:
        """All ranks have brought what they have captured: wait until a base is committed. Errors: as :meth:`drain`."""
        if self._mover.status.uncommitted:
            await self._ask(self._committing(), "committing what all ranks have brought", flushes=True)

    async def _committing(self) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while self._mover.status.uncommitted:
                    await asyncio.sleep(LOOK_S)
                    await self._mover.drain(self._deadline_s, closing=True)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._mover.status.uncommitted}, though it has brought everything: is that tier the same place for "
                "all ranks?"
            ) from None

    async def make_room(self) -> bool:
        """Whether something was deleted from the first tier. Errors: as :meth:`drain`."""
        return await self._ask(self._mover.make_room(), "making room in the first tier")

    async def make_room_on_loop(self) -> bool:
        """As :meth:`make_room`, for who is on the event loop already, and has a deadline."""
        return await self._mover.make_room()

    def nudge(self, hurry_s: float = 0.0) -> None:
        """There is something for the mover."""

        async def nudge() -> None:
            self._mover.nudge(hurry_s=hurry_s)

        self._scheduler.start(nudge())

    def hurry(self) -> None:
        """Training waits for the tiers, and says so again meanwhile."""
        self.nudge(min(HURRY_S, self._deadline_s))

    async def _ask(self, call: Coroutine[Any, Any, T], what: str, *, flushes: bool = False) -> T:
        return await ask_mover(self._scheduler, self._mover, call, what, self._deadline_s, flushes=flushes)
