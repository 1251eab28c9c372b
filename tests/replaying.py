"""Replays of runs that a test makes, under the synchronous front."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from tiercheck.runtime.front import ThreadScheduler, run
from tiercheck.streams.replay.replay import Replayed, replay_runs
from tiercheck.streams.replay.runs import Run
from tiercheck.streams.tensors.provider import StateProvider


async def one_by_one(runs: Iterator[Run]) -> AsyncGenerator[Run, None]:
    """Each is made when it is asked for, and not held here."""
    try:
        while found := [each] if (each := next(runs, None)) is not None else []:
            del each
            yield found.pop()
    finally:
        if hasattr(runs, "close"):
            runs.close()


def replayed_runs(provider: StateProvider, make: Callable[[int], Iterator[Run]], **options: Any) -> Replayed:
    """As :func:`replay_runs`."""
    scheduler = ThreadScheduler()
    try:
        return run(replay_runs(provider, lambda granted: one_by_one(make(granted)), scheduler, **options))
    finally:
        run(scheduler.close())
