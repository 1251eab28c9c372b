"""A put's payload as chunks, and memory that is about to be sent. Neither copies more than a chunk."""

from __future__ import annotations

import bisect
import itertools

from tiercheck.tiers.posix.direct import address_of
from tiercheck.tiers.shm.populate import populate_to_read
from tiercheck.types import Payload

__all__ = ["PayloadChunks", "populate"]


class PayloadChunks:
    """The concatenation of ``payload``, cut into views.

    A chunk within one buffer is a view of it; one that spans several is gathered into memory of its own. Whoever
    takes a chunk releases it; :meth:`release` gives the buffers back, after which no view of them is left.
    """

    def __init__(self, payload: Payload) -> None:
        self._views = [as_bytes(memoryview(buffer)) for buffer in payload]
        self._starts = [0, *itertools.accumulate(view.nbytes for view in self._views)]
        self.nbytes = self._starts[-1]

    def chunk(self, start: int, stop: int) -> memoryview:
        """The bytes ``[start, stop)``."""
        first = bisect.bisect_right(self._starts, start) - 1
        if first < len(self._views) and stop <= self._starts[first + 1]:
            at = self._starts[first]
            return self._views[first][start - at : stop - at]
        gathered = bytearray(stop - start)
        at = start
        while at < stop:
            with self._views[first][at - self._starts[first] : stop - self._starts[first]] as part:
                gathered[at - start : at - start + part.nbytes] = part
                at += part.nbytes
            first += 1
        return memoryview(gathered)

    def release(self) -> None:
        for view in self._views:
            view.release()
        self._views = []


def as_bytes(view: memoryview) -> memoryview:
    """``view`` in format ``B``. Errors: ``TypeError`` if it is not contiguous."""
    return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")


def populate(content: memoryview) -> None:
    """Spare ZeroMQ's thread, which has the most to do, the page faults of what it is about to send."""
    populate_to_read(address_of(content), content.nbytes)
