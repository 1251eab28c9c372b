"""Keeps copies from a device back until the next forward pass begins."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["WAIT_S", "Gate"]

WAIT_S = 0.1
"""So long copies wait at most: nobody knows whether there will be another forward pass."""


class Gate:
    """To measure its throughput, DeepSpeed waits for the whole device at the end of a step, and again before the
    forward pass. It would wait for each copy that is on its way then: 40 ms for 2 GB. A copy that begins with the
    forward pass is waited for by nobody.

    Training's thread calls :meth:`close` in the step. It is opened by what sees the forward pass begin, and by
    :meth:`open` if training itself is about to wait for a copy. Threads that copy call :meth:`wait`.
    """

    def __init__(self, tell: Callable[[Callable[[], None]], bool]) -> None:
        """``tell``: has its argument called when a forward pass begins, and returns whether copies had better wait for
        it (:meth:`~tiercheck.streams.tensors.provider.StateProvider.tell_of_forward`)."""
        self._opened = threading.Event()
        self._opened.set()
        self.closes = tell(self._opened.set)
        """Whether it is ever closed."""

    def close(self) -> None:
        """Copies wait from now on, if the framework waits for the device (:attr:`closes`)."""
        if self.closes:
            self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def wait(self) -> None:
        """Until it is open, for :data:`WAIT_S` at most."""
        self._opened.wait(WAIT_S)
