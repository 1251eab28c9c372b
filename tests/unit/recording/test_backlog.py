"""How many differentials memory holds while what folds is being prepared."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.training import Training, memory
from tiercheck.errors import SaveError
from tiercheck.hierarchy import Hierarchy
from tiercheck.keys import ShardKey
from tiercheck.opening.startup import _Startup
from tiercheck.policy import first_tier
from tiercheck.recording.modes import RoomEvent
from tiercheck.replication.fold_controller import PREPARING
from tiercheck.replication.fold_executor import LocalFoldExecutor, Outcome
from tiercheck.runtime.machine import Machine
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


def test_what_is_never_ready_is_named_when_the_wait_ends(tmp_path: Path, ready: threading.Event) -> None:
    training = Training()
    checkpointer = attached(training, tmp_path, "fold")
    while checkpointer.stats.mover.not_folded != PREPARING:
        checkpointer.flush()
    for version in range(1, USUAL + 1):
        training.step(version)
    checkpointer._job.recorder._backlog._deadline_s = 1.0
    with pytest.raises(SaveError, match=rf"holds {USUAL} differentials and has room for {USUAL}; .*no base after"):
        training.step(USUAL + 1)
    ready.set()
    checkpointer.abort()


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
