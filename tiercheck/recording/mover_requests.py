"""What a recorder asks of its mover, each with the deadline of the job."""

from __future__ import annotations

import asyncio

from tiercheck.errors import DeadlineExceeded
from tiercheck.recording.saves import ask_mover
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler

__all__ = ["MoverRequests"]

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
        await ask_mover(self._scheduler, self._mover, draining, "flushing the tiers", self._deadline_s)

    async def commit(self) -> None:
        """All ranks have brought what they have captured: wait until a base is committed. Errors: as :meth:`drain`."""
        if self._mover.status.uncommitted:
            committing, what = self._committing(), "committing what all ranks have brought"
            await ask_mover(self._scheduler, self._mover, committing, what, self._deadline_s)

    async def _committing(self) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                while self._mover.status.uncommitted:
                    await asyncio.sleep(LOOK_S)
                    await self._mover.cycle(closing=True)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._mover.status.uncommitted}, though it has brought everything: is that tier the same place for "
                "all ranks?"
            ) from None

    async def make_room(self) -> bool:
        """Whether something was deleted from the first tier. Errors: as :meth:`drain`."""
        making, what = self._mover.make_room(), "making room in the first tier"
        return await ask_mover(self._scheduler, self._mover, making, what, self._deadline_s)

    def nudge(self, hurry_s: float = 0.0) -> None:
        """There is something for the mover."""

        async def nudge() -> None:
            self._mover.nudge(hurry_s=hurry_s)

        self._scheduler.start(nudge())

    def hurry(self) -> None:
        """Training waits for the tiers, and says so again meanwhile."""
        self.nudge(min(HURRY_S, self._deadline_s))
