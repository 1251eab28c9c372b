"""Copies a base into the first tier, beside training, while it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from tiercheck.errors import DeadlineExceeded, FileSystemFull, TierCheckError
from tiercheck.recording.reservations import AGAIN_S
from tiercheck.runtime.runtime import Scheduler
from tiercheck.runtime.waiting import settled
from tiercheck.streams.state import StateCapture
from tiercheck.tiers.driver import Reservation

__all__ = ["BaseCopier", "BaseInFlight", "CopiedBase"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopiedBase:
    nbytes: int | None
    """The length of the base. ``None``: the state may have changed during the copy, so the base is given up."""
    unexpected: tuple[str, ...] = ()
    """Trained tensors of which the copy has other bits than the step left there, though no write was seen."""
    constants_nbytes: int = 0
    """Of the constants that came with it; 0: none."""


@dataclass
class BaseInFlight:
    version: int
    capture: StateCapture
    copied: Future[None]
    """Done when the state may change again, after ``capture.let_change()``. Its error is that of the copy."""
    published: Future[CopiedBase]
    """Done when the base is in the first tier, or given up."""


@dataclass(frozen=True)
class _Copied:
    base: CopiedBase
    unpublished: tuple[tuple[Reservation, int], ...] = ()
    """What the driver must wait to publish, in this order, and its length: the constants, and the base."""


class BaseCopier:
    """Copies one base at a time. It calls ``arrived`` on the event loop for each base that it publishes.

    ``patience_s``: so long it waits for memory that others hold, unless it is told to :meth:`give_up`.
    """

    def __init__(
        self, scheduler: Scheduler, arrived: Callable[[], None], *, deadline_s: float, patience_s: float
    ) -> None:
        self._scheduler = scheduler
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._arrived = arrived
        self._newest: BaseInFlight | None = None
        self._wanted: StateCapture | None = None
        """That whose copy may begin again: whoever waits for it still does."""

    def begin(
        self,
        version: int,
        capture: StateCapture,
        reservation: Reservation,
        constants: Reservation | None,
        *,
        lazily: bool,
    ) -> BaseInFlight:
        """``constants``: room for those that the capture brings. ``lazily``: while the next forward and backward pass
        run."""
        copied: Future[None] = Future()
        self._wanted = capture
        copy = partial(_copy, capture, reservation, constants, copied, lazily)
        running = self._scheduler.beside(copy)
        publishing = self._publish(lambda: self._finished(running, copy, capture), copied, reservation, constants)
        published = self._scheduler.start(publishing)
        self._newest = BaseInFlight(version, capture, copied, published)
        return self._newest

    def give_up(self) -> None:
        """The state may change from here on: a copy that has not begun does not begin any more."""
        self._wanted = None

    async def close(self) -> None:
        """Wait until a running copy ends. Idempotent. Errors: ``DeadlineExceeded``."""
        self.give_up()
        if self._newest is not None and not await self._scheduler.ends(self._newest.published, self._deadline_s):
            raise DeadlineExceeded(f"base {self._newest.version} is still copied, after {self._deadline_s:g} s more")

    async def _finished(self, running: Future[_Copied], copy: Callable[[], _Copied], capture: StateCapture) -> _Copied:
        """The result of the copy that is ``running``, or of a later one if others held the memory for that."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while True:
            began = loop.time()
            try:
                return await settled(asyncio.wrap_future(running))  # a copy that still runs writes to the memory
            except FileSystemFull:
                # The last try ends before those who wait for the base until the same deadline: it has the reason.
                now = loop.time()
                if self._wanted is not capture or now + 2 * AGAIN_S + (now - began) >= until:
                    raise
            await asyncio.sleep(AGAIN_S)
            if self._wanted is not capture:
                raise FileSystemFull(f"base {capture.key.first} was given up while it waited for memory")
            running = self._scheduler.beside(copy)

    async def _publish(
        self,
        finished: Callable[[], Awaitable[_Copied]],
        copied: Future[None],
        reservation: Reservation,
        constants: Reservation | None,
    ) -> CopiedBase:
        left = [each for each in (constants, reservation) if each is not None]
        try:
            result = await finished()
            base = result.base
            if base.nbytes is not None:
                left = [each for each, _ in result.unpublished]
            for each, nbytes in result.unpublished:
                await each.publish(nbytes)
                left.remove(each)
        except BaseException as error:
            if not copied.done():
                copied.set_exception(error)
            for each in left:
                await _drop(each)
            raise
        if base.nbytes is None:
            for each in left:
                await _drop(each)
        else:
            self._arrived()
        return base


def _copy(
    capture: StateCapture,
    reservation: Reservation,
    constants: Reservation | None,
    copied: Future[None],
    lazily: bool,
) -> _Copied:
    # The memory may be made here. As long as that fails, nothing has begun, and ``copied`` is not done.
    constants_buffer, buffer = constants.buffer if constants is not None else None, reservation.buffer
    try:
        if capture.constants is not None and constants_buffer is not None:
            capture.constants.copy(constants_buffer)
        capture.copy(buffer)
    except BaseException as error:
        copied.set_exception(error)
        raise
    else:
        copied.set_result(None)
    finally:
        capture.arrive()  # also after an error: what is on its way lands in this memory
    if capture.disturbed:
        return _Copied(CopiedBase(None, capture.unexpected))
    constants_nbytes = capture.constants.finish() if capture.constants is not None else 0
    nbytes = capture.finish()
    if capture.disturbed or (lazily and capture.unexpected):  # those writes may have come during the copy
        return _Copied(CopiedBase(None, capture.unexpected))
    base = CopiedBase(nbytes, capture.unexpected, constants_nbytes)
    due = [(reservation, nbytes)] if constants is None else [(constants, constants_nbytes), (reservation, nbytes)]
    while due and due[0][0].publish_nowait(due[0][1]) is not None:
        del due[0]
    return _Copied(base, tuple(due))


async def _drop(reservation: Reservation) -> None:
    try:
        await reservation.drop()
    except TierCheckError as error:
        log.warning("dropping a base: %s", error)
