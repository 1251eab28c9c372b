"""Room in the first tier, for whom there is none.

What lies there may go at once, or after other tiers have been brought something, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["Room", "RoomMakingEnded"]


class RoomMakingEnded(Exception):
    """Whoever brings the other tiers what they lack was ended."""


class Room:
    """Waits for deletions from the first tier, and for no more than one."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        """Of the next deletion."""
        self._cycling: asyncio.Task[bool] | None = None

    def freed(self) -> None:
        """Something was deleted from the first tier."""
        self._next.set()
        self._next = asyncio.Event()

    async def make(
        self, delete: Callable[[], Awaitable[object]], start_cycle: Callable[[], asyncio.Task[bool]]
    ) -> bool:
        """``delete`` what may go by what is known. If that is nothing: until something was, or nothing is left to do.

        ``start_cycle`` begins to bring all tiers what they lack. That goes on after the wait: a copy that is broken off
        begins anew, and each wait would break off the same one. Errors: :class:`RoomMakingEnded`, and the cycle's.
        """
        freed, whole = self._next, False
        await delete()
        while not freed.is_set() and not whole:
            # One that has begun earlier may end without what has come since.
            whole = self._cycling is None or self._cycling.done()
            cycling = self._cycling = start_cycle() if self._cycling is None or whole else self._cycling
            freeing = asyncio.create_task(freed.wait())
            try:
                await asyncio.wait((cycling, freeing), return_when=asyncio.FIRST_COMPLETED)
            finally:
                freeing.cancel()
            if cycling.cancelled():
                raise RoomMakingEnded
            if cycling.done():
                cycling.result()
        return freed.is_set()
