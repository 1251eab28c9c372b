"""The process that folds, as its owner sees it: an agent, for all ranks of its node, or a trainer, for its own.

It is started when something is to be folded, and again if it has ended, after growing pauses. Its end costs the work
that was under way, and nothing else: no base is published without its owner's word. If it ends again and again under
one rank's work, that rank's bases are captured.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from tiercheck.errors import Transient
from tiercheck.folding.messages import (
    Answer,
    Ask,
    Begun,
    Cancel,
    Channel,
    Done,
    Failed,
    FoldTarget,
    MayPublish,
    Prepare,
    Replay,
    Serves,
    Verdict,
    WorkAnswer,
    pack,
    read_answer,
)
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold
from tiercheck.replication.fold_executor import FoldExecutor, Made, Outcome, Refused, Superfluous, Wanted
from tiercheck.runtime.backoff import Backoff
from tiercheck.runtime.waiting import settled

__all__ = ["FoldProcess", "FoldProcessEnded", "StartProcess", "StartedProcess"]

log = logging.getLogger(__name__)

ENDS_MAX = 4
"""So many ends of the process in a row under one rank's work: then its bases are captured."""
WHAT_TO_DO = (
    "see the log of the agent, or of the trainer if there is none. If the system ended this process for lack of "
    "memory, let fewer folds run at a time (--fold-threads, TIERCHECK_FOLD_THREADS). The next start of the job "
    "folds again"
)
AGAIN = Backoff(0.5, 30.0)
IDLE_S = 900.0
"""After so long without work it is ended, and its memory is free."""
START_S_MAX = 120.0
"""A process that does not serve so long after its start is ended: its imports may hang on a file system."""
PREPARE_S_MAX = 600.0
WORK_S_MAX = 3600.0
"""A process that has not answered so long after it has begun to make something ready, or to fold, is ended."""
QUEUE_S_MAX = 3600.0
"""Work that has not begun after so long, behind that of other ranks, is put off, and asked for again."""
CANCEL_S_MAX = 10.0


class FoldProcessEnded(Transient):
    """The process that folds has ended under the work. ``blamed``: that work may be why."""

    def __init__(self, message: str, *, blamed: bool = True) -> None:
        super().__init__(message)
        self.blamed = blamed


class StartedProcess(Channel, Protocol):
    """The owner's end of the channel, and the process behind it."""

    @property
    def pid(self) -> int: ...

    async def end(self) -> str:
        """Close the channel, end the process, and wait for that. Returns how it has ended, in words. Idempotent."""
        ...


StartProcess = Callable[[], Awaitable[StartedProcess]]
"""Errors: ``OSError``."""


@dataclass
class _Request:
    """What was asked of the process."""

    what: str
    seconds_max: float
    begun: bool = False
    answers: asyncio.Queue[WorkAnswer | None] = field(default_factory=asyncio.Queue)
    """``None``: the process has ended."""


class _Life:
    """One start of the process."""

    def __init__(self, process: StartedProcess) -> None:
        self.process = process
        self.ended = ""
        """How it has ended."""
        self.ended_at = 0.0
        self.last = False
        """No other one will be started: what is broken off ends it."""
        self._numbers = itertools.count()
        self._works: dict[int, _Request] = {}
        self._begun_at_the_end = False
        """Something was being done when it ended."""
        self._reading = asyncio.create_task(self._read(), name="what the fold process says")

    @property
    def idle(self) -> bool:
        return not self._works

    async def ask(self, ask: Prepare | Replay, wanted: Wanted) -> Outcome:
        seconds_max = PREPARE_S_MAX if isinstance(ask, Prepare) else WORK_S_MAX
        number, work = next(self._numbers), _Request(f"base {ask.base} of {ask.target.url}", seconds_max)
        self._works[number] = work
        self.process.send(pack(Ask(number, ask)))
        try:
            answer = await self._answered(number, work, wanted)
        except BaseException:
            await settled(self._break_off(number, work))
            raise
        finally:
            del self._works[number]
        if answer is None:
            raise FoldProcessEnded(self.ended, blamed=work.begun or not self._begun_at_the_end)
        if isinstance(answer, Failed):
            raise answer.error()
        return answer.outcome

    async def end(self, why: str = "") -> None:
        """On return the process is dead, also if the caller is cancelled meanwhile. Idempotent."""
        how = await settled(self.process.end())
        if not self.ended:
            self.ended = f"the process that folds ({self.process.pid}) has ended: {how}{f' ({why})' if why else ''}"
            self.ended_at = _now()
            self._begun_at_the_end = any(work.begun for work in self._works.values())
        for work in self._works.values():
            work.answers.put_nowait(None)
        if asyncio.current_task() is not self._reading:
            self._reading.cancel()

    async def _answered(self, number: int, work: _Request, wanted: Wanted) -> Done | Failed | None:
        """Once it has begun, and then once it is done. ``None``: the process has ended. Errors: ``Transient`` if other
        work has kept it from beginning in time; those of ``wanted``."""
        try:
            async with asyncio.timeout(QUEUE_S_MAX) as queued:
                answer = await work.answers.get()
        except TimeoutError:
            if not queued.expired():
                raise
            if others := "; ".join(other.what for other in self._works.values() if other.begun):
                raise Transient(
                    f"{work.what} has waited {QUEUE_S_MAX:g} s for its turn: process {self.process.pid} folds "
                    f"{others} still; give folds more threads (--fold-threads, TIERCHECK_FOLD_THREADS)"
                ) from None
            await self.end(f"it was ended, since it had begun nothing for {QUEUE_S_MAX:g} s")
            return None
        if isinstance(answer, Begun):
            try:
                async with asyncio.timeout(work.seconds_max) as working:
                    while isinstance(answer := await work.answers.get(), MayPublish):
                        self.process.send(pack(Verdict(number, await wanted())))
            except TimeoutError:
                if not working.expired():
                    raise
                await self.end(f"it was ended, since it had not answered for {work.seconds_max:g} s")
                return None
        if isinstance(answer, Begun | MayPublish):
            await self.end(f"it was ended, since it sent {type(answer).__name__} out of turn")
            return None
        return answer

    async def _break_off(self, number: int, work: _Request) -> None:
        """On return nothing of it is published any more."""
        if self.ended:
            return
        if self.last:
            await self.end()
            return
        self.process.send(pack(Cancel(number)))
        try:
            async with asyncio.timeout(CANCEL_S_MAX):
                while not isinstance(await work.answers.get(), Done | Failed | None):
                    pass
        except TimeoutError:
            await self.end(f"it was ended, since it did not break a fold off within {CANCEL_S_MAX:g} s")

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(START_S_MAX):
                self._take(read_answer(await self.process.receive()))
            while True:
                self._take(read_answer(await self.process.receive()))
        except TimeoutError:
            await self.end(
                f"it was ended, since it did not serve within {START_S_MAX:g} s of its start: see that Python and its "
                "packages can be read quickly where folds run"
            )
        except (EOFError, ValueError) as error:
            await self.end(str(error))

    def _take(self, answer: Answer) -> None:
        if not isinstance(answer, Serves) and (work := self._works.get(answer.id)) is not None:
            work.begun = True
            work.answers.put_nowait(answer)


class FoldProcess:
    """One process, for all that its owner folds. All methods run on one event loop."""

    def __init__(self, start: StartProcess) -> None:
        self._start = start
        self._life: _Life | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._ends = 0
        """In a row, without a base in between."""
        self._start_at = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        """An idle one is being ended."""

    @property
    def pid(self) -> int | None:
        """``None`` if none runs."""
        return None if self._life is None or self._life.ended else self._life.process.pid

    def at(self, target: FoldTarget) -> FoldExecutor:
        return _ProcessFoldExecutor(self, target)

    async def ask(self, work: Prepare | Replay, wanted: Wanted) -> Outcome:
        """Errors: :class:`FoldProcessEnded`; ``Transient`` if it is not to be started again yet; what the work has
        raised there."""
        life = await self._running()
        if self._idle is not None:
            self._idle.cancel()
        try:
            outcome = await life.ask(work, wanted)
        finally:
            if self._idle is not None:
                self._idle.cancel()  # that of another fold, which has ended meanwhile
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_if_idle)
        if isinstance(outcome, Made):
            self._ends = 0
        return outcome

    async def will_end(self) -> None:
        """Nobody waits for a fold any more: what is broken off from here on ends the process, and does not wait for its
        answer."""
        self._closed = True
        if self._life is not None:
            self._life.last = True

    async def close(self) -> None:
        """End the process. Idempotent."""
        await self.will_end()
        if self._idle is not None:
            self._idle.cancel()
        async with self._starting:
            if self._life is not None:
                await self._life.end()
        if self._ending is not None:
            await settled(self._ending)

    async def _running(self) -> _Life:
        async with self._starting:
            if self._closed:
                raise Transient("the process that folds is ended for good")
            if self._life is not None and not self._life.ended:
                return self._life
            if self._life is not None:
                log.warning("%s", self._life.ended)
                self._put_off(self._life.ended_at)
                self._life = None
            if (left_s := self._start_at - _now()) > 0:
                raise Transient(f"the process that folds has ended, and is started again in {left_s:.1f} s")
            try:
                self._life = _Life(await self._start())
                self._life.last = self._closed
            except OSError as error:
                self._put_off(_now())
                raise FoldProcessEnded(f"the process that folds cannot be started: {error}") from error
            log.info("the process that folds: %d", self._life.process.pid)
            return self._life

    def _put_off(self, since: float) -> None:
        self._ends += 1
        self._start_at = since + AGAIN.pause_s(self._ends)

    def _end_if_idle(self) -> None:
        if self._life is not None and self._life.idle and not self._life.ended:
            life, self._life = self._life, None
            self._ending = asyncio.ensure_future(life.end("nothing is to be folded"))


class _ProcessFoldExecutor:
    """One rank's folds in that process. See :class:`~tiercheck.replication.fold_executor.FoldExecutor`."""

    def __init__(self, process: FoldProcess, target: FoldTarget) -> None:
        self._process = process
        self._target = target
        self._ends = 0

    @property
    def where(self) -> str:
        pid = self._process.pid
        return "a process of its own" if pid is None else f"process {pid}"

    async def prepare(self, base: ShardKey) -> Outcome:
        async def wanted() -> bool:
            return False  # nothing is to be published

        return await self._asked(Prepare(self._target, str(base)), wanted)

    async def fold(self, fold: Fold, wanted: Wanted) -> Outcome:
        differentials = tuple(map(str, fold.differentials))
        outcome = await self._asked(Replay(self._target, str(fold.base), differentials, fold.version), wanted)
        if isinstance(outcome, Made | Superfluous):
            self._ends = 0
        return outcome

    async def _asked(self, work: Prepare | Replay, wanted: Wanted) -> Outcome:
        try:
            return await self._process.ask(work, wanted)
        except FoldProcessEnded as error:
            self._ends += error.blamed
            if self._ends < ENDS_MAX:
                raise
            why = f"{error.message}; that was end {self._ends} in a row under folds of {self._target.url}"
            return Refused(f"{why}; {WHAT_TO_DO}", until_captured=False)


def _now() -> float:
    return asyncio.get_running_loop().time()
