"""How long tiers are waited for: a deadline that begins anew with what has come."""

from __future__ import annotations

import asyncio

from tiercheck.policy.observation import Copy

__all__ = ["BYTES_PER_S_MIN", "Patience", "time_to_read"]

BYTES_PER_S_MIN = 1 << 20
"""An object that comes whole may take as long as this needs. A tier that is slower counts as silent."""


def time_to_read(nbytes: int) -> float:
    """The most that bytes may take to come, in seconds, beside a deadline."""
    return nbytes / BYTES_PER_S_MIN


class Patience:
    """``deadline_s`` without anything that had not come before: what is read again and again does not count."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._until = asyncio.get_running_loop().time() + deadline_s
        self._came: dict[Copy, int] = {}
        self.arrivals = 0
        """How often something came."""

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - asyncio.get_running_loop().time())

    def came(self, source: Copy, nbytes: int) -> None:
        """So many bytes of the copy have come by now."""
        if nbytes > self._came.get(source, 0):
            self._came[source] = nbytes
            self.arrivals += 1
            self._until = asyncio.get_running_loop().time() + self._deadline_s
