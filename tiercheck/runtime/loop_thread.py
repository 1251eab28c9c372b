"""An event loop in a thread of its own, for callers that are not async: the training loop is one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import selectors
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tiercheck.errors import DeadlineExceeded
from tiercheck.runtime.runtime import CLOSE_S

__all__ = ["LoopThread"]

T = TypeVar("T")

LIBRARY = str(Path(asyncio.__file__).parent.parent)
"""Python's own, with what may be installed in it."""
NAMED_MAX = 3
HELD_S = 0.05
"""A line that is the same after so long holds the loop."""
WAITS = selectors.DefaultSelector.select.__code__
"""What a loop is in that has nothing to do."""
ENDS = "the interpreter is ending, and its threads run no more; close the checkpointer at the end of the script"
CANCELLING = "tiercheck-cancels-what-runs"


class LoopThread:
    """Runs coroutines for a thread that cannot await. A daemon thread: it never keeps a dying process alive."""

    def __init__(self, name: str = "tiercheck") -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_debug(False)  # what a user's PYTHONASYNCIODEBUG is to tell of is the user's loop
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine; its result or error is the future's."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, deadline_s: float) -> T:
        """Run the coroutine and wait for its result.

        Errors: the coroutine's own; ``DeadlineExceeded`` (naming ``what``) after ``deadline_s`` seconds, when
        it is cancelled.
        """
        return self.result(self.submit(coroutine), what=what, deadline_s=deadline_s)

    def result(self, future: concurrent.futures.Future[T], *, what: str, deadline_s: float) -> T:
        """Wait for what :meth:`submit` has returned. Errors: as :meth:`call`."""
        if sys.is_finalizing():
            future.cancel()
            raise DeadlineExceeded(f"{what} cannot be done: {ENDS}")
        try:
            return future.result(timeout=deadline_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # just now; or with a TimeoutError of its own
                return future.result()
            future.cancel()
            raise DeadlineExceeded(f"{what} did not finish within {deadline_s:g} s{self._held()}") from None

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Cancel what still runs, and stop. Idempotent.

        Errors: ``DeadlineExceeded`` if what was cancelled does not end, or a call to the operating system, such as one
        to a hung file system, does not return; its thread stays, and the loop with it.
        """
        if self._closed or sys.is_finalizing():
            return
        self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=deadline_s)
        except concurrent.futures.TimeoutError:
            raise DeadlineExceeded(
                f"what still ran could not be stopped within {deadline_s:g} s: {self._running()}"
            ) from None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _held(self) -> str:
        """The line that holds the loop, so that nothing else of it runs: a driver that calls what blocks."""
        at = before = self._frame()
        if before is None or before.f_code is WAITS:
            return ""
        time.sleep(HELD_S)
        if self._frame() is not before:
            return ""
        while at is not None and is_pythons(at):
            at = at.f_back  # its caller is to blame
        if at is None or at.f_code is LoopThread._run.__code__:
            return ""
        return f": {place(at)} holds the event loop, which all tiers share; what blocks belongs in a thread"

    def _frame(self) -> FrameType | None:
        """The innermost one of the loop's thread."""
        return sys._current_frames().get(self._thread.ident or 0)

    def _running(self) -> str:
        """The line at which each task is that does not end."""
        tasks = (each for each in asyncio.all_tasks(self._loop) if each.get_name() != CANCELLING)
        places = sorted({found for each in tasks if (found := place_of(each))})
        more = [f"and {len(places) - NAMED_MAX} more"] if len(places) > NAMED_MAX else []
        return ", ".join([*places[:NAMED_MAX], *more]) or "a thread"


def place_of(task: asyncio.Task[Any]) -> str:
    """Where it waits: the innermost coroutine that is none of Python's own. Empty if it has ended just now."""
    coroutine: Any = task.get_coro()
    frame: FrameType | None = coroutine.cr_frame
    while (inner := getattr(coroutine := coroutine.cr_await, "cr_frame", None)) is not None:
        if not is_pythons(inner):
            frame = inner
    return "" if frame is None else place(frame)


def is_pythons(at: FrameType) -> bool:
    file = at.f_code.co_filename
    return file.startswith(LIBRARY) and "-packages" not in file


def place(at: FrameType) -> str:
    return f"{at.f_code.co_qualname} ({at.f_code.co_filename}:{at.f_lineno})"


async def _cancel_all() -> None:
    own = asyncio.current_task()
    assert own is not None
    own.set_name(CANCELLING)
    tasks = [task for task in asyncio.all_tasks() if task is not own]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
