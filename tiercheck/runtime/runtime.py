"""What a job reaches for outside of itself, as one value: where it waits, what it is told, what it draws and locks.

The core (opening, recovery, recording) is made of coroutines. They wait only by the :class:`Scheduler` that they are
given. Under the synchronous front it blocks the calling thread, while an event loop in another thread does the work
(:mod:`tiercheck.runtime.front`); in a simulation it suspends the task (:class:`TaskScheduler`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tiercheck.errors import DeadlineExceeded

__all__ = ["CLOSE_S", "Lock", "Runtime", "Scheduler", "TaskScheduler"]

T = TypeVar("T")

CLOSE_S = 60.0
"""How long what is cancelled may take to end, if nobody says."""


class Scheduler(Protocol):
    """An event loop, as the core uses it. A coroutine that the core hands over runs on the loop.

    The core's own coroutines run in the trainer's thread, which alone touches the training state. There they await
    nothing but these methods, their group, and one another.
    """

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine on the loop; its result or error is the future's."""
        ...

    def beside(self, function: Callable[[], T], *, lane: str = "base") -> Future[T]:
        """Run a function that blocks, such as the copy of a base, while training goes on; those of one lane one after
        the other."""
        ...

    async def result(self, future: Future[T], *, what: str, deadline_s: float) -> T:
        """Wait for what :meth:`start` has returned.

        Errors: the coroutine's own; ``DeadlineExceeded`` (naming ``what``) after ``deadline_s`` seconds, when it is
        cancelled.
        """
        ...

    async def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, deadline_s: float) -> T:
        """Run the coroutine on the loop and wait for its result. Errors: as :meth:`result`."""
        ...

    async def ends(self, future: Future[Any], deadline_s: float | None) -> bool:
        """Wait for the future, and leave it alone. Returns whether it is done; ``None``: wait until it is."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def time(self) -> float:
        """Seconds since some moment."""
        ...

    async def close(self, *, deadline_s: float = CLOSE_S) -> None:
        """Cancel what was started and still runs. Idempotent. Errors: ``DeadlineExceeded`` (naming it)."""
        ...


class Lock(Protocol):
    """What no other process holds meanwhile."""

    def release(self) -> None:
        """Idempotent."""
        ...


@dataclass(frozen=True)
class Runtime:
    """Everything that a job needs from its process and its machine, but for its group of ranks."""

    scheduler: Scheduler
    environment: Mapping[str, str]
    """The variables that launchers and users set."""
    token: Callable[[], str]
    """Draws a text that no other generation has."""
    lock: Callable[[Sequence[str], int, str], Lock]
    """Locks tiers (by URL) for one rank of the job that started under this name, on this node. Errors: ``JobConflict``.
    """
    start: str = ""
    """A name for this process's start that no other has."""
    processors: frozenset[int] = frozenset({0})
    """Those that this process is bound to."""
    quota: int | None = None
    """How many of them its control groups have time for, together with what else is in these groups."""


class TaskScheduler:
    """The scheduler of a job that is one of many tasks in a loop, as in a simulation. The loop's clock is the job's.

    ``delay``: how long each call of :meth:`beside` takes to begin, in seconds.
    """

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._delay = delay
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                future.cancel()
                return
            error = task.exception()
            if future.cancelled():
                return  # it ended all the same
            if error is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)

        task.add_done_callback(ended)
        future.add_done_callback(lambda done: done.cancelled() and task.cancel())
        return future

    def beside(self, function: Callable[[], T], *, lane: str = "base") -> Future[T]:
        async def later() -> T:
            await asyncio.sleep(self._delay())
            return function()

        return self.start(later())

    async def result(self, future: Future[T], *, what: str, deadline_s: float) -> T:
        if not await self.ends(future, deadline_s):
            future.cancel()
            raise DeadlineExceeded(f"{what} did not finish within {deadline_s:g} s")
        return future.result()

    async def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, deadline_s: float) -> T:
        return await self.result(self.start(coroutine), what=what, deadline_s=deadline_s)

    async def ends(self, future: Future[Any], deadline_s: float | None) -> bool:
        ended = asyncio.Event()
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(ended.set))
        waiting = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait({waiting}, timeout=deadline_s)
        finally:
            waiting.cancel()
        return future.done()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def time(self) -> float:
        return self._loop.time()

    async def close(self, *, deadline_s: float = CLOSE_S) -> None:
        own = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
