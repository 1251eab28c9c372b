"""The process that folds for a trainer: ``kill -9`` at any point of a fold costs the work, and the owner's end is its
own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.processes import alive, children, until
from tests.servers.agents import eager_agents
from tests.training import Training
from tiercheck.demo.nodes import remove_when_released
from tiercheck.errors import NotFound
from tiercheck.folding import launch
from tiercheck.folding.messages import MayPublish, Verdict, read_answer, read_request
from tiercheck.folding.owner import FoldProcess
from tiercheck.folding.settings import FoldSettings
from tiercheck.hierarchy import Hierarchy

__all__ = ["eager_agents"]

pytestmark = pytest.mark.cluster

OWNER = """
import asyncio, os, sys
from tiercheck.folding.launch import trainers_process
async def main():
    process = trainers_process(os.environ)
    await process._running()
    if not os.fork():  # as a data loader's worker: it holds the channel open
        os.setsid()
        sys.stdin.read()
        os._exit(0)
    print(process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"folds-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    with suppress(NotFound):
        remove_when_released(name)


class Killed:
    """Ends the process with SIGKILL at a point of its first fold, if that is one of these."""

    POINTS = ("the base is replayed", "it may publish")

    def __init__(self, child: Any, point: str) -> None:
        self._child = child
        self._point = point
        self._asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def send(self, message: bytes) -> None:
        self._child.send(message)
        self._reached("it may publish", isinstance(read_request(message), Verdict) and self._asked == 2)

    async def receive(self) -> bytes:
        message: bytes = await self._child.receive()
        self._asked += isinstance(read_answer(message), MayPublish)
        self._reached("the base is replayed", self._asked == 1)
        return message

    def _reached(self, point: str, reached: bool) -> None:
        if reached and point == self._point:
            os.kill(self._child.pid, 9)


def killing(made: list[FoldProcess], points: Iterator[str]) -> Callable[[Mapping[str, str], bool], FoldProcess]:
    def process(environment: Mapping[str, str], is_waited_for: bool) -> FoldProcess:
        start = launch.trainers_process(environment, is_waited_for)._start

        async def start_and_kill() -> Any:
            return Killed(await start(), next(points, ""))

        made.append(FoldProcess(start_and_kill))
        return made[-1]

    return process


@pytest.mark.usefixtures("eager_agents")  # one that stands back may need minutes to import torch
def test_killed_at_any_point_of_a_fold_nothing_is_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each base that is folded in the end has the bits of the state: all are audited."""
    made: list[FoldProcess] = []
    monkeypatch.setattr("tiercheck.checkpointer.trainers_process", killing(made, iter(Killed.POINTS)))
    hierarchy = Hierarchy.of(f"shm://{name}?size=64MiB", f"nvme://{tmp_path}/run?survives=rack")
    settings = {"bases": "fold", "base_every": 4, "batch": 2, "audit_every": 1, "deadline_s": 200.0}
    training, before = Training(), set(children(os.getpid()))
    with training.attach(hierarchy, **settings) as checkpointer:
        for version in range(1, 15):
            training.step(version)
        checkpointer.flush()
        mover = checkpointer.stats.mover
        assert (checkpointer.stats.bases, mover.audited_bases) == (1, mover.folded_bases)
        # A process may have published its base when the kill reached it: that base is there, and nobody counts it.
        assert mover.folded_bases in (2, 3)
        assert (mover.watermark, mover.not_folded) == (12, "")
        (folds,) = set(children(os.getpid())) - before
        assert (made[0].pid, made[0]._ends) == (folds, 0), "a base has ended the count of its ends"
    assert not alive(folds)
    remove_when_released(name)
    again = Training()
    with again.attach(hierarchy, base_every=4) as checkpointer:
        assert (checkpointer.version, checkpointer.recovery.fidelity) == (14, "exact")
        assert again.parameters() == training.states[14]


def test_it_ends_with_its_owner_though_a_fork_of_it_holds_the_channel() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        folds = int(owner.stdout.readline())
        until(lambda: os.getpriority(os.PRIO_PROCESS, folds) >= 10, "standing back")
        sacrificed = Path(f"/proc/{folds}/oom_score_adj")
        until(lambda: int(sacrificed.read_text()) == 1000, "being the first to end if memory is short")
        owner.kill()
        owner.wait(10)
        until(lambda: not alive(folds), "the end of the process that folds", 20)
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdin.close()
        owner.stdout.close()


async def test_one_that_nobody_waits_for_is_gone_when_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is being started when its owner closes."""
    spawn, spawned, go_on = launch._spawn, threading.Event(), threading.Event()
    started: list[int] = []

    def slowly(*arguments: Any) -> Any:
        process = spawn(*arguments)
        started.append(process.pid)
        spawned.set()
        assert go_on.wait(30)
        return process

    monkeypatch.setattr(launch, "_spawn", slowly)
    settings = FoldSettings.of(1, "", allowed=os.sched_getaffinity(0), ranks=1)
    starting = asyncio.ensure_future(launch.starts(settings, os.environ)())
    assert await asyncio.to_thread(spawned.wait, 30)
    starting.cancel()
    await asyncio.sleep(0)  # the cancellation is delivered
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not Path(f"/proc/{started[0]}").exists()
