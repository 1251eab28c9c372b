"""The synchronous front of the core: it runs the core's coroutines in the calling thread, and owns the threads.

A coroutine of the core never suspends here: each of its waits blocks the thread that called, as a training loop
expects, and an interrupt is raised where it waits.
"""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tiercheck.runtime.loop_thread import LoopThread
from tiercheck.runtime.process_lock import ProcessLock
from tiercheck.runtime.processors import bound_to, quota
from tiercheck.runtime.runtime import CLOSE_S, Runtime

__all__ = ["ThreadScheduler", "of_this_process", "run"]

T = TypeVar("T")

TOKEN_BYTES = 8


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the core, whose scheduler is a :class:`ThreadScheduler`, to its end in this thread."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError(f"{coroutine!r} awaits something else than its scheduler: start it on the loop")


def of_this_process() -> Runtime:
    """The runtime of a training process. Its event loop runs in a thread of its own until the scheduler is closed."""
    return Runtime(
        scheduler=ThreadScheduler(),
        environment=os.environ,
        token=lambda: secrets.token_hex(TOKEN_BYTES),
        lock=ProcessLock,
        start=secrets.token_hex(TOKEN_BYTES),
        processors=bound_to(),
        quota=quota(),
    )


class ThreadScheduler:
    """The scheduler of a thread that cannot await: its waits block."""

    def __init__(self) -> None:
        self._loop = LoopThread()
        self._beside: dict[str, ThreadPoolExecutor] = {}

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return self._loop.submit(coroutine)

    def beside(self, function: Callable[[], T], *, lane: str = "base") -> Future[T]:
        if lane not in self._beside:
            self._beside[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"tiercheck-{lane}")
        return self._beside[lane].submit(function)

    async def result(self, future: Future[T], *, what: str, deadline_s: float) -> T:
        return self._loop.result(future, what=what, deadline_s=deadline_s)

    async def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, deadline_s: float) -> T:
        return self._loop.call(coroutine, what=what, deadline_s=deadline_s)

    async def ends(self, future: Future[Any], deadline_s: float | None) -> bool:
        if sys.is_finalizing():  # no thread will ever end it
            deadline_s = 0
        return future.done() or bool(concurrent.futures.wait([future], timeout=deadline_s).done)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  the calling thread is to block

    def time(self) -> float:
        return time.monotonic()

    async def close(self, *, deadline_s: float = CLOSE_S) -> None:
        for each in self._beside.values():
            each.shutdown(wait=False, cancel_futures=True)
        self._loop.close(deadline_s)
