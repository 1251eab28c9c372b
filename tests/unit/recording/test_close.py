"""Ends of a job, the good and the bad: nothing is left behind, and nothing is said that is not so."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.training import Training, faulty, memory
from tiercheck.errors import Corruption, DeadlineExceeded, SaveError, Transient
from tiercheck.format.container import Shard
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import ShardKey
from tiercheck.runtime.loop_thread import LoopThread
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Moment
from tiercheck.tiers.wrappers import PrefixedDriver


def test_a_job_that_failed_leaves_no_hooks_behind() -> None:
    hierarchy = Hierarchy.of(memory())
    training = Training()
    with pytest.raises(ZeroDivisionError), training.attach(hierarchy):
        training.step(1)
        raise ZeroDivisionError
    with training.attach(hierarchy) as checkpointer:
        training.step(2)
    assert checkpointer.version == 2


def failing_at_its_end(training: Training, tier: str) -> list[str]:
    """Attached, with three actions at the end, of which two fail; returns what was run."""
    ran: list[str] = []

    def action(name: str, *, fails: bool) -> None:
        ran.append(name)
        if fails:
            raise ValueError(f"{name} failed")

    checkpointer = training.attach(Hierarchy.of(tier))
    for name, fails in (("first", True), ("second", False), ("third", True)):
        checkpointer.on_end(partial(action, name, fails=fails))
    return ran


@pytest.mark.parametrize("end", ["abort", "close"])
def test_an_action_at_the_end_that_fails_keeps_nothing_from_being_given_back(end: str) -> None:
    training, tier = Training(), memory()
    ran = failing_at_its_end(training, tier)
    with pytest.raises(ValueError, match="first failed") as caught:
        getattr(training.checkpointer, end)()
    assert ran == ["first", "second", "third"]
    assert caught.value.__notes__ == ["then, at the end: ValueError: third failed"]
    assert [each.__name__ for each in training.optimizer._optimizer_step_pre_hooks.values()] == ["warn"]
    Training().attach(Hierarchy.of(tier)).abort()  # its tiers are free


def test_an_action_at_the_end_that_fails_does_not_hide_why_the_job_ended() -> None:
    training = Training()
    failing_at_its_end(training, memory())
    with pytest.raises(ArithmeticError, match="of the loop") as caught, training.checkpointer:
        raise ArithmeticError("of the loop")
    assert [note[-12:] for note in caught.value.__notes__] == ["first failed", "third failed"]


def test_what_is_asked_of_a_closed_checkpointer_is_refused() -> None:
    checkpointer = Training().attach(Hierarchy.of(memory()))
    checkpointer.close()
    for ask in (checkpointer.flush, checkpointer.tier_bytes):
        with pytest.raises(SaveError, match="the checkpointer is closed"):
            ask()


def test_a_loop_that_cannot_be_stopped_says_so() -> None:
    loop, hung = LoopThread(), threading.Event()
    future = loop.submit(asyncio.to_thread(hung.wait, 30))
    try:
        with pytest.raises(DeadlineExceeded, match=r"could not be stopped within 0.05 s: a thread"):
            loop.close(0.05)
        loop.close()
    finally:
        hung.set()
        loop._loop.call_soon_threadsafe(loop._loop.stop)
        loop._thread.join(10)
    assert not loop._thread.is_alive()
    assert future.cancelled() or future.done()


def test_who_holds_the_loop_is_named() -> None:
    loop, holds = LoopThread(), threading.Event()

    async def blocks() -> None:
        holds.wait(30)

    async def waits() -> None:
        await asyncio.sleep(30)

    try:
        with pytest.raises(DeadlineExceeded, match=r"^putting did not finish within 0.05 s$"):
            loop.call(waits(), what="putting", deadline_s=0.05)
        held = loop.submit(blocks())
        with pytest.raises(DeadlineExceeded, match=r"within 0.05 s: .*blocks \(.* holds the event loop"):
            loop.call(waits(), what="putting", deadline_s=0.05)
    finally:
        holds.set()
    held.result(10)
    loop.close()


def test_close_waits_no_longer_than_its_deadline_for_a_driver_that_swallows_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = threading.Event()

    class Deaf(PrefixedDriver):
        async def put(self, *args: Any, **named: Any) -> Any:
            while deaf.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
            return await super().put(*args, **named)

    training = Training()
    tier = Tier(f"nvme://{tmp_path}?survives=rack", wrap=lambda driver: Deaf(driver, "x"))
    checkpointer = training.attach(Hierarchy.of(memory(), tier), deadline_s=2.0)
    deaf.set()
    training.step(1)
    try:
        with pytest.raises(SaveError):
            checkpointer.close()
    finally:
        deaf.clear()
    (said,) = [each for each in caplog.messages if "ending what still runs" in each]
    assert "within 2 s" in said
    assert "Deaf.put" in said


def test_flush_does_not_return_where_a_tier_cannot_be_seen(tmp_path: Path) -> None:
    blind = threading.Event()
    unseen = Fault(
        lambda at: blind.is_set() and at.call == "list" and at.moment is Moment.BEFORE,
        lambda: Transient("blind"),
        2**30,
    )
    plan = FaultPlan((unseen,))
    first = Tier(memory(), name="first", wrap=lambda driver: FaultyDriver(driver, plan))
    training = Training()
    checkpointer = training.attach(Hierarchy.of(first, f"nvme://{tmp_path}?survives=rack"), deadline_s=1.0)
    blind.set()
    training.step(1)
    with pytest.raises(SaveError, match=r"first: .*listing: blind"):
        checkpointer.flush()
    blind.clear()
    checkpointer.abort()


def test_what_came_before_is_flushed_where_the_last_version_cannot_be_saved(tmp_path: Path) -> None:
    training = Training()
    tier = faulty(memory(), lambda at: at.call == "publish" and "000000000002-" in str(at.key))
    hierarchy = Hierarchy.of(tier, f"nvme://{tmp_path}?survives=rack")
    training.says_end = False  # so that the last iteration ends when the checkpointer closes
    checkpointer = training.attach(hierarchy)
    training.step(1)
    training.step(2)
    with pytest.raises(SaveError, match="version 2 could not be saved"):
        checkpointer.close()
    (kept,) = tmp_path.glob("r*/g*/differential/*")
    assert kept.stem == "000000000001-000000000001"


UNCLOSED = """
import asyncio, logging, sys, threading
from tests.training import Training, memory
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.tiers.wrappers.base import Operation, WrappingDriver

logging.basicConfig(level=logging.INFO)
moving, ending = threading.Event(), threading.Event()

class UntilTheEnd(WrappingDriver):
    async def around(self, call, work):
        if call.operation is Operation.PUT and "differential/000000000002" in call.key:
            moving.set()
            await asyncio.to_thread(ending.wait, 60)
            await asyncio.to_thread(threading.main_thread().join, 0.5)
        return await work()

training = Training()
training.attach(Hierarchy.of(memory(), Tier(sys.argv[1], wrap=UntilTheEnd)), batch=1)
training.step(1)
training.step(2)
assert moving.wait(30)
ending.set()
print("the last line of the script", file=sys.stderr)
"""


def test_a_process_that_ends_without_close_says_what_was_not_finished_and_nothing_else(
    tmp_path: Path, forks: Forks
) -> None:
    code, printed = forks.run_script(UNCLOSED, f"nvme://{tmp_path}/tier?survives=rack", folder=tmp_path)
    assert code == 0, printed
    said = printed.partition("the last line of the script\n")[2].splitlines()
    assert len(said) == 1, printed
    assert "the process ends before everything that was captured is where it belongs" in said[0]
    assert "copying r00000/g000001/differential/000000000002-000000000002.safetensors" in said[0]


@pytest.mark.parametrize("on_save_error", ["fail", "warn"])
def test_a_job_is_told_of_damage_at_its_end_as_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_save_error: str
) -> None:
    """What was damaged in memory before it was copied on is a failed save, as any other."""

    def verify(shard: Shard) -> None:
        if shard.metadata.key.first == 1:
            raise Corruption("a bit fell over", tier=shard.tier, key=shard.key)

    monkeypatch.setattr(Shard, "verify", verify)
    training = Training()
    checkpointer = training.attach(
        Hierarchy.of(memory(), f"nvme://{tmp_path}?survives=rack"), on_save_error=on_save_error
    )
    training.step(1)
    if on_save_error == "fail":
        with pytest.raises(SaveError, match="flushing the tiers: 1 captured objects were damaged"):
            checkpointer.close()
    else:
        checkpointer.close()
        assert "1 captured objects were damaged" in caplog.text


@pytest.mark.parametrize("damaged", [ShardKey.differential(1, 2, 2, 0), ShardKey.base(1, 0, 0)], ids=str)
def test_what_was_damaged_before_it_was_copied_on_is_made_up_for_by_a_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: ShardKey
) -> None:
    def verify(shard: Shard) -> None:
        if shard.metadata.key == damaged:
            raise Corruption("a bit fell over", tier=shard.tier, key=shard.key)

    monkeypatch.setattr(Shard, "verify", verify)
    durable = f"nvme://{tmp_path}?survives=rack"
    training = Training()
    checkpointer = training.attach(Hierarchy.of(memory(), durable), base_every=100, batch=2)
    training.step(1)
    training.step(2)
    with contextlib.suppress(SaveError):  # a base that has been made already is as good
        checkpointer.flush()
    training.step(3)  # at the latest this one gets a base
    training.step(4)
    checkpointer.flush()
    assert checkpointer.stats.mover.base_needed_after is None
    checkpointer.close()
    after = Training()
    after.attach(Hierarchy.of(memory(), durable)).abort()  # the node and its memory are lost
    assert (after.checkpointer.version, after.parameters()) == (4, training.states[4])


def test_a_mover_that_has_ended_says_why_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr("tiercheck.replication.mover.to_commit", lambda seen, tier: [][0])
    checkpointer = training.attach(Hierarchy.of(memory()))  # later, a mover that is at rest would not ask
    with pytest.raises(SaveError):
        checkpointer._job.mover_life.ended.result(timeout=20)
    with pytest.raises(SaveError, match="has ended the mover: IndexError"):
        training.step(1)
    assert "IndexError" in checkpointer.stats.mover.errors["mover"]
    checkpointer.abort()
