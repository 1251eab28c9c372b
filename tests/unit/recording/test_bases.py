"""What a step that makes a base waits for, and what not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.training import Training, memory
from tiercheck.agent.client.client import AgentClient
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.protocol.messages import Drain, JobRequest, Nudge, RankReply, RoomForBase
from tiercheck.hierarchy import Hierarchy
from tiercheck.policy.observation import Observation
from tiercheck.replication.fold_controller import FoldController
from tiercheck.replication.handle import MoverStatus
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.mover import Mover
from tiercheck.tiers.driver import TierDriver

LAST = 20
DUE = 5
WHY = "it has failed"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What the mover was asked to fold each time that training waited for its answer."""
    calls: list[tuple[int, ...]] = []
    room_for_base = Mover.room_for_base

    async def noted(self: Mover, deadline_s: float, due: Sequence[int] = (), **more: Any) -> None:
        calls.append(tuple(due))
        await room_for_base(self, deadline_s, due, **more)

    monkeypatch.setattr(Mover, "room_for_base", noted)
    return calls


def tiers(root: Path) -> Hierarchy:
    return Hierarchy.of(memory(), f"nvme://{root}/run?survives=rack")


@pytest.mark.parametrize("bases", ["capture", "fold"])
def test_a_mover_that_has_said_that_there_is_room_is_not_waited_for(
    bases: str, tmp_path: Path, asked: list[tuple[int, ...]]
) -> None:
    training = Training()
    checkpointer = training.attach(tiers(tmp_path), bases=bases, base_every=DUE)
    training.step(1)
    while bases == "fold" and not checkpointer.stats.mover.folds:
        checkpointer.flush()
    for version in range(2, LAST + 1):
        training.step(version)
        checkpointer.flush()  # the mover has seen the newest base
    checkpointer.close()
    assert asked == []
    stats = checkpointer.stats
    assert (stats.bases, stats.mover.folded_bases) == ((5, 0) if bases == "capture" else (1, 4))
    again = Training()
    again.attach(tiers(tmp_path)).abort()
    assert again.parameters() == training.states[LAST]


def test_a_mover_that_has_not_seen_the_newest_base_is_asked(
    tmp_path: Path, asked: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said then was said without that base."""
    monkeypatch.setattr(MoverStatus, "newest_base", property(lambda self: 0, lambda self, value: None))
    training = Training()
    checkpointer = training.attach(tiers(tmp_path), bases="capture", base_every=DUE)
    for version in range(1, LAST + 1):
        training.step(version)
    checkpointer.close()
    assert asked == [(), (), ()], "all but the first one after the opening base"


@pytest.mark.parametrize("last", [DUE, LAST])
def test_a_base_that_the_mover_does_not_take_after_all_is_captured(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if no version comes after it."""

    def refuses(self: FoldController, due: Collection[int], seen: Observation) -> None:
        self._given_up = WHY

    monkeypatch.setattr(FoldController, "take", refuses)
    training = Training()
    checkpointer = training.attach(tiers(tmp_path), bases="fold", base_every=DUE)
    training.step(1)
    while not checkpointer.stats.mover.folds:
        checkpointer.flush()
    for version in range(2, last + 1):
        training.step(version)
        checkpointer.flush()
    checkpointer.close()
    assert f"base 5 is captured late, and not folded: {WHY}" in caplog.text
    assert checkpointer.stats.bases == 1 + last // DUE
    assert checkpointer.stats.mover.watermark == last
    again = Training()
    again.attach(tiers(tmp_path)).abort()
    assert again.parameters() == training.states[last]


@pytest.mark.parametrize("heard", [True, False])
async def test_a_drain_waits_for_bases_of_which_the_agent_may_not_have_heard(heard: bool) -> None:
    """A nudge wants no answer, and may be lost."""
    requests: list[JobRequest] = []

    class Client:
        async def request(self, request: JobRequest, reply: type[RankReply]) -> RankReply:
            requests.append(request)
            return reply(MoverStatus(folds_to=5 if heard else -1))

    job = cast(ReplicationJob, SimpleNamespace(namespace="run", rank=0, generation=1))
    mover = RemoteMover(cast(AgentClient, Client()), cast(TierDriver, None), job)
    await mover.cycle()
    mover.leave((5,))
    await mover.drain(1.0, closing=True)
    told = [request for request in requests if isinstance(request, RoomForBase | Drain | Nudge)]
    assert [type(each) for each in told] == ([Drain] if heard else [RoomForBase, Drain])
    assert heard or told[0] == RoomForBase(1.0, "run", 0, 1, (5,))
