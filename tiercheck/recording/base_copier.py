"""Copies a base into the first tier, beside training, while it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from tiercheck.errors import DeadlineExceeded, TierCheckError
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
    """Copies one base at a time. It calls ``arrived`` on the event loop for each base that it publishes."""

    def __init__(self, scheduler: Scheduler, arrived: Callable[[], None], *, deadline_s: float) -> None:
        self._scheduler = scheduler
        self._deadline_s = deadline_s
        self._arrived = arrived
        self._newest: BaseInFlight | None = None

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
        made = self._scheduler.beside(lambda: _copy(capture, reservation, constants, copied, lazily))
        published = self._scheduler.start(self._publish(made, reservation, constants))
        self._newest = BaseInFlight(version, capture, copied, published)
        return self._newest

    async def close(self) -> None:
        """Wait until a running copy ends. Idempotent. Errors: ``DeadlineExceeded``."""
        if self._newest is not None and not await self._scheduler.ends(self._newest.published, self._deadline_s):
            raise DeadlineExceeded(f"base {self._newest.version} is still copied, after {self._deadline_s:g} s more")

    async def _publish(
        self, made: Future[_Copied], reservation: Reservation, constants: Reservation | None
    ) -> CopiedBase:
        left = [each for each in (constants, reservation) if each is not None]
        try:
            copied = await settled(asyncio.wrap_future(made))  # a copy that still runs writes to the memory
            base = copied.base
            if base.nbytes is not None:
                left = [each for each, _ in copied.unpublished]
            for each, nbytes in copied.unpublished:
                await each.publish(nbytes)
                left.remove(each)
        except BaseException:
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
    try:
        if capture.constants is not None and constants is not None:
            capture.constants.copy(constants.buffer)
        capture.copy(reservation.buffer)
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
