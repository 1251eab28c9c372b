"""How many differentials memory holds while what folds is being prepared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.processes import until
from tests.simulation import virtual_time
from tests.training import Training, memory
from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded
from tiercheck.hierarchy import Hierarchy
from tiercheck.keys import ShardKey
from tiercheck.opening.startup import _Startup
from tiercheck.policy import first_tier
from tiercheck.policy.first_tier import Holding, Sizes
from tiercheck.policy.folding import Fold
from tiercheck.recording import backlog
from tiercheck.recording.backlog import Backlog
from tiercheck.recording.modes import Base, Modes, RoomEvent
from tiercheck.recording.saves import Saves
from tiercheck.recording.waits import Wait
from tiercheck.replication.fold_controller import PREPARING
from tiercheck.replication.fold_executor import LocalFoldExecutor, Outcome
from tiercheck.replication.handle import MoverStatus
from tiercheck.replication.mover import Mover, MoverHandle
from tiercheck.runtime.machine import Machine
from tiercheck.runtime.runtime import TaskScheduler
from tiercheck.tiers.memory import MemoryDriver

LAST = 40
USUAL = 5 + 3


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What folds is ready when this is set. No differential is too small to count."""
    event, prepare = threading.Event(), LocalFoldExecutor.prepare

    async def late(self: LocalFoldExecutor, base: ShardKey) -> Outcome:
        assert await asyncio.to_thread(event.wait, 60)
        return await prepare(self, base)

    monkeypatch.setattr(LocalFoldExecutor, "prepare", late)
    monkeypatch.setattr(first_tier, "UNFOLDED_NBYTES", 0)
    return event


def attached(training: Training, tmp_path: Path, bases: str, first: str = "", **options: Any) -> Any:
    tiers = Hierarchy.of(first or f"{memory()}?size=1GiB", f"nvme://{tmp_path}/run?survives=rack")
    return training.attach(tiers, bases=bases, batch=5, **options)


def test_training_waits_for_what_folds_before_memory_holds_more_than_usual(
    tmp_path: Path, ready: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    checkpointer = attached(training, tmp_path, "fold", deadline_s=300.0)
    while checkpointer.stats.mover.not_folded != PREPARING:
        checkpointer.flush()
    for version in range(1, USUAL + 1):
        training.step(version)
    assert checkpointer.stats.drain_stall_s == 0
    on = Machine.on

    def asked(self: Machine[Any, Any], event: Any) -> Any:
        if self is room and event is RoomEvent.ASKED:
            ready.set()
        return on(self, event)

    room = checkpointer._job.recorder._modes.record_room
    monkeypatch.setattr(Machine, "on", asked)
    training.step(USUAL + 1)
    assert ready.is_set()
    assert checkpointer.stats.drain_stall_s > 0
    for version in range(USUAL + 2, LAST + 1):
        training.step(version)
    checkpointer.close()
    assert checkpointer.stats.bases == 1, "none but the opening base is captured"


@pytest.mark.parametrize("due", [USUAL + 1, 100])
def test_what_is_not_ready_within_half_of_the_deadline_is_not_waited_for(
    due: int,
    tmp_path: Path,
    ready: threading.Event,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether training meets it when a base is due, or when memory holds the usual number of differentials. It waits
    once, and not at each base."""
    waits: list[bool] = []
    room_for_base = Mover.room_for_base

    async def asked(self: Mover, *arguments: Any, patiently: bool = False) -> None:
        waits.append(patiently)
        await room_for_base(self, *arguments, patiently=patiently)

    monkeypatch.setattr(Mover, "room_for_base", asked)
    training = Training()
    checkpointer = attached(training, tmp_path, "fold", base_every=due)
    while checkpointer.stats.mover.not_folded != PREPARING:
        checkpointer.flush()
    for version in range(1, USUAL + 1):
        training.step(version)
    recorder = checkpointer._job.recorder
    recorder._backlog._deadline_s = 1.0
    recorder._bases._config = replace(recorder._bases._config, deadline_s=1.0)
    training.step(USUAL + 1)
    assert 0.5 <= checkpointer.stats.drain_stall_s < 60
    for version in range(USUAL + 2, LAST + 1):
        training.step(version)
    assert "what folds is not ready after" in caplog.text or f"base {due} is captured, and not folded" in caplog.text
    assert checkpointer.stats.bases > 1
    assert sum(waits) == (due < LAST)
    ready.set()
    checkpointer.close()
    again = Training()
    attached(again, tmp_path, "auto").abort()
    assert again.parameters() == training.states[LAST]


def test_auto_captures_the_bases_until_what_folds_is_ready(
    tmp_path: Path, ready: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in the first tier, as the folded ones would, and take as many differentials with them."""
    folding = _Startup.folding

    def folding_here(self: _Startup, agent: Any, bound: Any, *, apart: bool) -> Any:
        return folding(self, agent, bound, apart=True)

    monkeypatch.setattr(_Startup, "folding", folding_here)
    monkeypatch.setattr("tiercheck.opening.folding.no_processor_to_fold", lambda *_: "")
    training, first = Training(), memory()
    checkpointer = attached(training, tmp_path, "auto", first=first, base_every=100)
    while checkpointer.stats.mover.not_folded != PREPARING:
        checkpointer.flush()
    held = 0
    for version in range(1, LAST + 1):
        training.step(version)
        if version % 5 == 1:
            checkpointer.flush()  # the other tiers keep up
        objects = MemoryDriver(first.removeprefix("memory://")).store.objects
        held = max(held, sum("/differential/" in key for key in objects))
    assert held <= USUAL
    checkpointer.flush()
    assert checkpointer.stats.bases == 1 + LAST // 5
    ready.set()
    for version in range(LAST + 1, 2 * LAST + 1):
        training.step(version)
        checkpointer.flush()
    checkpointer.close()
    assert checkpointer.stats.mover.folded_bases > 0
    assert {int(path.stem) for path in tmp_path.rglob("base/*.safetensors")} == {0}
    again = Training()
    resumed = attached(again, tmp_path, "auto", first=first, base_every=100)
    resumed.abort()
    assert (resumed.version, again.parameters()) == (2 * LAST, training.states[2 * LAST])


@pytest.mark.parametrize("hangs", [False, True])
def test_a_base_that_is_due_comes_though_its_fold_takes_longer_than_memory_takes_to_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """The other ranks have no other base: one at another version would be committed by nobody. If the fold hangs, the
    next one that is due is captured."""
    folding, fold = threading.Event(), LocalFoldExecutor.fold

    async def slow(self: LocalFoldExecutor, what: Fold, wanted: Any) -> Outcome:
        assert what.version % due or await asyncio.to_thread(folding.wait, 60)
        return await fold(self, what, wanted)

    monkeypatch.setattr(LocalFoldExecutor, "fold", slow)
    monkeypatch.setattr(backlog, "FOLD_S_MAX", 0.1)
    begin = Backlog.__init__

    def small(self: Backlog, *given: Any, holding: Holding, **more: Any) -> None:
        begin(self, *given, holding=replace(holding, records_max=USUAL), **more)

    monkeypatch.setattr(Backlog, "__init__", small)
    folds_here = _Startup.folding
    monkeypatch.setattr(_Startup, "folding", lambda *given, apart: folds_here(*given, apart=True))
    monkeypatch.setattr("tiercheck.opening.folding.no_processor_to_fold", lambda *_: "")
    training, due = Training(), 10
    kept = 2 + due  # also if, on a slow machine, others are captured between the two
    checkpointer = attached(
        training, tmp_path, "auto", base_every=due, keep_last=kept, deadline_s=2.0 if hangs else 60.0
    )
    training.step(1)
    while not checkpointer.stats.mover.folds:
        checkpointer.flush()
    for version in range(2, due + 1):
        training.step(version)
    until(lambda: checkpointer.stats.mover.unfolded_bases == 1, "the base is left to the mover")
    if not hangs:
        threading.Timer(1.0, folding.set).start()
    for version in range(due + 1, 2 * due + 1):  # memory fills before the next one is due
        training.step(version)
    assert folding.is_set() is not hangs
    folding.set()
    checkpointer.close()
    assert {int(path.stem) for path in tmp_path.rglob("base/*.safetensors")} >= ({2 * due} if hangs else {due, 2 * due})
    assert checkpointer.stats.mover.watermark == 2 * due


class Unlisted(TaskScheduler):
    """Its tier does not answer in time."""

    async def call(self, coroutine: Coroutine[Any, Any, Any], *, what: str, deadline_s: float) -> Any:
        coroutine.close()
        raise DeadlineExceeded(f"{what} took longer than {deadline_s:g} s")


async def looking(
    bases: str, status: MoverStatus, scheduler: TaskScheduler, *, records_max: int = 50, deadline_s: float = 0.1
) -> tuple[Backlog, AsyncExitStack]:
    """A backlog above as many differentials as there may be before the first fold, and what closes its tier."""
    stack, config, modes = AsyncExitStack(), CheckpointConfig(bases=bases, deadline_s=deadline_s), Modes()
    tiers = await stack.enter_async_context(Hierarchy.of(memory()).open())
    for version in range(1, USUAL + 1):
        await tiers.first.driver.put(str(ShardKey.differential(1, version, version, 0)), [b"x"])
    holding = Holding(Sizes(1, 0, 1), 5, USUAL, USUAL, records_max=records_max)
    backlog = Backlog(
        tiers.first,
        cast(MoverHandle, SimpleNamespace(status=status)),
        scheduler,
        partial(Wait, scheduler, lambda: None, Saves(config, modes)),
        modes=modes,
        rank=0,
        holding=holding,
        config=config,
        folds=True,
    )
    return backlog, stack


@pytest.mark.parametrize(
    ("bases", "waited_s"),
    [
        ({"unfolded_bases": 1, "undrained_bases": 1}, 60.0),
        ({"undrained_bases": 1}, backlog.DRAIN_S_MAX),
        ({}, backlog.FOLD_S_MAX / 2),
    ],
    ids=["is folded", "is copied", "is copied already"],
)
def test_memory_that_is_full_of_differentials_gets_no_base_while_one_that_is_due(
    monkeypatch: pytest.MonkeyPatch, bases: dict[str, int], waited_s: float
) -> None:
    """A newer one would take its place in the durable tier, and no other rank has that."""
    monkeypatch.setattr(backlog, "FOLD_S_MAX", backlog.FOLD_S_MAX / 2)

    async def wait() -> tuple[float, bool]:
        scheduler = TaskScheduler()
        status = MoverStatus(folds=True, awaits_base=True, folded_bases=3, **cast(Any, bases))
        waiting, stack = await looking("auto", status, scheduler, records_max=USUAL, deadline_s=60.0)
        async with stack:
            began = scheduler.time()
            await waiting.admit()
            return scheduler.time() - began, waiting._modes.base.state is Base.DUE

    waited, captures = virtual_time.run(wait())
    assert (waited, captures) == (pytest.approx(waited_s, abs=0.1), True)


@pytest.mark.parametrize("has_room", [True, False])
def test_training_waits_for_no_first_fold_that_the_tiers_hold_back(
    monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """If they are away for hours, memory takes what it has room for."""
    monkeypatch.setattr(first_tier, "UNFOLDED_NBYTES", 0)

    async def admitted_at_once() -> bool:
        status = MoverStatus(prepares_folding=True, has_room=has_room)
        backlog, stack = await looking("fold", status, TaskScheduler())
        async with stack:
            await backlog.admit()
        return backlog._waits_for_folds  # else it has done so for half of the deadline

    assert asyncio.run(admitted_at_once()) is not has_room


def test_a_tier_that_is_not_listed_in_time_breaks_nothing_off() -> None:
    async def looked() -> bool:
        backlog, stack = await looking("auto", MoverStatus(prepares_folding=True), Unlisted())
        async with stack:
            await backlog.admit()
            return await backlog.stands_in()

    assert not asyncio.run(looked())
