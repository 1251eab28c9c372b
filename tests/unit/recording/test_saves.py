"""What a user is told of saves that fail, and of waits for the tiers."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import cast

import pytest

from tiercheck.config import CheckpointConfig
from tiercheck.errors import JobConflict, SaveError, Transient
from tiercheck.recording import saves
from tiercheck.recording.modes import Modes
from tiercheck.recording.saves import Saves, ask_mover
from tiercheck.replication.handle import MoverHandle, MoverStatus
from tiercheck.runtime.runtime import TaskScheduler


def test_of_saves_that_fail_in_a_row_fewer_and_fewer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A tier may be away for hours."""
    failing = Saves(CheckpointConfig(on_save_error="warn"), Modes())
    for version in (*range(1, 10), 20):
        with failing.saving(version):
            raise Transient("503 slow down")
        assert failing.failed(version, SaveError("its base, too")), "training goes on"
    told = [each.getMessage().partition(":")[0] for each in caplog.records if "slow down" in each.getMessage()]
    assert told == [f"version {version} could not be saved" for version in (1, 2, 4, 8, 20)]
    assert "(8 versions in a row); training goes on" in caplog.text
    assert failing.stats.failed_saves == 20


class Held:
    """A mover whose tiers do not take what they are to take."""

    status = MoverStatus(errors={"nvme": "the file system is full"}, held_up_by="differential 3 is not in nvme")


class Telling(logging.Handler):
    def __init__(self, told: asyncio.Event) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a wait is told of, which is soon."""
    monkeypatch.setattr(saves, "TELL_S", 0.01)
    event = asyncio.Event()
    monkeypatch.setattr(saves.log, "handlers", [Telling(event)])
    return event


@pytest.mark.parametrize("error", [None, Transient("503 slow down"), JobConflict("generation 2 has opened")])
async def test_a_long_wait_is_told_while_it_lasts(
    error: Exception | None, told: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    async def drain() -> None:
        await told.wait()
        if error is not None:
            raise error

    expected = {Transient: SaveError, JobConflict: JobConflict}.get(type(error))  # type: ignore[arg-type]  # None too
    asking = ask_mover(TaskScheduler(), cast(MoverHandle, Held()), drain(), "flushing the tiers", 60.0)
    if expected is None:
        await asking
    else:
        with pytest.raises(expected, match=str(error)):
            await asking
    said = (
        "flushing the tiers is waited for, for up to 60 s: differential 3 is not in nvme; nvme: the file system is full"
    )
    assert said in caplog.text


async def test_who_waits_for_folding_to_be_prepared_is_told_so(
    told: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """And not that a batch is not full."""

    class Preparing:
        status = MoverStatus(held_up_by="version 8 has not reached nvme", prepares_folding=True, not_folded="preparing")

    for folds, expected in ((True, "preparing"), (False, "version 8 has not reached nvme")):
        told.clear()
        asked = ask_mover(TaskScheduler(), cast(MoverHandle, Preparing()), told.wait(), "room", 60.0, folds=folds)
        await asked
        assert f"room is waited for, for up to 60 s: {expected}" in caplog.text


def test_a_flush_is_not_held_up_by_a_base_of_the_first_tier_alone() -> None:
    status = MoverStatus(held_up_by="no base after version 56 is folded yet", awaits_base=True, folds=True)
    assert status.holds_up == status.held_up_by
    assert not status.holds_up_a_flush
    assert replace(status, unfolded_bases=1).holds_up_a_flush == status.held_up_by, "one is due"
    assert replace(status, errors={"s3": "503"}).holds_up_a_flush == "s3: 503"
    prepares = replace(status, not_folded="folding is still being prepared")
    assert prepares.holds_up == "no base after version 56 is folded yet: folding is still being prepared"
    assert not prepares.holds_up_a_flush
    captured = MoverStatus(held_up_by="base 0 is not known to have come whole to s3 from rank 3", awaits_base=True)
    assert captured.holds_up_a_flush == captured.held_up_by


async def test_a_wait_that_is_broken_off_leaves_nothing_running() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(
        ask_mover(TaskScheduler(), cast(MoverHandle, Held()), drain(), "flushing the tiers", 60.0)
    )
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(ended.wait(), 10.0)
