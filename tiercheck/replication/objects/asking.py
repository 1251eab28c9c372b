"""Asking a tier that may not answer, or not yet: what passes by itself is waited for, with a bound."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import TypeVar

from tiercheck.errors import NotFound, NothingListens, TierError, Transient
from tiercheck.hierarchy import OpenTier
from tiercheck.runtime.backoff import Backoff

__all__ = ["asked_twice", "first_answer", "patiently"]

log = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

RETRY = Backoff(0.1, 5.0)
SAY_S = 5.0
"""A tier that is waited for longer than this is named in the log."""
ASK_AGAIN_S = 0.05
"""After so long an object that was not found is asked for once more: only then is it taken for gone."""


async def asked_twice(ask: Callable[[], Awaitable[T]]) -> T:
    """An answer, where the first one may be that there is nothing. Errors: ``NotFound`` confirmed; ``TierError``."""
    try:
        return await ask()
    except NotFound:
        await asyncio.sleep(ASK_AGAIN_S)
        return await ask()


async def patiently(
    ask: Callable[[], Awaitable[T]], tier: OpenTier, retry_s: float, answer_s: float, insist: bool
) -> T | TierError:
    """The answer; or the last error, when the time for trying again is over or nothing has come in ``answer_s``; or,
    unless ``insist``, at once an error that does not pass by itself."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    retry_until, answer_until = began + retry_s, began + max(retry_s, answer_s)
    trouble = "it has not answered yet"
    say = "tier %s is waited for, for up to %.3g s: %s"
    saying = loop.call_later(SAY_S, lambda: log.warning(say, tier.name, answer_until - began, trouble))
    try:
        for failures in itertools.count(1):
            asking = asyncio.ensure_future(ask())
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be there to ask
            try:
                await asyncio.wait({asking}, timeout=answer_until - loop.time())
                if not asking.done():
                    return Transient(f"it has not answered within {loop.time() - began:.3g} s", tier=tier.driver.url)
            finally:
                asking.cancel()  # not waited for: a tier that does not answer may not hear of it either
            try:
                return asking.result()
            except TierError as error:
                passing = isinstance(error, Transient) and not isinstance(error, NothingListens)
                pause_s = RETRY.pause_s(failures)
                if loop.time() + pause_s > retry_until or not (passing or insist):
                    return error
                trouble = str(error)
                log.info("tier %s: %s; it is asked again", tier.name, error)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable: counting does not end")
    finally:
        saying.cancel()


async def first_answer(
    asks: Mapping[K, tuple[OpenTier, Callable[[], Awaitable[T]]]], deadline_s: float
) -> tuple[T | None, dict[K, TierError]]:
    """The first answer of several that are as good, or ``None``, and the errors by then. They are asked one after the
    other; the next one is also asked if nothing has come for a while, so that each has at least half of the time."""
    loop = asyncio.get_running_loop()
    until, patience_s = loop.time() + deadline_s, deadline_s / (2 * max(1, len(asks)))
    asking: dict[asyncio.Task[T | TierError], K] = {}
    errors: dict[K, TierError] = {}
    waiting = iter(asks.items())
    following = next(waiting, None)
    try:
        while following is not None or asking:
            if following is not None:
                key, (tier, ask) = following
                left_s = until - loop.time()
                asking[asyncio.ensure_future(patiently(ask, tier, left_s, left_s, False))] = key
                following = next(waiting, None)
            patience = None if following is None else patience_s
            done, _ = await asyncio.wait(asking, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer, key = task.result(), asking.pop(task)
                if not isinstance(answer, TierError):
                    return answer, errors
                errors[key] = answer
        return None, errors
    finally:
        for task in asking:
            task.cancel()
