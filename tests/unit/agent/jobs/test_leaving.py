"""What stays after a job's end: nothing that nobody will need, and all that somebody may."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.servers.agents import FakePeer, Node, base, capture, held, node, open_generation, record, shard
from tests.shared_memory import root_of
from tests.unit.agent.server.test_service import Clock, brisk, clock, running, trainer, until
from tiercheck.agent.client.client import connect_agent
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.client.trainer_lock import TrainerLock
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server.neighbours import OpenNamespace
from tiercheck.agent.server.service import Agent
from tiercheck.errors import NotFound, Transient
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.registry import make_driver
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["brisk", "clock", "node"]


class Keeping(FakePeer):
    """A peer server that has one namespace open."""

    def __init__(self, open_namespace: OpenNamespace, bind: str) -> None:
        super().__init__(bind)
        self._open_namespace = open_namespace
        self.driver: TierDriver | None = None

    async def start(self) -> None:
        self.driver = await self._open_namespace("run")

    async def close(self) -> None:
        driver, self.driver = self.driver, None
        if driver is not None:
            await driver.close()


def keeping(settings: AgentSettings, open_namespace: OpenNamespace, bind: str) -> Keeping:
    return Keeping(open_namespace, bind)


async def test_an_agent_with_nothing_to_look_after_ends_soon(node: Node, clock: Clock) -> None:
    job = node.job(node.shm())
    async with running(node, idle_s=15.0, linger_s=600.0) as agent:
        serving = asyncio.create_task(agent.serve())
        lock = TrainerLock(RunDirectory.of(node.name), job.namespace, 0)
        clock.ahead_s += 100
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done(), "a rank is attaching, which has not registered yet"
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            lock.recovered()
            await capture(hierarchy, base(0))
            await mover.drain(10, closing=True)
            await mover.withdraw()
        lock.release()
        clock.ahead_s += 10
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done()
        clock.ahead_s += 10
        async with asyncio.timeout(10):
            await serving


async def test_what_a_neighbour_may_need_keeps_the_agent_and_goes_with_it_otherwise(node: Node, clock: Clock) -> None:
    kept = f"peer-{node.name}-run"
    node.namespaces.append(kept)
    settings = node.settings(bind=None, idle_s=15.0, linger_s=600.0)
    async with Agent(settings, make_peer_server=keeping) as agent:
        peer = agent._peer
        assert isinstance(peer, Keeping)
        assert peer.driver is not None
        await peer.driver.put(str(base(0)), shard(base(0)))
        serving = asyncio.create_task(agent.serve())
        clock.ahead_s += 100
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done(), "a neighbour's base is here"
        await peer.driver.delete([str(base(0))])
        clock.ahead_s += 100
        async with asyncio.timeout(10):
            await serving
        await asyncio.sleep(0)
    remove_namespace(kept)  # opened again, and empty: its server was the last to have it
    async with Agent(node.settings(bind=None, detached=False, idle_s=15.0), make_peer_server=keeping) as agent:
        serving = asyncio.create_task(agent.serve())
        assert isinstance(agent._peer, Keeping)
        before = agent._peer
        inode = root_of(kept).stat().st_ino
        clock.ahead_s += 100
        await until(lambda: agent._peer not in (None, before), "its letting go")
        assert root_of(kept).stat().st_ino != inode, "the memory is given back"
        assert not serving.done(), "the platform's agent stays"
        agent.drain_first = False
        agent.ending.set()
        await serving


async def test_memory_that_cannot_be_freed_is_tried_seldom_and_told_once(
    node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[float] = []

    def refuse(name: str) -> None:
        tried.append(clock.ahead_s)
        raise Transient(f"{name} is in use")

    monkeypatch.setattr("tiercheck.agent.server.service.remove_one", refuse)
    node.namespaces.append(f"peer-{node.name}-run")
    async with Agent(node.settings(bind=None, detached=False, idle_s=15.0), make_peer_server=keeping) as agent:
        for clock.ahead_s in range(100, 1100, 20):
            if agent.unneeded_s() > 15.0:
                await agent._free_neighbours_memory()
        assert len(tried) == 5, "after one, two, four and eight minutes"
        assert caplog.text.count("is in use") == 1
        agent.drain_first = False


async def test_the_memory_of_a_job_that_was_given_up_can_be_removed_while_the_agent_runs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = node.job(node.shm())
    name = node.namespaces[-1]
    async with running(node) as agent:
        lock = TrainerLock(RunDirectory.of(node.name), job.namespace, 0)
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            lock.recovered()
            await capture(hierarchy, base(0))
        (replicator,) = agent.registry
        await until(lambda: replicator.state == "moving", "the mover")
        with monkeypatch.context() as patch:
            patch.setattr("tiercheck.tiers.shm.namespaces.LEAVE_WAIT_S_MAX", 0.3)
            with pytest.raises(Transient, match="in use by another process"):
                await asyncio.to_thread(remove_namespace, name)
        assert not replicator.gone, "its trainer lives"
        lock.release()
        await asyncio.to_thread(remove_namespace, name)
        assert not root_of(name).exists()
        await until(lambda: replicator.gone, "its end")


async def test_what_is_kept_for_neighbours_under_the_name_goes_with_it(node: Node) -> None:
    kept, other = f"peer-{node.name}-run", f"peer-{node.name}-big-run"
    node.namespaces += [kept, other]
    async with Agent(node.settings(bind=None), make_peer_server=keeping) as agent:
        serving = asyncio.create_task(agent.serve())
        peer = agent._peer
        assert isinstance(peer, Keeping)
        assert peer.driver is not None
        await peer.driver.put(str(base(0)), shard(base(0)))
        another = await peer._open_namespace("big-run")
        await another.close()
        inode = root_of(kept).stat().st_ino
        await asyncio.to_thread(remove_namespace, "run")
        assert not root_of(kept).exists() or root_of(kept).stat().st_ino != inode
        assert root_of(other).exists(), "another job's"
        agent.drain_first = False
        agent.ending.set()
        await serving
    with pytest.raises(NotFound):
        remove_namespace(f"{node.name}-never")


@pytest.mark.parametrize("placement", ["everywhere", "bases_only"])
async def test_a_clean_end_frees_the_neighbours_memory(placement: str, node: Node) -> None:
    """What a tier that outlives more has, the neighbour no longer keeps for this rank; what is another rank's stays,
    and so does all of it if that tier has not been sent everything."""
    other = Node(node.folder)
    node.namespaces.append(f"peer-{other.name}-run")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(node))
        there = await stack.enter_async_context(Agent(other.settings(bind=None)))
        plain = node.job(node.shm(), batch=1)
        peer = JobTier("peer", f"peer://run?at={there.hello().peer_endpoint}&deadline=5")
        job = _with_peer(plain, peer)
        if placement == "bases_only":
            job = replace(job, placement=(f"bases_only?tier={plain.tiers[1].name}",))
        hierarchy = await stack.enter_async_context(node.open(job))
        await open_generation(hierarchy)
        client = await stack.enter_async_context(await connect_agent(node.name))
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        await capture(hierarchy, base(0), record(1))
        await mover.drain(20, closing=True)
        neighbours = hierarchy.tiers[1].driver
        await neighbours.put(str(base(0, rank=1)), shard(base(0, rank=1)))
        assert str(base(0)) in await held(hierarchy, 1)
        await mover.withdraw()
        shards = [key for key in await held(hierarchy, 1) if key.endswith(".safetensors")]
        kept = [str(base(0)), str(record(1))] if placement == "bases_only" else []
        assert sorted(shards) == sorted([*kept, str(base(0, rank=1))])
        assert str(base(0)) in await held(hierarchy, 2)
        assert (str(record(1)) in await held(hierarchy, 2)) is not bool(kept)
        async with make_driver(plain.namespace) as first:
            assert [info.key async for info in first.list("r")], "a restart reads its own memory"


def _with_peer(plain: ReplicationJob, peer: JobTier) -> ReplicationJob:
    return replace(plain, tiers=(plain.tiers[0], peer, plain.tiers[1]))
