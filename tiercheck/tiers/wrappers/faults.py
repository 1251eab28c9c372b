"""What a driver raises beside errors: it is the driver's, and ends nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tiercheck.errors import TierError
from tiercheck.tiers.wrappers.base import Call

__all__ = ["StagedDeath", "faults_as_errors"]


class StagedDeath(BaseException):
    """Raised by tests in the place of a process's death: it goes through everything."""


@contextmanager
def faults_as_errors(tier: str, call: Call) -> Iterator[None]:
    """Inside, a driver is called. What it raises that is no ``Exception`` becomes a ``TierError``: the panic of a
    client in Rust, a ``SystemExit``, and a cancellation that nobody has asked this task for, as a client lets one of
    its own through. Each of these would end the task that called it, or the event loop, without a word of the tier."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit, StagedDeath):
        raise
    except BaseException as fault:
        task = asyncio.current_task()
        if isinstance(fault, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        said = f": {fault}" if str(fault) else ""
        raise TierError(
            f"the driver raised {type(fault).__name__}{said} from {call.operation}, which is no error", tier=tier
        ) from fault
