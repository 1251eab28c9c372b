"""A store that does not answer, such as a parallel file system whose server is away, holds up nobody for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.servers.agents import Node, base, capture, node
from tests.unit.agent.server.test_service import brisk, running, trainer, until
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.client.trainer_lock import TrainerLock
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import DeadlineExceeded
from tiercheck.keys import LineageKey
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.objects.records import seal
from tiercheck.tiers.posix.nvme import NvmeDriver

__all__ = ["brisk", "node"]


@dataclass
class Store:
    """What every call to the durable tier waits for, in a thread that nobody can break off."""

    answers: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    store.answers.set()
    run = NvmeDriver.run

    async def waits(
        self: NvmeDriver,
        work: Callable[[Callable[[], None]], Any],
        key: str | None = None,
        undo: Callable[[Any], None] | None = None,
    ) -> Any:
        def waiting(check: Callable[[], None]) -> Any:
            store.waiting += not store.answers.is_set()
            store.answers.wait()
            return work(check)

        return await run(self, waiting, key, undo)

    monkeypatch.setattr(NvmeDriver, "run", waits)
    for name, seconds in (
        ("jobs.replicator.CLOSE_S_MAX", 0.2),
        ("server.service.OVERDUE_S", 0.1),
    ):
        monkeypatch.setattr(f"tiercheck.agent.{name}", seconds)
    yield store
    store.answers.set()


async def rest_of_the_tasks() -> None:
    """What was left behind comes to its end."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    async with asyncio.timeout(20):
        await asyncio.gather(*left, return_exceptions=True)


async def test_the_agent_answers_and_ends(node: Node, store: Store) -> None:
    job = node.job(node.shm())
    async with running(node, drain_s=0.1) as agent, trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await mover.drain(10, closing=False)
        store.answers.clear()
        await capture(hierarchy, base(0))
        await until(lambda: store.waiting > 0, "a call that hangs")
        async with asyncio.timeout(10):
            status = await client.status()
            assert [rank["rank"] for rank in status["ranks"]] == [0]
            agent.ending.set()
            await agent.serve()
            await agent.close()
        assert not agent.run.agent_lives(), "the next one could not begin"
        store.answers.set()
    await rest_of_the_tasks()


async def test_a_pause_waits_for_it_as_long_as_its_trainer_and_names_it(node: Node, store: Store) -> None:
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await mover.drain(10, closing=False)
        store.answers.clear()
        await capture(hierarchy, base(0))
        await until(lambda: store.waiting > 0, "a call that hangs")
        lock = TrainerLock(RunDirectory.of(node.name), job.namespace, 0)
        hangs = rf"could not be broken off within 0.5 s \(nvme://{node.folder}.*, for \d"
        with pytest.raises(DeadlineExceeded, match=hangs):
            await client.pause(job.namespace, 0, deadline_s=1.0)
        waiting = asyncio.create_task(client.pause(job.namespace, 0, deadline_s=60.0))
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done(), "something moves"
        store.answers.set()
        await waiting
        (replicator,) = agent.registry
        assert replicator.state == "paused"
        lock.release()
    await rest_of_the_tasks()


async def test_a_newer_generation_is_taken_up(node: Node, store: Store) -> None:
    first = node.shm()
    async with running(node) as agent, trainer(node, node.job(first)) as (older, hierarchy, client):
        await older.register()
        await older.drain(10, closing=False)
        store.answers.clear()
        await capture(hierarchy, base(0))
        await until(lambda: store.waiting > 0, "a call that hangs")
        record = seal(LineageKey(2), Branch(2, 1, 0, 1, "ab" * 8))
        await hierarchy.first.driver.put(str(LineageKey(2)), [record])
        newer = RemoteMover(client, hierarchy.first.driver, node.job(first, generation=2))
        async with asyncio.timeout(10):
            await newer.register()
        assert [each.job.generation for each in agent.registry] == [2]
        store.answers.set()
    await rest_of_the_tasks()
