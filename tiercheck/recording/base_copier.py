"""Copies a base into the first tier, on a thread of its own, while training goes on."""

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
    """The length of the base. ``None``: the state may have changed during the copy, so the base is given up."""
    unexpected: tuple[str, ...] = ()
    """Trained tensors of which the copy has other bits than the step left there, though no write was seen."""


@dataclass
class BaseInFlight:
    version: int
    copied: concurrent.futures.Future[bool]
    """Done when the state may change again. Its result: whether the state has changed before that."""
    published: concurrent.futures.Future[CopiedBase]
    """Done when the base is in the first tier, or given up."""


class BaseCopier:
    """Copies one base at a time into ``memory``. It calls ``arrived`` on its thread for each base that it publishes."""

    def __init__(self, memory: Reservations, arrived: Callable[[], None]) -> None:
        self._memory = memory
        self._arrived = arrived
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tiercheck-base")

    def begin(self, version: int, capture: BaseCapture, reservation: Reservation, *, lazily: bool) -> BaseInFlight:
        """``lazily``: while the next forward and backward pass run."""
        copied: concurrent.futures.Future[bool] = concurrent.futures.Future()
        return BaseInFlight(version, copied, self._thread.submit(self._copy, capture, reservation, copied, lazily))

    def close(self) -> None:
        """Wait until a running copy ends. Idempotent."""
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
            if nbytes is None or (lazily and capture.unexpected):  # those writes may have come during the copy
                self._memory.drop(reservation, "dropping a base")
                return CopiedBase(None, capture.unexpected)
            self._memory.publish(reservation, nbytes, "publishing a base")
        except BaseException:
            self._memory.drop(reservation, "dropping a base")
            raise
        self._arrived()
        return CopiedBase(nbytes, capture.unexpected)
