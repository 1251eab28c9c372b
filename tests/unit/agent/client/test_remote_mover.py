"""What a trainer says of its mover in the agent."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.agent.server.test_service import until
from tiercheck.agent.client import remote_mover
from tiercheck.agent.client.client import AgentClient
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.protocol.messages import JobRequest, Nudge, RankReply
from tiercheck.errors import Transient
from tiercheck.replication.handle import MoverStatus
from tiercheck.replication.job import ReplicationJob
from tiercheck.tiers.driver import TierDriver


async def test_a_wait_blames_the_agent_that_is_gone_and_not_whom_it_waited_for() -> None:
    answers = asyncio.Event()
    answers.set()

    class Client:
        async def request(self, request: JobRequest, reply: type[RankReply]) -> RankReply:
            if not answers.is_set():
                raise Transient("connection refused")
            return reply(MoverStatus(held_up_by="rank 0 has not passed base 20"))

    job = cast(ReplicationJob, SimpleNamespace(namespace="run", rank=1, generation=1))
    mover = RemoteMover(cast(AgentClient, Client()), cast(TierDriver, None), job)
    await mover.cycle()
    assert mover.status.holds_up == "rank 0 has not passed base 20"
    answers.clear()
    running = asyncio.create_task(mover.run())
    await until(lambda: mover.status.holds_up == "agent: connection refused", "the agent's trouble")
    answers.set()
    await until(lambda: mover.status.holds_up == "rank 0 has not passed base 20", "its answer")
    running.cancel()


async def test_bases_that_were_left_are_told_of_though_room_was_asked_for_since() -> None:
    asked: list[JobRequest] = []

    class Client:
        async def request(self, request: JobRequest, reply: type[RankReply]) -> RankReply:
            asked.append(request)
            return reply(MoverStatus())

        async def tell(self, request: JobRequest) -> None:
            asked.append(request)

    job = cast(ReplicationJob, SimpleNamespace(namespace="run", rank=1, generation=1))
    mover = RemoteMover(cast(AgentClient, Client()), cast(TierDriver, None), job)
    mover.leave((10,))
    await mover.room_for_base(1.0)
    running = asyncio.create_task(mover.run())
    await until(lambda: any(isinstance(each, Nudge) for each in asked), "a nudge")
    running.cancel()
    assert next(each.due for each in asked if isinstance(each, Nudge)) == (10,)


async def test_an_agent_that_was_started_anew_is_told_of_bases_that_were_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it can fold them, until it has taken them. Those that it had refused are the trainer's."""
    monkeypatch.setattr(remote_mover, "REFRESH_S", 0.01)
    said = MoverStatus(folds=True, folds_to=10)
    nudges: list[tuple[int, ...]] = []
    looks: list[JobRequest] = []

    class Client:
        async def request(self, request: JobRequest, reply: type[RankReply]) -> RankReply:
            looks.append(request)
            return reply(said)

        async def tell(self, request: JobRequest) -> None:
            assert isinstance(request, Nudge)
            nudges.append(tuple(request.due))

    job = cast(ReplicationJob, SimpleNamespace(namespace="run", rank=1, generation=1))
    mover = RemoteMover(cast(AgentClient, Client()), cast(TierDriver, None), job)
    await mover.room_for_base(1.0, (10,))
    running = asyncio.create_task(mover.run())

    async def several_looks() -> None:
        seen = len(looks)
        await until(lambda: len(looks) > seen + 3, "looks")

    await several_looks()
    assert nudges == []
    said = MoverStatus(prepares_folding=True)
    await several_looks()
    assert nudges == []
    said = MoverStatus(folds=True)
    await until(lambda: nudges, "a nudge")
    assert set(nudges) == {(10,)}
    said = MoverStatus(folds=True, folds_to=10)
    await several_looks()
    nudges.clear()
    await mover.room_for_base(1.0, (10, 20))  # it does not take the second one
    said = MoverStatus(folds=True)
    await until(lambda: nudges, "a nudge")
    assert set(nudges) == {(10,)}
    running.cancel()
