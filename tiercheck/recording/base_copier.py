"""Copies a base into the first tier, beside training, while it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from tiercheck.errors import TierCheckError
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


@dataclass
class BaseInFlight:
    version: int
    copied: Future[bool]
    """Done when the state may change again. Its result: whether the state has changed before that."""
    published: Future[CopiedBase]
    """Done when the base is in the first tier, or given up."""


@dataclass(frozen=True)
class _Copied:
    base: CopiedBase
    is_published: bool
    """If not, the driver must wait to publish it."""


class BaseCopier:
    """Copies one base at a time. It calls ``arrived`` on the event loop for each base that it publishes."""

    def __init__(self, scheduler: Scheduler, arrived: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._arrived = arrived
        self._newest: BaseInFlight | None = None

    def begin(self, version: int, capture: StateCapture, reservation: Reservation, *, lazily: bool) -> BaseInFlight:
        """``lazily``: while the next forward and backward pass run."""
        copied: Future[bool] = Future()
        made = self._scheduler.beside(lambda: _copy(capture, reservation, copied, lazily))
        self._newest = BaseInFlight(version, copied, self._scheduler.start(self._publish(made, reservation)))
        return self._newest

    async def close(self) -> None:
        """Wait until a running copy ends. Idempotent."""
        if self._newest is not None:
            await self._scheduler.ends(self._newest.published, None)

    async def _publish(self, made: Future[_Copied], reservation: Reservation) -> CopiedBase:
        try:
            copied = await settled(asyncio.wrap_future(made))  # a copy that still runs writes to the memory
            base = copied.base
            if base.nbytes is not None and not copied.is_published:
                await reservation.publish(base.nbytes)
        except BaseException:
            await _drop(reservation)
            raise
        if base.nbytes is None:
            await _drop(reservation)
        else:
            self._arrived()
        return base


def _copy(capture: StateCapture, reservation: Reservation, copied: Future[bool], lazily: bool) -> _Copied:
    try:
        capture.copy(reservation.buffer)
    finally:
        copied.set_result(capture.disturbed)
    nbytes = None if capture.disturbed else capture.finish()
    if nbytes is None or (lazily and capture.unexpected):  # those writes may have come during the copy
        return _Copied(CopiedBase(None, capture.unexpected), is_published=False)
    is_published = reservation.publish_nowait(nbytes) is not None
    return _Copied(CopiedBase(nbytes, capture.unexpected), is_published)


async def _drop(reservation: Reservation) -> None:
    try:
        await reservation.drop()
    except TierCheckError as error:
        log.warning("dropping a base: %s", error)
