"""The process that folds, as its owner has it: here it is a task on the same loop, which a test can kill or hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.simulation.virtual_time import run
from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.folding import owner
from tiercheck.folding.messages import Place
from tiercheck.folding.owner import ENDS_MAX, FoldProcess, FoldProcessEnded
from tiercheck.folding.server import FoldServer
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold
from tiercheck.replication.folds import Folds, Made, Outcome, Ready, Refused, Superfluous, Wanted
from tiercheck.streams.state import NotExact

PLACE = Place("shm://run", "shm", certified=True)
BASE = ShardKey.base(1, 0, 0)
FOLD = Fold(BASE, (ShardKey.differential(1, 1, 1, 0), ShardKey.differential(1, 2, 2, 0)), 2)
MADE = Made(str(ShardKey.base(1, 2, 0)), 64, audited=True)


class End:
    """One end of a channel, and what the owner knows of the process behind it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.received: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other: End | None = None
        self.task: asyncio.Task[None] | None = None

    def send(self, message: bytes) -> None:
        if self.other is not None:
            self.other.received.put_nowait(message)

    async def receive(self) -> bytes:
        message = await self.received.get()
        if message is None:
            raise EOFError
        return message

    def close(self) -> None:
        if self.other is not None:
            self.other.received.put_nowait(None)

    def kill(self) -> None:
        assert self.task is not None
        self.task.cancel()
        self.received.put_nowait(None)

    async def end(self) -> str:
        self.kill()
        return "killed by signal 9"


class Machine:
    """Starts processes whose folds do as a test says."""

    def __init__(self) -> None:
        self.work: Callable[[Wanted], Awaitable[Outcome]] = self.make
        self.prepares: Callable[[], Awaitable[Outcome]] = self.ready
        self.started: list[End] = []
        self.published: list[int] = []
        self.opened = 0
        self.process = FoldProcess(self.start)
        self.folds = self.process.at(PLACE)

    async def start(self) -> End:
        ours, theirs = End(len(self.started) + 1), End(0)
        ours.other, theirs.other = theirs, ours
        ours.task = asyncio.create_task(FoldServer(theirs, self.opens, 1).serve())
        self.started.append(ours)
        return ours

    @asynccontextmanager
    async def opens(self, place: Place) -> AsyncIterator[Folds]:
        assert place == PLACE
        self.opened += 1
        try:
            yield _Folds(self)
        finally:
            self.opened -= 1

    async def ready(self) -> Outcome:
        return Ready()

    async def make(self, wanted: Wanted) -> Outcome:
        if not await wanted():
            return Superfluous()
        self.published.append(FOLD.version)
        return MADE

    def kill(self) -> None:
        self.started[-1].kill()


class _Folds:
    where = "there"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def prepare(self, base: ShardKey) -> Outcome:
        assert base == BASE
        return await self._machine.prepares()

    async def fold(self, fold: Fold, wanted: Wanted) -> Outcome:
        assert fold == FOLD
        return await self._machine.work(wanted)


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


def played(story: Callable[[Machine], Awaitable[None]]) -> None:
    async def play() -> None:
        machine = Machine()
        await story(machine)
        await machine.process.close()
        await asyncio.sleep(60)
        assert not machine.opened, "a first tier is open still"

    run(play())


def test_it_is_started_once_and_folds_what_it_is_told() -> None:
    async def story(machine: Machine) -> None:
        assert machine.folds.where == "a process of its own"
        assert await machine.folds.prepare(BASE) == Ready()
        assert await machine.folds.fold(FOLD, yes) == MADE
        assert (machine.published, len(machine.started), machine.folds.where) == ([2], 1, "process 1")

    played(story)


def test_nothing_is_published_without_its_owners_word() -> None:
    async def story(machine: Machine) -> None:
        assert await machine.folds.fold(FOLD, no) == Superfluous()

        async def superseded() -> bool:
            raise Transient("nobody knows")

        with pytest.raises(Transient, match="nobody knows"):
            await machine.folds.fold(FOLD, superseded)
        assert not machine.published

    played(story)


def test_a_cancelled_fold_is_broken_off_before_the_call_returns() -> None:
    async def story(machine: Machine) -> None:
        asked, ended = asyncio.Event(), []

        async def slow(wanted: Wanted) -> Outcome:
            asked.set()
            try:
                return await asyncio.sleep(1e6, MADE)
            finally:
                await asyncio.sleep(2)
                ended.append(True)

        machine.work = slow
        folding = asyncio.create_task(machine.folds.fold(FOLD, yes))
        await asked.wait()
        folding.cancel()
        await asyncio.wait([folding])
        assert (folding.cancelled(), ended, len(machine.started)) == (True, [True], 1)
        machine.work = machine.make
        assert await machine.folds.fold(FOLD, yes) == MADE

    played(story)


def test_one_that_does_not_answer_is_ended() -> None:
    async def story(machine: Machine) -> None:
        async def hangs(wanted: Wanted) -> Outcome:
            return await asyncio.sleep(1e9, MADE)

        machine.work = hangs
        with pytest.raises(FoldProcessEnded, match=r"\(1\) has ended: .* had not answered for 3600 s"):
            await machine.folds.fold(FOLD, yes)

    played(story)


def test_one_that_does_not_break_off_is_ended() -> None:
    async def story(machine: Machine) -> None:
        asked = asyncio.Event()

        async def hangs(wanted: Wanted) -> Outcome:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1e9)
            return await asyncio.sleep(1e9, MADE)

        machine.work = hangs
        folding = asyncio.create_task(machine.folds.fold(FOLD, yes))
        await asked.wait()
        folding.cancel()
        await asyncio.wait([folding])
        assert folding.cancelled()
        assert machine.process.pid is None, "it does not go on by itself"

    played(story)


def test_its_end_costs_the_work_and_it_is_started_again_after_a_pause() -> None:
    async def story(machine: Machine) -> None:
        async def dies(wanted: Wanted) -> Outcome:
            machine.kill()
            return await asyncio.sleep(1e6, MADE)

        machine.work = dies
        with pytest.raises(FoldProcessEnded, match=r"process that folds \(1\) has ended: killed by signal 9"):
            await machine.folds.fold(FOLD, yes)
        machine.work = machine.make
        with pytest.raises(Transient, match=r"is started again in 0\.5 s"):
            await machine.folds.fold(FOLD, yes)
        await asyncio.sleep(0.5)
        assert await machine.folds.fold(FOLD, yes) == MADE
        assert (len(machine.started), machine.published) == (2, [2])

    played(story)


def test_if_it_ends_again_and_again_under_a_ranks_work_that_rank_is_refused() -> None:
    async def story(machine: Machine) -> None:
        async def dies(wanted: Wanted) -> Outcome:
            machine.kill()
            return await asyncio.sleep(1e6, MADE)

        machine.work = dies
        for _ in range(ENDS_MAX - 1):
            with pytest.raises(FoldProcessEnded):
                await machine.folds.fold(FOLD, yes)
            await asyncio.sleep(60)
        refused = await machine.folds.fold(FOLD, yes)
        assert isinstance(refused, Refused)
        assert f"killed by signal 9; that was end {ENDS_MAX} in a row" in refused.why
        machine.work = machine.make
        await asyncio.sleep(60)
        assert await machine.process.at(PLACE).fold(FOLD, yes) == MADE, "others are not"

    played(story)


def test_what_cannot_be_folded_there_is_refused_and_a_tiers_error_is_raised() -> None:
    async def story(machine: Machine) -> None:
        async def full(wanted: Wanted) -> Outcome:
            raise CapacityExceeded("no room", tier="shm://run", key="k")

        async def unfit() -> Outcome:
            raise NotExact("no torch here")

        async def broken(wanted: Wanted) -> Outcome:
            raise KeyError("x")

        machine.work = full
        with pytest.raises(CapacityExceeded, match=r"no room \(tier 'shm://run', object 'k'\)"):
            await machine.folds.fold(FOLD, yes)
        machine.work = broken
        refused = Refused("the fold has failed: KeyError: 'x'", until_captured=False)
        assert await machine.folds.fold(FOLD, yes) == refused
        machine.prepares = unfit
        assert await machine.folds.prepare(BASE) == Refused("no torch here", until_captured=False)
        assert len(machine.started) == 1

    played(story)


def test_one_that_is_started_again_is_made_ready_before_it_folds() -> None:
    async def story(machine: Machine) -> None:
        async def unfit() -> Outcome:
            return Refused("no kernel", until_captured=False)

        machine.prepares = unfit
        assert await machine.folds.fold(FOLD, yes) == Refused("no kernel", until_captured=False)
        assert not machine.published

    played(story)


def test_an_idle_one_is_ended_and_one_is_started_for_the_next_fold() -> None:
    async def story(machine: Machine) -> None:
        await machine.folds.fold(FOLD, yes)
        await asyncio.sleep(owner.IDLE_S + 1)
        assert machine.process.pid is None
        assert await machine.folds.fold(FOLD, yes) == MADE
        assert machine.process.pid == 2

    played(story)


def test_one_that_cannot_be_started_says_so() -> None:
    async def story(machine: Machine) -> None:
        async def refuses() -> End:
            raise OSError("too many processes")

        process = FoldProcess(refuses)
        with pytest.raises(FoldProcessEnded, match="cannot be started: too many processes"):
            await process.at(PLACE).fold(FOLD, yes)
        await process.close()

    played(story)
