"""Work that comes in pieces, done by several threads of which the caller's is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from tiercheck.runtime.daemon_threads import DaemonThreads

__all__ = ["Threads"]

T = TypeVar("T")

ENDING_S = 5.0
"""For so long threads are waited for that are at work when all are to end: one that hangs is left to itself."""


class Threads:
    """``count`` threads for each caller, his own among them; the others are shared, and made when first needed."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._pool: DaemonThreads | None = None
        self._lock = threading.Lock()

    def share(self, pieces: Sequence[T], work: Callable[[T], None]) -> None:
        """``work(piece)`` for each of ``pieces``, in whichever thread.

        The caller's thread works too, so that no call ever waits for another's. On return every thread is done with
        this call, whether it raises or not; once a piece has raised no other is begun, and that error is raised.
        """
        queue = iter(enumerate(pieces))  # one step of it, so that each piece is taken once
        stopped = threading.Event()

        def drain() -> None:
            try:
                while not stopped.is_set() and (taken := next(queue, None)) is not None:
                    work(taken[1])
            except BaseException:
                stopped.set()
                raise

        helping: list[Future[None]] = []
        try:
            # Those that were begun are known even if the next one cannot be.
            helping.extend(self._helpers().submit(drain) for _ in range(min(self.count, len(pieces)) - 1))
            drain()
        finally:
            stopped.set()
            running = [helper for helper in helping if not helper.cancel()]
            wait(running)
        for helper in running:
            helper.result()

    def close(self) -> None:
        """Let go of the threads; they are made anew where they are needed again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.end()
            with suppress(TimeoutError):
                pool.ended.result(ENDING_S)

    def _helpers(self) -> DaemonThreads:
        with self._lock:
            if self._pool is None:
                self._pool = DaemonThreads(self.count - 1, self._name)
            return self._pool
