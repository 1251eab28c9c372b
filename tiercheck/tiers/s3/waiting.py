"""Waiting for what must not be left half-way, and for several things at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["settled", "together"]

T = TypeVar("T")


async def settled(
    work: Coroutine[Any, Any, T],
    may_stop: Callable[[], bool] = lambda: False,
    undo: Callable[[T], Awaitable[object]] | None = None,
) -> T:
    """The result of ``work``, which comes to its end before a cancellation of the caller is raised.

    ``may_stop`` is asked at the cancellation whether the work may be cancelled as well; ``undo`` is given a result
    that the cancelled caller will not receive. Both the work and the undoing must have deadlines of their own.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if may_stop():
            task.cancel()
        while not task.done():
            # A second cancellation cannot hurry it either; the first one is raised below.
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())
        raise


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """All of them at once. If one fails the others are cancelled and waited for, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
