"""Waiting for what must not be left half-way, and for several things at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["abandonable", "each_of", "in_threads", "settled", "together"]

T = TypeVar("T")

WITHDRAWAL_S = 1.0
"""So long a cancelled call may take to withdraw its work, if nobody needs its end."""


async def settled(
    work: Awaitable[T],
    *,
    stop: Callable[[asyncio.Future[T]], object] = lambda task: None,
    undo: Callable[[T], Awaitable[object]] | None = None,
    within_s: float | None = None,
) -> T:
    """The result of ``work``. A caller that is cancelled waits for the end of it, and raises the cancellation then.

    ``stop`` is called at the cancellation: it may cancel the work, or tell a thread to end early. ``undo`` is given a
    result that the cancelled caller will not receive. ``within_s``: the work is cancelled after so long, and left to
    itself; ``None``: it has a deadline of its own. The undoing has one in any case.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop(task)
        await _end(task, within_s)
        if not task.cancel() and not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())
        raise


async def abandonable(work: Awaitable[T]) -> T:
    """The result of ``work``. If the caller is cancelled, so is the work; one that does not end then, such as a call to
    a mount that hangs, is left to itself."""
    return await settled(work, stop=lambda task: task.cancel(), within_s=WITHDRAWAL_S)


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. If one fails, or the caller is cancelled, the others are cancelled and waited for.

    Errors: the first one.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def each_of(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """``work`` of each item in turn, of so many at a time. Errors: as :func:`together`."""
    waiting = iter(items)

    async def take() -> None:
        for item in waiting:
            await work(item)

    await together(take() for _ in range(at_once))


async def in_threads(pieces: Iterable[T], work: Callable[[T], object], threads: int) -> None:
    """``work`` of each piece, by at most so many of the event loop's threads. On return none of them holds a piece, or
    ``work``.

    Errors: the first one; no further piece is begun then, nor if the caller is cancelled.
    """
    waiting, works = deque(pieces), [work]

    def drain() -> None:
        while works:
            try:
                piece = waiting.popleft()
            except IndexError:
                return
            works[0](piece)

    del work
    try:
        await together([asyncio.to_thread(drain) for _ in range(min(threads, len(waiting)))])
    finally:
        works.clear()
        waiting.clear()


async def _end(task: asyncio.Future[Any], within_s: float | None) -> None:
    """Wait until the task is done, whatever cancels the caller meanwhile: the first cancellation is raised anyway."""
    loop = asyncio.get_running_loop()
    until = None if within_s is None else loop.time() + within_s
    while not task.done() and (until is None or loop.time() < until):
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task}, timeout=None if until is None else until - loop.time())
