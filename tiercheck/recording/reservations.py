"""Memory in the first tier for what a recorder writes: reserved, reserved ahead, published, freed.

A driver is asynchronous. What it can do without waiting is done in the calling thread, and the rest on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, FileSystemFull, TierCheckError, TierError
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey
from tiercheck.recording.waits import Wait
from tiercheck.runtime.runtime import Scheduler
from tiercheck.tiers.driver import Reservation

__all__ = ["Reservations"]

log = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_S = 0.25
"""How often memory that others hold is asked for again, in seconds: each time costs what making some of it takes."""


class Reservations:
    """The reservations in one first tier.

    ``make_room`` makes the mover delete what may be deleted: true if something was. Each call waits for the deadline at
    most, and :meth:`reserve` asks for no more room after that. ``wait``: a wait of training's, for room that others
    hold. There is none if training is to go on without what could not be saved.
    """

    def __init__(
        self,
        tier: OpenTier,
        scheduler: Scheduler,
        make_room: Callable[[], Awaitable[bool]],
        wait: Callable[[], Wait],
        config: CheckpointConfig,
    ) -> None:
        self._tier = tier
        self._scheduler = scheduler
        self._make_room = make_room
        self._wait = wait
        self._deadline_s = config.deadline_s
        self._is_patient = config.on_save_error == "fail"
        """What others hold is waited for."""
        self._ahead: Reservation | None = None
        """Memory for the next version's record, if the driver gives it without waiting."""
        self._ahead_nbytes = 0
        """So much of that is there."""

    async def reserve(self, key: ShardKey, nbytes: int, *, ready: bool = True) -> Reservation:
        """Reserve memory. If the tier is full, try again each time that something was deleted from it. If others fill
        what lies beneath it, wait for them. ``ready``: the memory is there, so that asking for the buffer neither takes
        long nor fails."""
        until = self._scheduler.time() + self._deadline_s
        try:
            return await self._reserved_with_room(key, nbytes, ready, until)
        except FileSystemFull as error:
            full = error
        with self._wait() as wait:
            while self._is_patient and self._scheduler.time() < until:
                await wait.moment(f"there is no memory for {key}: {full}", look_s=AGAIN_S)
                try:
                    return await self._reserved(key, nbytes, ready)
                except FileSystemFull as error:
                    full = error
                except CapacityExceeded:
                    try:
                        return await self._reserved_with_room(key, nbytes, ready, until)
                    except FileSystemFull as error:
                        full = error
        raise full

    async def reserve_on_loop(
        self, key: ShardKey, nbytes: int, make_room: Callable[[], Awaitable[bool]]
    ) -> Reservation:
        """As :meth:`reserve`, called on the event loop, on which ``make_room`` is called, too."""
        until = asyncio.get_running_loop().time() + self._deadline_s - AGAIN_S  # before who waits for this gives up
        more = True
        while True:
            try:
                return await self._tier.driver.reserve(str(key), nbytes)
            except CapacityExceeded as error:
                others = isinstance(error, FileSystemFull)
                if not (self._is_patient if others else more) or asyncio.get_running_loop().time() >= until:
                    raise
            if others:
                await asyncio.sleep(AGAIN_S)
                continue
            try:
                async with asyncio.timeout_at(until):
                    more = await make_room()
            except TimeoutError:
                more = False

    def close(self) -> None:
        """Whoever waits for memory that others hold does so no longer."""
        self._is_patient = False

    async def _reserved_with_room(self, key: ShardKey, nbytes: int, ready: bool, until: float) -> Reservation:
        more = True
        while True:
            try:
                return await self._reserved(key, nbytes, ready)
            except CapacityExceeded:
                if not more:
                    raise
            await self.drop_ahead()
            # What an older agent did answers to no question: one more try will show it.
            more = await self._make_room() and self._scheduler.time() < until

    def reserve_ahead(self, key: ShardKey, nbytes: int) -> None:
        """Reserve memory for the next version's record; ``nbytes``: what the last record needed.

        Call it right after that record was published. The code and data of a reservation are in the processor's caches
        then. After the next forward and backward pass they are not.
        """
        self._ahead_nbytes = 0
        try:
            self._ahead = self._tier.driver.reserve_nowait(str(key), nbytes)
            if self._ahead is not None:
                self._ahead_nbytes = len(self._ahead.buffer)  # a driver may make it ready only now
        except TierError as error:
            log.debug("%s finds no memory yet: %s", key, error)  # reserve() asks again, and raises

    async def take_ahead(self, key: ShardKey, nbytes: int) -> Reservation | None:
        """What was reserved ahead for this record, if it is long enough."""
        if self._ahead is not None and self._ahead.key == str(key) and self._ahead_nbytes >= nbytes:
            ahead, self._ahead = self._ahead, None
            return ahead
        await self.drop_ahead()
        return None

    async def drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await self.drop(ahead, f"giving back the memory for {ahead.key}")

    async def drop(self, reservation: Reservation, what: str) -> None:
        """Free the reservation. If that fails, only its memory is lost, until the tier is closed."""
        try:
            await self._call(reservation.drop(), what)
        except TierCheckError as error:
            log.warning("%s: %s", what, error)

    async def publish(self, reservation: Reservation, nbytes: int, what: str) -> None:
        if reservation.publish_nowait(nbytes) is None:
            await self._call(reservation.publish(nbytes), what)

    async def _reserved(self, key: ShardKey, nbytes: int, ready: bool) -> Reservation:
        driver = self._tier.driver
        found = driver.reserve_nowait(str(key), nbytes)
        if found is None:
            return await self._call(driver.reserve(str(key), nbytes), f"reserving memory for {key}")
        try:
            if ready:
                _ = found.buffer
        except BaseException:
            await self.drop(found, f"giving back the memory for {key}")
            raise
        return found

    async def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return await self._scheduler.call(coroutine, what=what, deadline_s=self._deadline_s)
