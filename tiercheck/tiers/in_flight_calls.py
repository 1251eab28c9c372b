"""Calls that other threads make into a driver, which has to outlive them."""

from __future__ import annotations

import threading

from tiercheck.errors import Closed, Transient

__all__ = ["InFlightCalls"]

STAY_S_MAX = 120.0
"""As long as a visit lasts at most, whatever it waits for; by then something is wrong."""


class InFlightCalls:
    """``with visits:`` is one of them. Counts those that are under way; none is admitted at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._admits = False
        self._here = 0

    def __enter__(self) -> None:
        """Errors: ``Closed`` if none is admitted."""
        with self._changed:
            if not self._admits:
                raise Closed("the driver is not open")
            self._here += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._here -= 1
            self._changed.notify_all()

    def admit(self) -> None:
        with self._changed:
            self._admits = True

    def refuse(self) -> None:
        """Admit no more, and wait for those that are here. Errors: ``Transient`` if one does not end."""
        with self._changed:
            self._admits = False
            if not self._changed.wait_for(lambda: not self._here, STAY_S_MAX):
                raise Transient(f"{self._here} calls of other threads have not ended within {STAY_S_MAX:.0f} s")
