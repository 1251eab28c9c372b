"""Closes the records whose gradients come from a device, beside training: each one is published when they have come.

Training's thread hands a record over when its iteration has ended, and goes on. It learns later what became of it. At
most :data:`ON_THEIR_WAY_MAX` records are on their way: before there are more, training's thread waits for the oldest
one, which bounds the memory that they take, and by how much the host may run ahead of the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from tiercheck.errors import CapacityExceeded, DeadlineExceeded, SaveError, TierCheckError
from tiercheck.keys import ShardKey
from tiercheck.recording.mover_requests import MoverRequests
from tiercheck.recording.reservations import Reservations
from tiercheck.runtime.runtime import Scheduler
from tiercheck.runtime.waiting import settled
from tiercheck.streams.state import RecordCapture
from tiercheck.tiers.driver import Reservation

__all__ = ["ON_THEIR_WAY_MAX", "ClosedRecord", "RecordCloser"]

log = logging.getLogger(__name__)

ON_THEIR_WAY_MAX = 2


@dataclass(frozen=True)
class ClosedRecord:
    version: int
    nbytes: int = 0
    error: BaseException | None = None
    """Why it is not in the first tier."""


@dataclass(frozen=True)
class _OnItsWay:
    version: int
    published: Future[int]


class RecordCloser:
    """Closes the records of one rank, in order. It calls ``arrived`` on the event loop with each that it publishes."""

    def __init__(
        self,
        memory: Reservations,
        scheduler: Scheduler,
        arrived: Callable[[int], None],
        requests: MoverRequests,
        deadline_s: float,
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._arrived = arrived
        self._requests = requests
        self._deadline_s = deadline_s
        self._on_their_way: deque[_OnItsWay] = deque()

    def hand_over(
        self,
        key: ShardKey,
        capture: RecordCapture,
        close: Callable[[], int],
        reservation: Reservation,
        nbytes_unexpected: int,
    ) -> None:
        """``close``: what the capture has returned for later. ``nbytes_unexpected``: room enough for any record."""
        closing = self._scheduler.beside(close, lane="record")
        publishing = self._publish(key, capture, close, closing, reservation, nbytes_unexpected)
        self._on_their_way.append(_OnItsWay(key.first, self._scheduler.start(publishing)))

    async def ended(self, most: int = ON_THEIR_WAY_MAX) -> list[ClosedRecord]:
        """Those that have ended since this was called last, oldest first, when at most so many are on their way.

        Errors: ``SaveError`` for one that takes too long; the next call tells of those before it."""
        for each in list(self._on_their_way)[: max(0, len(self._on_their_way) - most)]:
            if not await self._scheduler.ends(each.published, self._deadline_s):
                raise SaveError(f"version {each.version} was not copied to the first tier in {self._deadline_s:g} s")
        found: list[ClosedRecord] = []
        while self._on_their_way and self._on_their_way[0].published.done():
            oldest = self._on_their_way.popleft()
            error = oldest.published.exception()
            found.append(ClosedRecord(oldest.version, 0 if error else oldest.published.result(), error))
        return found

    async def close(self) -> None:
        """Wait until nothing is on its way any more. Idempotent. Errors: ``DeadlineExceeded``."""
        for each in self._on_their_way:
            if not await self._scheduler.ends(each.published, self._deadline_s):
                raise DeadlineExceeded(f"version {each.version} is still copied, after {self._deadline_s:g} s more")

    async def _publish(
        self,
        key: ShardKey,
        capture: RecordCapture,
        close: Callable[[], int],
        closing: Future[int],
        reservation: Reservation,
        nbytes_unexpected: int,
    ) -> int:
        try:
            try:
                nbytes = await settled(asyncio.wrap_future(closing))
            except CapacityExceeded:
                needed = max(capture.nbytes_needed, nbytes_unexpected)
                longer = await self._memory.reserve_on_loop(key, needed, self._requests.make_room_on_loop)
                short, reservation = reservation, longer
                capture.move(longer.buffer)
                await self._drop(short)
                nbytes = await settled(asyncio.wrap_future(self._scheduler.beside(close, lane="record")))
            if reservation.publish_nowait(nbytes) is None:
                await reservation.publish(nbytes)
        except BaseException:
            await asyncio.to_thread(capture.abandon)
            await self._drop(reservation)
            raise
        self._arrived(key.first)
        return nbytes

    @staticmethod
    async def _drop(reservation: Reservation) -> None:
        try:
            await reservation.drop()
        except TierCheckError as error:
            log.warning("memory of a record is lost until the first tier is closed: %s", error)
