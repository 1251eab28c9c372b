"""One rank's state rebuilt apart from the other ranks: from outside of the job, or for ranks of another layout."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tiercheck.errors import RecoveryError
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.recovery.reading.reader import ANSWER_S, Lost, Reader, VerifiedPart
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.state import Rebuilt

__all__ = ["fitting", "rebuilt"]

log = logging.getLogger(__name__)

UNFIT = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What torch, its optimizers and users' objects raise if a state does not fit them."""


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """A context in which the errors of a state that does not fit become a ``RecoveryError``. ``what``: what failed, in
    words."""
    try:
        yield
    except UNFIT as error:
        raise RecoveryError(f"{what}: {type(error).__name__}: {error}") from error


async def rebuilt(
    reader: Reader, point: RecoveryPoint, own: Collection[Copy], scheduler: Scheduler
) -> tuple[VerifiedPart, Rebuilt] | None:
    """Read and verify what the reader's rank needs to reach ``point``, and replay it. ``own``: the rank's copies.
    ``None`` if no good copy of some version is left: ``reader.copies`` says which failed.

    Errors: ``RecoveryError`` if what was read cannot be put together; ``OutOfReach``; ``DeadlineExceeded``.
    """
    reading = reader.verify(point, own)
    # Which of the copies are read is not known yet.
    within_s = reader.deadline_s + reader.time_to_read(own) + ANSWER_S
    part = await scheduler.call(reading, what=f"reading what rank {reader.rank} has saved", deadline_s=within_s)
    if part is None:
        return None

    def make(threads: int) -> AsyncGenerator[Any, None]:
        return reader.runs(part, own, threads=threads)

    try:
        with fitting(f"{part.plan.anchor.key} and what follows it cannot be rebuilt"):
            return part, await reader.state.rebuild(part.base, part.start, make, scheduler)
    except Lost as error:
        log.warning("%s", error)
        return None
