"""How everything that a job has taken is given back."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training import Training, memory
from tiercheck.errors import DeadlineExceeded, TierError
from tiercheck.hierarchy import Hierarchy
from tiercheck.opening.job import Resources

STEPS = ("recorder", "mover_life", "fold_process", "agent", "tiers", "scheduler")


class Part:
    """Of what a job holds. It ends as it is told, and is counted."""

    def __init__(self, name: str, ended: list[str], error: BaseException | None) -> None:
        self._name, self._ended, self._error = name, ended, error

    async def close(self, **_: float) -> None:
        self._ended.append(self._name)
        if self._error is not None:
            raise self._error

    stop = end = close

    async def will_end(self) -> None:
        """It is told, and goes on."""

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def resources(ended: list[str], failing: str, error: BaseException) -> Resources:
    parts: Any = {each: Part(each, ended, error if each == failing else None) for each in STEPS}

    async def call(coroutine: Any, what: str) -> Any:
        return await coroutine

    group = SimpleNamespace(close=lambda: ended.append("group"))
    held: Any = {
        "ranks": SimpleNamespace(scheduler=parts.pop("scheduler"), group=group, call=call, deadline_s=1.0),
        "process_lock": SimpleNamespace(release=lambda: ended.append("process_lock")),
    }
    return Resources(**held, **parts)


@pytest.mark.parametrize("failing", STEPS)
@pytest.mark.parametrize(
    "error", [DeadlineExceeded("it did not finish within 1 s"), TierError("no"), KeyboardInterrupt()], ids=repr
)
async def test_what_fails_in_being_given_back_keeps_nothing_else(
    failing: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []
    held = resources(ended, failing, error)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            await held.give_back()
    else:
        await held.give_back()
        assert str(error) in caplog.text
    # Something may still be copied into the tiers' memory if the recorder has not ended.
    wanted = [each for each in (*STEPS, "process_lock", "group") if (failing, each) != ("recorder", "tiers")]
    assert ended == wanted
    assert ("the tiers stay open" in caplog.text) is (failing == "recorder")


def test_a_copy_that_does_not_end_ends_neither_the_process_nor_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Its memory stays, and whoever attaches next finds nothing that is locked."""
    training, tier, stuck = Training(), memory(), threading.Event()
    checkpointer = training.attach(Hierarchy.of(tier), deadline_s=2.0)
    job: Any = checkpointer._job
    training.step(1)
    job.recorder._bases._copier._newest.published = job.ranks.scheduler.beside(lambda: stuck.wait(60))
    try:
        checkpointer.abort()
        assert "base 0 is still copied, after 2 s more" in caplog.text
        assert "the tiers stay open until this process ends" in caplog.text
    finally:
        stuck.set()
    again = Training().attach(Hierarchy.of(tier))
    again.abort()
    assert again.version == 1
