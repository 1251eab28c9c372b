"""Threads for calls that may never return, such as those of a file system whose server is gone.

The interpreter waits at its end for the threads of a :class:`concurrent.futures.ThreadPoolExecutor`, so that one such
call would keep a process that has failed from ever ending. These are daemons, and it waits for them for a while.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["DaemonThreads"]

T = TypeVar("T")

LAST_S = 5.0
"""For so long the end of the process waits for what threads are at."""


class DaemonThreads:
    """At most ``count`` threads, each made when it is first needed."""

    def __init__(self, count: int, name: str) -> None:
        self.ended: Future[None] = Future()
        """Done when :meth:`end` was called and no thread is at work any more."""
        self.ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._numbers = itertools.count()
        self._alive = 0
        self._ending = False
        _all.add(self)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """``call`` in one of the threads; cancelled, it is not begun. Errors: ``RuntimeError`` after :meth:`end`, when
        the process ends (as an executor of the standard library has it), and if no thread can be started."""
        if not threading.main_thread().is_alive():
            raise RuntimeError(f"{self._name}: nothing is begun after the interpreter's shutdown")
        future: Future[T] = Future()
        with self._guard:
            if self._ending:
                raise RuntimeError(f"{self._name}: the threads have ended")
            if not self._idle.acquire(blocking=False) and self._alive < self._count:
                name = f"{self._name}_{next(self._numbers)}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
                self._alive += 1
            self._jobs.put((future, call))
        return future

    def end(self) -> None:
        """Have the threads end when they have done what was submitted. Does not wait: see :attr:`ended`. Idempotent."""
        with self._guard:
            if self._ending:
                return
            self._ending = True
            if not self._alive:
                self.ended.set_result(None)
            for _ in range(self._alive):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001  (handed on to whoever waits)
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del job, future, call  # whatever they hold is the caller's alone
            self._idle.release()
        with self._guard:
            self._alive -= 1
            last = not self._alive
        if last:
            self.ended.set_result(None)


_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()


def _end_all() -> None:
    until = time.monotonic() + LAST_S
    threads = list(_all)
    for each in threads:
        each.end()
    for each in threads:
        with suppress(TimeoutError):
            each.ended.result(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_all.clear)  # a child has none of the threads
