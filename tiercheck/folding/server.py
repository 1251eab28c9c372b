"""What the process that folds does with what it is asked. It decides nothing: its owner says what to fold, and, when
the base is made, whether it is wanted still."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

from tiercheck.errors import ConfigurationError, TierError
from tiercheck.folding.messages import (
    Answer,
    Ask,
    Begun,
    Cancel,
    Channel,
    Done,
    FoldTarget,
    MayPublish,
    Prepare,
    Replay,
    Request,
    Serves,
    failed,
    pack,
    read_request,
)
from tiercheck.keys import ShardKey, parse
from tiercheck.policy.folding import Fold
from tiercheck.replication.fold_executor import FoldExecutor, Outcome, Ready, Refused, Superfluous
from tiercheck.streams.errors import NotExact

__all__ = ["FoldServer", "OpenFoldExecutor"]

log = logging.getLogger(__name__)

END_S_MAX = 3.0
"""What is broken off at the end may take so long."""
OpenFoldExecutor = Callable[[FoldTarget], AbstractAsyncContextManager[FoldExecutor]]
"""Opens a first tier for one piece of work: nothing is held there between folds. Errors: ``NotExact`` if nothing can be
folded in this process; ``TierError``; ``ConfigurationError``."""


@dataclass
class _Work:
    task: asyncio.Task[Answer]
    verdicts: asyncio.Queue[bool] = field(default_factory=asyncio.Queue)


class FoldServer:
    """Answers one owner. ``at_once``: so many folds run at a time."""

    def __init__(self, channel: Channel, opens: OpenFoldExecutor, at_once: int) -> None:
        self._channel = channel
        self._opens = opens
        self._free = asyncio.Semaphore(at_once)
        self._prepared: set[FoldTarget] = set()
        self._under_way: dict[int, _Work] = {}

    async def serve(self) -> None:
        """Until the owner is gone. What was under way then is broken off, and nothing of it is published."""
        self._channel.send(pack(Serves()))
        try:
            while True:
                self._take(read_request(await self._channel.receive()))
        except EOFError:
            pass
        finally:
            tasks = [work.task for work in self._under_way.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=END_S_MAX)

    def _take(self, request: Request) -> None:
        if isinstance(request, Ask):
            task = asyncio.create_task(self._answer(request))
            self._under_way[request.id] = _Work(task)
            task.add_done_callback(partial(self._ended, request.id))
        elif (work := self._under_way.get(request.id)) is None:
            return  # it is done already
        elif isinstance(request, Cancel):
            work.task.cancel()
        else:
            work.verdicts.put_nowait(request.wanted)

    def _ended(self, number: int, task: asyncio.Task[Answer]) -> None:
        del self._under_way[number]
        self._channel.send(pack(Done(number, Superfluous()) if task.cancelled() else task.result()))

    async def _answer(self, ask: Ask) -> Answer:
        try:
            return Done(ask.id, await self._worked(ask))
        except TierError as error:
            return failed(ask.id, error)
        except (NotExact, ConfigurationError) as error:
            return Done(ask.id, Refused(str(error), until_captured=False))
        except Exception as error:
            what = f"what was asked of {ask.work.base} in {ask.work.target.url} has failed"
            log.exception("%s: this is a fault of TierCheck, or of a driver or optimizer that is plugged in", what)
            why = f"{what}: {type(error).__name__}: {error}; the log of the process that folds says where"
            return Done(ask.id, Refused(f"{why}. The next start folds again", until_captured=False))

    async def _worked(self, ask: Ask) -> Outcome:
        work = ask.work

        async def wanted() -> bool:
            self._channel.send(pack(MayPublish(ask.id)))
            return await self._under_way[ask.id].verdicts.get()

        async with self._free:
            self._channel.send(pack(Begun(ask.id)))
            async with self._opens(work.target) as folds:
                if work.target not in self._prepared or isinstance(work, Prepare):
                    outcome = await folds.prepare(_shard(work.base))
                    if not isinstance(outcome, Ready) or isinstance(work, Prepare):
                        return outcome
                    self._prepared.add(work.target)
                return await folds.fold(_fold(work), wanted)


def _fold(work: Replay) -> Fold:
    return Fold(_shard(work.base), tuple(map(_shard, work.differentials)), work.version)


def _shard(text: str) -> ShardKey:
    key = parse(text)
    if not isinstance(key, ShardKey):
        raise ConfigurationError(f"{text!r} is no shard")
    return key
