"""Finds calls that wait for a disk or a network on the thread of the event loop, where all tiers wait with them, and
training behind them.

It looks at what Python is about to do (:func:`sys.addaudithook`), and not at how long that takes: a fast disk and a
busy machine change nothing. What a library does in compiled code of its own is not seen.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import SupportsIndex

__all__ = ["waits_on_this_thread"]

NETWORK = frozenset({"socket.connect", "socket.getaddrinfo", "time.sleep"})
FILES = frozenset(
    {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "os.truncate"}
    | {"sqlite3.connect"}
)
LINES_MAX = 3
"""So many lines of code tell how a driver came to its call."""
OTHERS = tuple(str(Path(file).parent) for file in (asyncio.__file__, __file__))
"""Where the lines are no driver's."""


class _Watched(threading.local):
    """What is looked for on this thread, and what was found."""

    events: frozenset[str] = frozenset()
    found: dict[str, None]


_watched = _Watched()


@contextmanager
def waits_on_this_thread(*, files: bool) -> Iterator[dict[str, None]]:
    """What waits on this thread meanwhile, in words and in order, each with the lines of code that led there.
    ``files``: calls on files, too, apart from those of imports."""
    _listen()
    found = _watched.found = {}
    with _sleeps_told():
        _watched.events = NETWORK | FILES if files else NETWORK
        try:
            yield found
        finally:
            _watched.events = frozenset()


@functools.cache  # once: a hook stays to the end of its process
def _listen() -> None:
    sys.addaudithook(_look)


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if event not in _watched.events or not _waits(event, arguments):
        return
    watched, _watched.events = _watched.events, frozenset()  # reading source lines opens files
    try:
        lines = _lines(sys._getframe(1))
        if lines is not None:
            _watched.found[f"{event}({', '.join(map(repr, arguments))})\n{lines}"] = None
    finally:
        _watched.events = watched


def _waits(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "socket.connect":
        return isinstance(arguments[0], socket.socket) and arguments[0].gettimeout() != 0
    return event != "time.sleep" or arguments != (0,)


def _lines(frame: FrameType) -> str | None:
    """How a driver came there. ``None``: by an import."""
    stack = list(traceback.extract_stack(frame))
    while stack and stack[-1].filename == __file__:  # a sleep that is told
        stack.pop()
    if any(each.filename.startswith("<frozen importlib") for each in stack):
        return None
    kit = max((place for place, each in enumerate(stack) if each.filename.startswith(OTHERS)), default=-1)
    return "".join(traceback.format_list(stack[kit + 1 :][:LINES_MAX]))


@contextmanager
def _sleeps_told() -> Iterator[None]:
    """Python tells of sleeps since 3.13."""
    sleep = time.sleep

    def told(seconds: float | SupportsIndex) -> None:
        sys.audit("time.sleep", seconds)
        sleep(seconds)

    if sys.version_info < (3, 13):
        time.sleep = told
    try:
        yield
    finally:
        time.sleep = sleep
