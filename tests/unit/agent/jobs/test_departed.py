"""Ranks that are no more: the agent forgets them and their memory goes, but not before nobody can need it."""

from __future__ import annotations

import asyncio

import pytest

from tests.servers.agents import Node, base, capture, held, node, open_generation, shard
from tests.shared_memory import root_of
from tests.unit.agent.server.test_service import Clock, brisk, clock, running, trainer, until
from tiercheck.agent.client.trainer_lock import TrainerLock
from tiercheck.agent.jobs.departed import captured
from tiercheck.agent.jobs.registry import LOOKS_MAX
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.server.service import Agent
from tiercheck.keys import CommitKey, ShardKey
from tiercheck.replication.job import ReplicationJob
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.registry import make_driver

__all__ = ["brisk", "clock", "node"]


@pytest.fixture(autouse=True)
def looks_whenever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.agent.jobs.registry.LOOK_AGAIN", Backoff(0.0, 0.0))


async def saved(node: Node, first: str, *ranks: int) -> None:
    """A life of these ranks of two in one memory, up to a base in the durable tier. Its end is a crash."""
    for rank in ranks:
        async with trainer(node, node.job(first, rank=rank, world_size=2)) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0, rank))
            await mover.cycle()


async def looked(agent: Agent, times: int = 2) -> None:
    """The agent has looked so often whether what it holds is past."""
    for _ in range(times):
        agent.registry.free_departed()
        looking = agent.registry._looking
        assert looking is not None
        await asyncio.wait([looking])


async def test_a_rank_that_is_no_more_is_forgotten_and_its_memory_freed(node: Node, clock: Clock) -> None:
    """Not before the generation of those that go on has a committed base."""
    node.shm(), node.shm()
    staying, departed = node.namespaces
    async with running(node) as agent:
        await saved(node, f"shm://{staying}", 0)
        await saved(node, f"shm://{departed}", 1)
        await until(lambda: all(each.state == "moving" for each in agent.registry), "the movers")
        lock = TrainerLock(RunDirectory.of(node.name), f"shm://{staying}", 0)
        async with trainer(node, node.job(f"shm://{staying}", generation=2)) as (mover, hierarchy, _):
            await mover.register()
            lock.recovered()
            clock.ahead_s += 20
            await looked(agent)
            assert len(agent.registry) == 2, "the new generation has no base"
            await capture(hierarchy, base(1, generation=2))
            assert await mover.cycle()
            assert str(CommitKey(2, 1)) in await held(hierarchy)
            clock.ahead_s += 20
            await looked(agent)
            assert [each.job.rank for each in agent.registry] == [0]
            assert not root_of(departed).exists()
            assert str(base(0, 1)) in await held(hierarchy), "what is there goes by the policies of those that go on"
        lock.release()


async def test_in_memory_that_others_use_only_what_it_left_goes(node: Node, clock: Clock) -> None:
    node.shm()
    (name,) = node.namespaces
    async with running(node) as agent:
        await saved(node, f"shm://{name}", 0, 1)
        async with trainer(node, node.job(f"shm://{name}", generation=2)) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(1, generation=2))
            assert await mover.cycle()
            lock = TrainerLock(RunDirectory.of(node.name), f"shm://{name}", 1)
            clock.ahead_s += 20
            await looked(agent)
            assert len(agent.registry) == 2, "its trainer has come back"
            lock.release()
            await looked(agent)
            assert [each.job.rank for each in agent.registry] == [0]
            assert not [key for key in await held(hierarchy, 0) if key.startswith("r00001/")]
            assert str(base(1, generation=2)) in await held(hierarchy, 0)


async def test_after_a_clean_end_memory_stays_until_the_job_has_gone_on_without_it(node: Node, clock: Clock) -> None:
    node.shm(), node.shm()
    staying, departed = node.namespaces
    async with running(node) as agent:
        for rank, name in enumerate(node.namespaces):
            async with trainer(node, node.job(f"shm://{name}", rank=rank, world_size=2)) as (mover, hierarchy, _):
                await mover.register()
                await capture(hierarchy, base(0, rank))
                await mover.cycle()
                await mover.withdraw()
        assert not len(agent.registry)
        await looked(agent)
        assert root_of(departed).exists()
        async with trainer(node, node.job(f"shm://{staying}", generation=2)) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(1, generation=2))
            lock = TrainerLock(RunDirectory.of(node.name), f"shm://{departed}", 1)
            assert await mover.cycle()
            await looked(agent)
            assert root_of(departed).exists(), "its trainer has come back"
            lock.release()
            await looked(agent)
            assert not root_of(departed).exists()
            assert str(base(1, generation=2)) in await held(hierarchy, 0)


async def test_what_a_newer_generation_refers_to_stays(node: Node, clock: Clock) -> None:
    """Its trainer moves its objects itself, so the agent has no job of it, and sees no trainer that holds the rank."""
    job, frozen = node.job(node.shm()), ShardKey.constant(1, 0, 0)
    async with running(node) as agent:
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, frozen, ShardKey.base(1, 0, 0, (1, 0)))
            assert await mover.cycle()
        async with node.open(job) as hierarchy:
            await open_generation(hierarchy, 2)
            referring = ShardKey.base(2, 1, 0, (1, 0))
            await capture(hierarchy, referring)
            for key in referring, CommitKey(2, 1):
                await hierarchy.tiers[1].driver.put(str(key), shard(referring))
            clock.ahead_s += 20
            await looked(agent)
            assert not len(agent.registry), "what it was to move is past"
            assert {str(frozen), str(referring)} <= set(await held(hierarchy, 0))


async def test_a_neighbour_keeps_what_a_newer_generation_refers_to(node: Node) -> None:
    """With the hosts in another order, two generations of a rank may have one neighbour."""
    async with make_driver("memory://") as neighbour:
        frozen, older, newer = ShardKey.constant(1, 0, 0), base(5), ShardKey.base(2, 6, 0, (1, 0))
        job = node.job(node.shm())
        for key in frozen, older, base(5, rank=1):
            await neighbour.put(str(key), shard(key))
        assert set(await captured(neighbour, job)) == {str(frozen), str(older)}
        await neighbour.put(str(newer), shard(newer))
        assert await captured(neighbour, job) == []


async def test_a_look_that_fails_is_put_off_and_keeps_no_other_rank_from_its_look(
    node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.shm()
    (name,) = node.namespaces
    looks: list[int] = []

    async def fails(job: ReplicationJob) -> bool:
        looks.append(job.rank)
        if job.rank == 0:
            raise ValueError("a driver's bug")
        return False

    monkeypatch.setattr("tiercheck.agent.jobs.registry.is_past", fails)
    monkeypatch.setattr("tiercheck.agent.jobs.registry.LOOK_AGAIN", Backoff(600.0, 600.0))
    async with running(node) as agent:
        await saved(node, f"shm://{name}", 0, 1)
        clock.ahead_s += 1000
        await looked(agent, 3)
        assert sorted(looks) == [0, 1]
    assert "a driver's bug" in caplog.text
    assert "tiercheck gc" in caplog.text


async def test_memory_of_a_job_that_is_down_stays(node: Node, clock: Clock) -> None:
    node.shm()
    (name,) = node.namespaces
    async with running(node) as agent:
        await saved(node, f"shm://{name}", 0)
        clock.ahead_s += 1000
        await looked(agent, 3)
        assert len(agent.registry) == 1
        async with make_driver(f"shm://{name}") as first:
            assert [info.key async for info in first.list("r00000/")]


async def test_memory_of_a_rank_that_is_away_for_days_is_freed_when_the_job_goes_on_elsewhere(
    node: Node, clock: Clock
) -> None:
    """It has waited in a queue. By then the agent has forgotten the rank, and not its memory."""
    node.shm(), node.shm()
    staying, departed = node.namespaces
    async with running(node) as agent:
        await saved(node, f"shm://{staying}", 0)
        await saved(node, f"shm://{departed}", 1)
        await until(lambda: all(each.state == "moving" for each in agent.registry), "the movers")
        clock.ahead_s += agent.settings.linger_s + 60
        await until(lambda: all(not each.needed for each in agent.registry), "all is brought home")
        clock.ahead_s += 2 * 86400
        await agent.registry.tidy()
        assert not len(agent.registry), "nobody has been heard of for long"
        await looked(agent, LOOKS_MAX + 1)
        assert root_of(departed).exists(), "nobody goes on yet"
        lock = TrainerLock(RunDirectory.of(node.name), f"shm://{staying}", 0)
        async with trainer(node, node.job(f"shm://{staying}", generation=2)) as (mover, hierarchy, _):
            await mover.register()
            lock.recovered()
            await capture(hierarchy, base(1, generation=2))
            assert await mover.cycle()
            clock.ahead_s += 20
            await looked(agent, 10)
            assert not root_of(departed).exists()
            assert root_of(staying).exists()
        lock.release()
