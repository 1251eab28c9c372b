"""A base on its way into the first tier: copied on a thread of its own, while training goes on."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass

from tiercheck.recording.reservations import Reservations
from tiercheck.streams.base import BaseCapture
from tiercheck.tiers.driver import Reservation

__all__ = ["BaseCopier", "BaseInFlight", "CopiedBase"]


@dataclass(frozen=True)
class CopiedBase:
    nbytes: int | None
    """Its length; ``None`` if the state may have changed under the copy: then it is given up."""
    unexpected: tuple[str, ...] = ()
    """The trained tensors in which the copy has other bits than the step left there, though nobody has seen a write."""


@dataclass
class BaseInFlight:
    version: int
    copied: concurrent.futures.Future[bool]
    """Done once the state may change again: whether it has changed before."""
    published: concurrent.futures.Future[CopiedBase]
    """Done once the base is in the first tier, or given up."""


class BaseCopier:
    """Copies one base at a time into ``memory``. ``arrived`` is called on its thread for each one that is published."""

    def __init__(self, memory: Reservations, arrived: Callable[[], None]) -> None:
        self._memory = memory
        self._arrived = arrived
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tiercheck-base")

    def begin(self, version: int, capture: BaseCapture, reservation: Reservation, *, lazily: bool) -> BaseInFlight:
        """``lazily``: while the next forward and backward pass run."""
        copied: concurrent.futures.Future[bool] = concurrent.futures.Future()
        return BaseInFlight(version, copied, self._thread.submit(self._copy, capture, reservation, copied, lazily))

    def close(self) -> None:
        """Wait for the copy that still runs. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _copy(
        self,
        capture: BaseCapture,
        reservation: Reservation,
        copied: concurrent.futures.Future[bool],
        lazily: bool,
    ) -> CopiedBase:
        try:
            try:
                capture.copy(reservation.buffer)
            finally:
                copied.set_result(capture.disturbed)
            nbytes = None if capture.disturbed else capture.finish()
            if nbytes is None or (lazily and capture.unexpected):  # that may have come during the copy, too
                self._memory.drop(reservation, "dropping a base")
                return CopiedBase(None, capture.unexpected)
            self._memory.publish(reservation, nbytes, "publishing a base")
        except BaseException:
            self._memory.drop(reservation, "dropping a base")
            raise
        self._arrived()
        return CopiedBase(nbytes, capture.unexpected)
