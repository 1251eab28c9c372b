"""The process that folds, as its owner has it: here it is a task on the same loop, which a test can kill or hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec.structs import replace

from tests.simulation.virtual_time import run
from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.folding import owner
from tiercheck.folding.messages import Answer, Begun, FoldTarget, MayPublish, Serves, pack
from tiercheck.folding.owner import ENDS_MAX, FoldProcess, FoldProcessEnded
from tiercheck.folding.server import FoldServer
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold
from tiercheck.replication.fold_executor import FoldExecutor, Made, Outcome, Ready, Refused, Superfluous, Wanted
from tiercheck.streams.errors import NotExact

TARGET = FoldTarget("shm://run", "shm", certified=True)
BASE = ShardKey.base(1, 0, 0)
FOLD = Fold(BASE, (ShardKey.differential(1, 1, 1, 0), ShardKey.differential(1, 2, 2, 0)), 2)
MADE = Made(str(ShardKey.base(1, 2, 0)), 64, audited=True)


class End:
    """One end of a channel, and what the owner knows of the process behind it."""

    def __init__(self, pid: int, machine: Machine) -> None:
        self.pid = pid
        self.machine = machine
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
        if self.pid not in self.machine.ended:
            await asyncio.sleep(self.machine.end_s)
            self.machine.ended.append(self.pid)
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
        self.end_s = 0.0
        """Ending one takes so long."""
        self.ended: list[int] = []
        """What was ended."""
        self.process = FoldProcess(self.start)
        self.folds = self.process.at(TARGET)

    async def start(self) -> End:
        ours, theirs = End(len(self.started) + 1, self), End(0, self)
        ours.other, theirs.other = theirs, ours
        ours.task = asyncio.create_task(FoldServer(theirs, self.opens, 1).serve())
        self.started.append(ours)
        return ours

    @asynccontextmanager
    async def opens(self, target: FoldTarget) -> AsyncIterator[FoldExecutor]:
        assert target in (TARGET, replace(OTHER, url=target.url))
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


def test_at_its_owners_end_one_that_does_not_break_off_is_not_waited_for() -> None:
    async def story(machine: Machine) -> None:
        asked = asyncio.Event()

        async def hangs(wanted: Wanted) -> Outcome:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1e9)
            return await asyncio.sleep(30, Superfluous())

        machine.work = hangs
        machine.end_s = 1.0
        folding = asyncio.create_task(machine.folds.fold(FOLD, yes))
        await asked.wait()
        began = asyncio.get_running_loop().time()
        await machine.process.will_end()
        folding.cancel()
        await asyncio.wait([folding])
        await machine.process.close()
        assert folding.cancelled()
        assert machine.ended == [1]
        assert asyncio.get_running_loop().time() - began == pytest.approx(machine.end_s)

    played(story)


def test_cancelled_again_and_again_it_is_dead_before_the_call_returns() -> None:
    async def story(machine: Machine) -> None:
        asked, ended = asyncio.Event(), list[int]()

        async def hangs(wanted: Wanted) -> Outcome:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1e9)
            return await asyncio.sleep(1e9, MADE)

        machine.work = hangs
        machine.end_s = 5.0
        folding = asyncio.create_task(machine.folds.fold(FOLD, yes))
        folding.add_done_callback(lambda _: ended.extend(machine.ended))
        await asked.wait()
        for _ in range(20):
            folding.cancel()
            await asyncio.sleep(1)
        await asyncio.wait([folding])
        assert folding.cancelled()
        assert ended == [1], "the process, when the call returned"

    played(story)


def test_a_cancellation_while_a_fold_is_broken_off_for_an_error_is_raised() -> None:
    async def story(machine: Machine) -> None:
        async def slow(wanted: Wanted) -> Outcome:
            try:
                await wanted()
            finally:
                await asyncio.sleep(5)
            return MADE

        async def superseded() -> bool:
            raise Transient("nobody knows")

        machine.work = slow
        folding = asyncio.create_task(machine.folds.fold(FOLD, superseded))
        await asyncio.sleep(1)
        folding.cancel()
        await asyncio.wait([folding])
        assert folding.cancelled()

    played(story)


def test_one_that_is_cancelled_while_a_silent_process_is_ended_waits_for_that() -> None:
    async def story(machine: Machine) -> None:
        async def hangs(wanted: Wanted) -> Outcome:
            return await asyncio.sleep(1e9, MADE)

        machine.work, machine.end_s = hangs, 5.0
        folding = asyncio.create_task(machine.folds.fold(FOLD, yes))
        await asyncio.sleep(owner.WORK_S_MAX + 1)
        folding.cancel()
        await asyncio.wait([folding])
        assert (folding.cancelled(), machine.ended) == (True, [1])

    played(story)


def test_what_is_made_ready_may_not_take_as_long_as_a_fold() -> None:
    async def story(machine: Machine) -> None:
        async def hangs() -> Outcome:
            return await asyncio.sleep(1e9, Ready())

        machine.prepares = hangs
        begun = asyncio.get_running_loop().time()
        with pytest.raises(owner.FoldProcessEnded, match="it had not answered for 600 s"):
            await machine.folds.prepare(BASE)
        assert 600 <= asyncio.get_running_loop().time() - begun < 601

    played(story)


def test_closing_waits_for_the_end_of_an_idle_one() -> None:
    async def story(machine: Machine) -> None:
        machine.end_s = 5.0
        await machine.folds.fold(FOLD, yes)
        await asyncio.sleep(owner.IDLE_S + 1)
        await machine.process.close()
        assert machine.ended == [1]

    played(story)


OTHER = FoldTarget("shm://other", "shm", certified=True)


def test_the_wait_for_other_ranks_folds_is_no_silence() -> None:
    """One at a time: the last one ends when all have taken longer together than one of them may."""

    async def story(machine: Machine) -> None:
        async def long(wanted: Wanted) -> Outcome:
            await asyncio.sleep(0.4 * owner.WORK_S_MAX)
            return await machine.make(wanted)

        machine.work = long
        folds = [machine.process.at(replace(OTHER, url=f"shm://{rank}")) for rank in range(3)]
        assert await asyncio.gather(*(each.fold(FOLD, yes) for each in folds)) == [MADE] * 3
        assert len(machine.started) == 1

    played(story)


def test_one_that_waits_too_long_says_for_whom_and_harms_nobody() -> None:
    async def story(machine: Machine) -> None:
        async def long(wanted: Wanted) -> Outcome:
            await asyncio.sleep(0.9 * owner.WORK_S_MAX)
            return await machine.make(wanted)

        machine.work = long
        folds = [machine.process.at(replace(OTHER, url=f"shm://{rank}")) for rank in range(3)]
        first, second, third = await asyncio.gather(*(each.fold(FOLD, yes) for each in folds), return_exceptions=True)
        assert (first, second) == (MADE, MADE)
        assert isinstance(third, Transient) and not isinstance(third, FoldProcessEnded)
        assert "waited 3600 s for its turn: process 1 folds base" in str(third)
        assert "of shm://1 still; give folds more threads (--fold-threads, TIERCHECK_FOLD_THREADS)" in str(third)
        assert len(machine.started) == 1

    played(story)


def test_only_whose_work_had_begun_is_blamed_for_its_end() -> None:
    """A rank that waits for its turn behind one whose folds kill the process goes on folding."""

    async def story(machine: Machine) -> None:
        async def dies(wanted: Wanted) -> Outcome:
            machine.kill()
            return await asyncio.sleep(1e6, MADE)

        machine.work = dies
        other = machine.process.at(OTHER)
        for _ in range(ENDS_MAX):
            killing = asyncio.create_task(machine.folds.fold(FOLD, yes))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(other.fold(FOLD, yes))
            await asyncio.wait([killing, waiting])
            assert isinstance(waiting.exception(), FoldProcessEnded)
            await asyncio.sleep(60)
        assert isinstance(killing.result(), Refused)
        machine.work = machine.make
        assert await other.fold(FOLD, yes) == MADE

    played(story)


def test_one_that_ends_before_it_begins_anything_is_refused() -> None:
    async def story(machine: Machine) -> None:
        start = machine.start

        async def dead() -> End:
            end = await start()
            end.kill()
            return end

        process = FoldProcess(dead)
        folds = process.at(TARGET)
        for _ in range(ENDS_MAX - 1):
            with pytest.raises(FoldProcessEnded):
                await folds.fold(FOLD, yes)
            await asyncio.sleep(60)
        assert isinstance(await folds.fold(FOLD, yes), Refused)
        await process.close()

    played(story)


def test_one_that_hangs_before_it_serves_is_ended_and_in_the_end_refused() -> None:
    """Such as by an import from a file system that does not answer: that is no queue."""

    async def story(machine: Machine) -> None:
        hung: list[End] = []

        async def hangs() -> End:
            ours, theirs = End(len(hung) + 1, machine), End(0, machine)
            ours.other, theirs.other = theirs, ours
            ours.task = asyncio.create_task(asyncio.sleep(1e9))
            hung.append(ours)
            return ours

        process = FoldProcess(hangs)
        folds = process.at(TARGET)
        began = asyncio.get_running_loop().time()
        for _ in range(ENDS_MAX - 1):
            with pytest.raises(FoldProcessEnded, match="did not serve within 120 s of its start"):
                await folds.prepare(BASE)
            await asyncio.sleep(30)
        assert isinstance(await folds.prepare(BASE), Refused)
        assert asyncio.get_running_loop().time() - began < 700
        assert machine.ended == [1, 2, 3, 4]
        await process.close()

    played(story)


def test_one_that_serves_and_begins_nothing_is_ended_and_blamed() -> None:
    async def story(machine: Machine) -> None:
        async def idles() -> End:
            ours, theirs = End(1, machine), End(0, machine)
            ours.other, theirs.other = theirs, ours
            ours.task = asyncio.create_task(asyncio.sleep(1e9))
            theirs.send(pack(Serves()))
            return ours

        process = FoldProcess(idles)
        with pytest.raises(FoldProcessEnded, match="begun nothing for 3600 s") as ended:
            await process.at(TARGET).fold(FOLD, yes)
        assert ended.value.blamed
        await process.close()

    played(story)


@pytest.mark.parametrize("answers", [(MayPublish(0),), (Begun(0), Begun(0))], ids=["publishes first", "begins twice"])
def test_one_that_answers_out_of_turn_is_ended(answers: tuple[Answer, ...]) -> None:
    async def story(machine: Machine) -> None:
        async def errs() -> End:
            ours, theirs = End(1, machine), End(0, machine)
            ours.other, theirs.other = theirs, ours

            async def answer() -> None:
                await theirs.receive()
                for each in answers:
                    theirs.send(pack(each))
                await asyncio.sleep(1e9)

            ours.task = asyncio.create_task(answer())
            return ours

        process = FoldProcess(errs)
        with pytest.raises(FoldProcessEnded, match=f"sent {type(answers[-1]).__name__} out of turn"):
            await process.at(TARGET).fold(FOLD, yes)
        await process.close()

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
        assert f"killed by signal 9; that was end {ENDS_MAX} in a row under folds of shm://run; see the" in refused.why
        machine.work = machine.make
        await asyncio.sleep(60)
        assert await machine.process.at(TARGET).fold(FOLD, yes) == MADE, "others are not"

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
        refused = await machine.folds.fold(FOLD, yes)
        assert isinstance(refused, Refused) and not refused.until_captured
        assert f"what was asked of {BASE} in shm://run has failed: KeyError: 'x'; the log" in refused.why
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


def test_it_is_idle_since_the_last_of_several_folds() -> None:
    async def story(machine: Machine) -> None:
        async def long(wanted: Wanted) -> Outcome:
            await asyncio.sleep(owner.IDLE_S - 10)
            return await machine.make(wanted)

        short = asyncio.create_task(machine.folds.fold(FOLD, yes))
        await asyncio.sleep(0)
        machine.work, others = long, machine.process.at(OTHER)
        following = asyncio.create_task(others.fold(FOLD, yes))
        await asyncio.wait([short, following])
        await asyncio.sleep(owner.IDLE_S - 1)
        assert machine.process.pid == 1
        await asyncio.sleep(2)
        assert machine.process.pid is None

    played(story)


def test_one_that_cannot_be_started_says_so() -> None:
    async def story(machine: Machine) -> None:
        async def refuses() -> End:
            raise OSError("too many processes")

        process = FoldProcess(refuses)
        with pytest.raises(FoldProcessEnded, match="cannot be started: too many processes"):
            await process.at(TARGET).fold(FOLD, yes)
        await process.close()

    played(story)
