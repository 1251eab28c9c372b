"""Blocking calls in threads of their own, each under a deadline, none of which can harm its caller once it is given up.

A foreign file system may block for as long as it likes, and a thread cannot be stopped. So a thread touches what is
its caller's (buffers) and what others see (publishing) only with its :class:`Ticket`, which is revoked when the
caller is cancelled or the deadline passes. Threads are daemons: one that hangs for good keeps no process alive.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar, cast

from tiercheck.errors import Closed, Transient
from tiercheck.runtime.waiting import settled
from tiercheck.types import Buffer, Payload

__all__ = ["Abandoned", "Ticket", "Workers"]

T = TypeVar("T")


class Abandoned(Exception):
    """Raised inside a thread whose caller was cancelled or has given up; never leaves the driver."""


class Ticket:
    """What a thread holds while its caller waits for it, with the buffers that the caller lends it.

    Buffers are reached through the ticket alone, never kept in a variable: whatever lives on of the thread (a frame
    that some exception refers to) refers to no buffer once the ticket is revoked.
    """

    def __init__(self, lent: Payload = ()) -> None:
        self._lock = threading.Lock()
        self._lent = list(lent)
        self._valid = True
        self.progress_s = time.monotonic()

    @contextmanager
    def borrowing(self) -> Iterator[list[Buffer]]:
        """Inside, the caller's buffers may be touched; keep it short. Raises :class:`Abandoned` once revoked."""
        with self._lock:
            self.check()
            yield self._lent

    def check(self) -> None:
        """Say that there is progress. Raises :class:`Abandoned` once revoked."""
        if not self._valid:
            raise Abandoned
        self.progress_s = time.monotonic()

    def revoke(self) -> None:
        """From now on the thread touches nothing of its caller's. Idempotent."""
        with self._lock:
            self._valid = False
            self._lent.clear()


class Workers:
    """At most ``count`` threads at a time. ``deadline_s``: the longest a call may go on without progress."""

    def __init__(self, count: int, deadline_s: float, name: str) -> None:
        self.deadline_s = deadline_s
        self._count = count
        self._name = name
        self._slots = asyncio.Semaphore(count)
        self._running: dict[Ticket, asyncio.Future[object]] = {}
        self._stuck: dict[str, asyncio.Future[object]] = {}
        self.closed = False

    async def run(self, work: Callable[[Ticket], T], *, writes: Iterable[str] = (), lent: Payload = ()) -> T:
        """``work(ticket)`` in a thread; ``lent``: buffers that it may read.

        ``writes``: what it changes, so that no later call overtakes one that hangs.

        Cancellation: waits until the thread has ended, up to the deadline; then the thread is left to itself.
        Errors: ``Transient`` if the deadline passes; ``Closed``; whatever ``work`` raises.
        """
        names = tuple(writes)
        await self._slot()
        try:
            for name in names:
                await self._settled(name)
        except BaseException:
            self._slots.release()
            raise
        ticket, future = self._start(work, lent)
        try:
            await settled(self._ended(ticket, future), stop=lambda _: ticket.revoke())
        except BaseException:
            if not future.done():
                for name in names:
                    self._stuck[name] = future
            raise
        finally:
            ticket.revoke()
        return cast(T, future.result())

    async def close(self) -> None:
        """Let no call begin, give those at work their deadline, and leave alone those that hang."""
        self.closed = True
        for ticket, future in list(self._running.items()):
            ticket.revoke()
            with suppress(Transient):
                await self._ended(ticket, future)

    def _start(self, work: Callable[[Ticket], T], lent: Payload) -> tuple[Ticket, asyncio.Future[object]]:
        loop = asyncio.get_running_loop()
        ticket = Ticket(lent)
        future: asyncio.Future[object] = loop.create_future()
        self._running[ticket] = future

        def settle(result: object, error: BaseException | None) -> None:
            self._slots.release()
            del self._running[ticket]
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
                future.exception()  # a caller that has given up does not ask for it

        def call() -> None:
            result, error = None, None
            try:
                result = work(ticket)
            except BaseException as raised:  # noqa: BLE001  (handed on to the caller)
                error = raised
            with suppress(RuntimeError):  # the loop is gone, and the caller with it
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=call, name=f"tiercheck {self._name}", daemon=True).start()
        return ticket, future

    async def _ended(self, ticket: Ticket, future: asyncio.Future[object]) -> None:
        """Wait for the thread. Errors: ``Transient`` if it makes no progress for as long as the deadline."""
        while not future.done():
            left_s = ticket.progress_s + self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise Transient(
                    f"the file system made no progress for {self.deadline_s:g} s; "
                    "see whether its server answers, or raise deadline="
                )
            await asyncio.wait({future}, timeout=left_s)

    async def _slot(self) -> None:
        """Wait for a free thread, as long as one of those at work makes progress."""
        while True:
            if self.closed:
                raise Closed("the driver is not open")
            with suppress(TimeoutError):
                async with asyncio.timeout(self.deadline_s):
                    await self._slots.acquire()
                    return
            last_s = max((ticket.progress_s for ticket in self._running), default=0.0)
            if time.monotonic() - last_s >= self.deadline_s:
                raise Transient(
                    f"all {self._count} calls that may be at work have made no progress for {self.deadline_s:g} s; "
                    "see whether the file system's server answers"
                )

    async def _settled(self, name: str) -> None:
        """Wait for an earlier call that changes ``name`` and that its caller has given up."""
        stuck = self._stuck.get(name)
        if stuck is None:
            return
        await asyncio.wait({stuck}, timeout=self.deadline_s)
        if not stuck.done():
            raise Transient("an earlier call that changes this object hangs in the file system, and may yet go through")
        if self._stuck.get(name) is stuck:
            del self._stuck[name]
