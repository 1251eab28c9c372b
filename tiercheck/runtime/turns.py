"""Long puts in turns: whoever began a put may have it wait between its parts.

A driver that sends an object in parts asks before each part (:func:`next_part`). If nobody wants turns, that returns
at once. Asking is optional: the put of a driver that never asks is one part.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

__all__ = ["Turns", "in_turns", "next_part", "turns_in_threads", "wanted_turns"]

Check = Callable[[], None]

LOOK_S = 0.05
"""How often a thread that waits for its turn sees whether its caller was cancelled."""


class Turns(Protocol):
    """Says when the parts of one put may go."""

    async def turn(self, nbytes: int) -> None:
        """Wait for the turn of so many bytes. A cancelled one counts nothing."""
        ...


_TURNS: ContextVar[Turns | None] = ContextVar("tiercheck put in turns", default=None)


@contextmanager
def in_turns(turns: Turns) -> Iterator[None]:
    """Inside, a put asks ``turns`` before each of its parts."""
    token = _TURNS.set(turns)
    try:
        yield
    finally:
        _TURNS.reset(token)


def wanted_turns() -> Turns | None:
    """Whom this put has to ask; ``None``: nobody."""
    return _TURNS.get()


async def next_part(nbytes: int) -> None:
    """A driver is about to send so many bytes of a put: wait until they may go."""
    if (turns := _TURNS.get()) is not None:
        await turns.turn(nbytes)


def turns_in_threads(nbytes: int, part_bytes: int) -> Callable[[Check], Check]:
    """What makes a function that threads call before each part of a put wait for the part's turn as well. That function
    raises once the caller was cancelled. Called on the event loop."""
    if (turns := _TURNS.get()) is None:
        return lambda check: check
    loop, left, lock = asyncio.get_running_loop(), nbytes, threading.Lock()

    def taking_turns(check: Check) -> Check:
        def wait() -> None:
            nonlocal left
            check()
            with lock:
                part = min(part_bytes, left)
                left -= part
            if part:
                _wait(asyncio.run_coroutine_threadsafe(turns.turn(part), loop), check)

        return wait

    return taking_turns


def _wait(turn: Future[None], check: Check) -> None:
    try:
        while True:
            try:
                return turn.result(LOOK_S)
            except TimeoutError:
                check()
    finally:
        turn.cancel()
