"""The agent in this process: it takes up replication jobs, moves them, and answers for each by itself."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.servers.agents import (
    Node,
    base,
    capture,
    fake_peer,
    held,
    node,
    open_generation,
    record,
    shard,
)
from tests.shared_memory import root_of
from tiercheck.agent.client.client import AgentClient, connect_agent
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.client.trainer_lock import TrainerLock
from tiercheck.agent.jobs import registry as roster_module
from tiercheck.agent.protocol.messages import Look, RankReply
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.server.service import Agent
from tiercheck.errors import ConfigurationError, Corruption, DeadlineExceeded, JobConflict, NotFound, Transient
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import CommitKey, JobKey, LineageKey, ShardKey
from tiercheck.policy.recovery.lineage import Branch, LineageRecord
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.replication.mover import Mover, MoverHandle
from tiercheck.replication.objects.records import seal, unseal
from tiercheck.replication.pacing import Pacer
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.posix.file_driver import FileDriver
from tiercheck.tiers.registry import make_driver

__all__ = ["node"]

Removing = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can sit out."""
    monkeypatch.setattr("tiercheck.replication.mover.LOOK_AGAIN", Backoff(0.05, 0.05))
    monkeypatch.setattr("tiercheck.replication.backoff.RETRY", Backoff(0.01, 0.02))
    monkeypatch.setattr("tiercheck.tiers.wrappers.lazy_open.OPEN_S", 0.1)
    monkeypatch.setattr("tiercheck.agent.jobs.replicator.TICK_S", 0.05)
    monkeypatch.setattr("tiercheck.agent.jobs.replicator.RETRY", Backoff(0.02, 0.05))
    monkeypatch.setattr("tiercheck.agent.client.remote_mover.REFRESH_S", 0.05)
    monkeypatch.setattr("tiercheck.agent.server.service.TICK_S", 0.02)
    monkeypatch.setattr("tiercheck.agent.server.service.LOCK_S_MAX", 0.2)


class Clock:
    """The agent's time, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tiercheck.agent.jobs.replicator._now", clock)
    monkeypatch.setattr("tiercheck.agent.server.service._now", clock)
    return clock


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110  (what is waited for tells nobody)
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"{what} did not come about within {deadline_s:g} s")


@asynccontextmanager
async def running(node: Node, **changes: object) -> AsyncIterator[Agent]:
    async with Agent(node.settings(**changes), make_peer_server=fake_peer) as agent:
        yield agent


@asynccontextmanager
async def trainer(node: Node, job: ReplicationJob) -> AsyncIterator[tuple[RemoteMover, OpenHierarchy, AgentClient]]:
    """One rank's tiers and mover, as its trainer holds them; the generation is open."""
    async with AsyncExitStack() as stack:
        hierarchy = await stack.enter_async_context(node.open(job))
        client = await stack.enter_async_context(await connect_agent(node.name))
        await open_generation(hierarchy, job.generation)
        yield RemoteMover(client, hierarchy.first.driver, job), hierarchy, client


async def test_what_is_nominated_is_moved(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, hierarchy, _):
        await mover.register()
        await capture(hierarchy, base(0), record(1), record(2), record(3))
        assert await mover.cycle()
        assert str(CommitKey(1, 0)) in await held(hierarchy)
        assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)
        assert (mover.status.watermark, mover.status.undrained_bases) == (0, 0)
        await mover.room_for_base(5)
        await mover.drain(10, closing=True)
        assert str(ShardKey.differential(1, 3, 3, 0)) in await held(hierarchy)
        moving: MoverHandle = mover
        assert moving.conflict is None


async def test_a_trainer_that_waits_for_the_tiers_ends_a_pause_of_copies(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, told = node.job(node.shm()), list[float]()
    monkeypatch.setattr(Pacer, "hurry", lambda _, seconds: told.extend([seconds] if seconds else []))
    async with running(node), trainer(node, job) as (mover, *_):
        await mover.register()
        await mover.cycle()  # its tiers are open
        mover.nudge(hurry_s=7.0)
        mover.nudge()
        life = asyncio.create_task(mover.run())
        await until(lambda: bool(told), "the nudge")
        life.cancel()
    assert told == [7.0]


async def test_what_a_trainer_asks_each_second_makes_no_driver(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, _, _):
        await mover.register()
        made: list[str] = []
        monkeypatch.setattr(roster_module, "make_driver", lambda url: made.append(url) or make_driver(url))
        for _ in range(3):
            agent.registry.get(job.namespace, job.rank, job.generation)
        assert not made


async def test_a_damaged_lineage_record_makes_no_tier_away(node: Node) -> None:
    """It costs what only it could tell; of this generation's own it is written again."""
    job = node.job(node.shm())
    async with node.open(job) as hierarchy:
        await open_generation(hierarchy)
        durable = hierarchy.tiers[-1].driver
        await durable.put(str(LineageKey(1)), [b"garbage"])
        await capture(hierarchy, base(0))
        await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), job)])
    async with running(node) as agent:
        (replicator,) = agent.registry
        await until(lambda: replicator.status.watermark == 0, "the commit")
    async with node.open(job) as hierarchy:
        record = await hierarchy.tiers[-1].driver.get(str(LineageKey(1)))
        assert unseal(record, Branch, key=LineageKey(1), tier="nvme").generation == 1


async def test_a_trainer_learns_what_was_damaged_before_it_was_moved(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, hierarchy, _):
        await mover.register()
        await capture(hierarchy, base(0), record(1))
        content = bytearray(b"".join(map(bytes, shard(record(2)))))
        content[-1] ^= 1
        await hierarchy.first.driver.put(str(record(2)), [content])
        await mover.cycle()
        assert mover.status.base_needed_after == 1
        await capture(hierarchy, base(3))
        await mover.make_room()
        assert mover.status.base_needed_after is None


async def test_it_moves_without_being_told_and_goes_on_without_a_trainer(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node) as agent:
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0), record(1))
        (replicator,) = agent.registry
        async with node.open(job) as hierarchy:
            await until(lambda: replicator.status.watermark == 0, "the base's commit")
            await capture(hierarchy, record(2))
            await until(lambda: replicator.status.copied_objects == 2, "the batch")
            assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)


async def test_what_a_dead_trainer_left_goes_out_as_it_is(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.agent.jobs.replicator.SILENT_S", 0.1)
    job = node.job(node.shm(), batch=5)
    async with running(node, linger_s=0.3) as agent, node.open(job) as hierarchy:
        async with trainer(node, job) as (mover, _, _):
            await mover.register()
            await capture(hierarchy, base(0), record(1), record(2), record(3))
        (replicator,) = agent.registry
        await until(lambda: not replicator.needed, "the end of what there was to do")
        assert str(ShardKey.differential(1, 1, 3, 0)) in await held(hierarchy)
        await until(lambda: replicator.state == "resting", "rest")
        await capture(hierarchy, record(4))
        async with await connect_agent(node.name) as client:
            await RemoteMover(client, hierarchy.first.driver, job).drain(10, closing=True)
        assert str(ShardKey.differential(1, 4, 4, 0)) in await held(hierarchy)


async def test_it_does_not_rest_while_somebody_waits(node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    job, drain = node.job(node.shm()), Mover.drain
    seen: list[tuple[str, bool]] = []

    async def slow_drain(mover: Mover, deadline_s: float, *, closing: bool) -> None:
        (replicator,) = agent.registry
        clock.ahead_s += 600  # longer than it waits for a silent trainer
        await until(lambda: replicator._brought_home_at is not None, "all that is left to move")
        await asyncio.sleep(0)
        seen.append((replicator.state, replicator.needed))
        await drain(mover, deadline_s, closing=closing)

    monkeypatch.setattr(Mover, "drain", slow_drain)
    async with running(node, linger_s=60.0) as agent:
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0), record(1))
            await mover.drain(10, closing=True)
            assert seen == [("moving", True)]
        (replicator,) = agent.registry
        await until(lambda: replicator.state == "resting", "rest")
        assert not replicator.needed


async def test_a_restart_takes_everything_up_again(node: Node) -> None:
    firsts = [node.shm() for _ in range(2)]
    jobs = [node.job(first, rank=rank, world_size=2) for rank, first in enumerate(firsts)]
    async with running(node):
        for job in jobs:
            async with trainer(node, job) as (mover, _, _):
                await mover.register()
    async with AsyncExitStack() as stack:
        hierarchies = [await stack.enter_async_context(node.open(job)) for job in jobs]
        for rank, hierarchy in enumerate(hierarchies):
            await capture(hierarchy, base(0, rank), record(1, rank), record(2, rank))
        async with running(node) as agent:
            assert [each.job for each in agent.registry] == jobs
            await until(lambda: all(each.status.watermark == 0 for each in agent.registry), "both ranks' commit")
        durable = await held(hierarchies[0])
        assert {str(ShardKey.differential(1, 1, 2, rank)) for rank in range(2)} <= set(durable)


async def test_each_agent_takes_up_only_what_is_meant_for_it(node: Node) -> None:
    mine, other = node.job(node.shm()), node.job(node.shm(), node="n1")
    for job in (mine, other):
        async with node.open(job) as hierarchy:
            await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), job)])
    async with running(node) as agent:
        assert [each.job for each in agent.registry] == [mine]
        async with await connect_agent(node.name) as client:
            with pytest.raises(ConfigurationError, match="for the agent 'n1', not for 'n-"):
                await client.register(other.namespace, 0, 1)


async def test_a_store_that_is_down_stops_nobody_else_and_is_shown(node: Node) -> None:
    (node.folder / "notadir").write_text("in the way")
    bad = node.job(node.shm(), durable=f"nvme://{node.folder}/notadir/x?survives=rack")
    good = node.job(node.shm())
    async with running(node) as agent, trainer(node, good) as (sound, _, client):
        async with make_driver(bad.namespace) as first:
            await first.put(str(LineageKey(1)), [seal(LineageKey(1), Branch(1, 0, 0, 1, "ab" * 8))])
            troubled = RemoteMover(client, first, bad)
            await troubled.register()
            await sound.register()
            await first.put(str(base(0)), shard(base(0)))
            await first.put(str(base(10)), shard(base(10)))
            await sound.drain(10, closing=True)
            assert not await troubled.cycle()
            assert "notadir" in troubled.status.errors["nvme"]
            with pytest.raises(DeadlineExceeded, match=r"2 bases have not reached the durable tier .*notadir"):
                await troubled.room_for_base(1.0)
            (node.folder / "notadir").unlink()
            await troubled.drain(20, closing=True)
            assert troubled.status.errors == {}
            assert troubled.status.watermark == 10
        assert len(agent.registry) == 2


async def test_a_middle_tier_that_is_away_keeps_nothing_from_the_durable_one(node: Node) -> None:
    """Such as the memory of a neighbour that has failed, when this node's agent starts anew."""
    (node.folder / "notadir").write_text("in the way")
    first = node.shm()
    whole = node.job(first)
    middle = JobTier("middle", f"nvme://{node.folder}/notadir/x?survives=node")
    job = replace(whole, tiers=(whole.tiers[0], middle, whole.tiers[1]))
    async with running(node), trainer(node, whole) as (_, hierarchy, client):
        mover = RemoteMover(client, hierarchy.first.driver, job)
        await mover.register()
        await capture(hierarchy, base(0))
        assert not await mover.cycle()
        assert mover.status.watermark == 0
        assert set(mover.status.errors) == {"middle"}
        (node.folder / "notadir").unlink()
        await mover.drain(20, closing=True)
        assert (node.folder / "notadir" / "x" / str(base(0))).exists()


async def test_a_chain_that_only_a_tier_that_is_away_knows_is_waited_for(node: Node) -> None:
    """Without it, what an older generation left would count as another future."""
    first = node.shm()
    job = node.job(first, generation=2)
    async with node.open(job) as hierarchy:
        newer = LineageKey(2)
        told = LineageRecord.of(Branch(2, 1, 7, 1, "ab" * 8), [Branch(1, 0, 0, 1, "ab" * 8)])
        await hierarchy.tiers[-1].driver.put(str(newer), [seal(newer, told)])
        await hierarchy.first.driver.put(str(newer), [b"damaged"])
    node.durable.rename(node.folder / "aside")
    node.durable.write_text("in the way")
    async with running(node) as agent, await connect_agent(node.name) as client, make_driver(first) as driver:
        await RemoteMover(client, driver, job).register()
        (replicator,) = agent.registry
        await until(lambda: replicator.trouble is not None, "the trouble")
        assert replicator.state == "opening"
        with pytest.raises(DeadlineExceeded, match="durable"):
            await replicator.room_for_base(0.2)
        node.durable.unlink()
        (node.folder / "aside").rename(node.durable)
        await until(lambda: replicator.state == "moving", "the mover")
        assert replicator.trouble is None


async def test_a_record_that_cannot_be_read_is_shown_and_stops_nobody(node: Node) -> None:
    first, good = node.shm(), node.job(node.shm())
    async with node.open(good) as hierarchy:
        await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), good)])
    async with node.open(node.job(first)) as hierarchy:
        await hierarchy.first.driver.put(str(JobKey(0)), [b"\xc1 nonsense"])
        await hierarchy.first.driver.put(str(JobKey(1)), [seal(JobKey(1), {"tiers": []})])
        await hierarchy.first.driver.put(str(JobKey(2)), [seal(JobKey(2), good)])
    async with running(node) as agent:
        assert [each.job for each in agent.registry] == [good]
        name = first.partition("?")[0]
        assert set(agent.registry.unreadable) == {f"{name} rank {rank}" for rank in range(3)}
        async with await connect_agent(node.name) as client:
            with pytest.raises(NotFound):
                await client.register(first, 7, 1)
            with pytest.raises(Corruption, match="invalid ReplicationJob"):
                await client.register(first, 1, 1)
            with pytest.raises(ConfigurationError, match="speaks of rank 0"):
                await client.register(first, 2, 1)


async def test_a_record_that_makes_a_driver_fail_keeps_nobody_from_starting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, odd = node.job(node.shm()), node.job(node.shm())
    for job in (good, odd):
        async with node.open(job) as hierarchy:
            content = seal(JobKey(0), job)
            await hierarchy.first.driver.put(str(JobKey(0)), [content])
    read = roster_module.read_job

    async def failing(first: TierDriver, rank: int) -> ReplicationJob:
        if (await read(first, rank)) == odd:
            raise OverflowError("int too large to convert to float")
        return await read(first, rank)

    monkeypatch.setattr(roster_module, "read_job", failing)
    async with running(node) as agent:
        assert [each.job for each in agent.registry] == [good]
        assert list(agent.registry.unreadable.values()) == ["OverflowError: int too large to convert to float"]


async def test_memory_that_vanishes_at_the_start_is_no_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment of the agent's look somebody removes another job's memory: it starts, and nothing comes back."""
    good = node.job(node.shm())
    async with node.open(good) as hierarchy:
        await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), good)])
    first, read = roster_module.first_tier, roster_module.read_job
    for moment in ("before it is opened", "once it is open", "once it was read"):
        vanishing = node.job(node.shm())
        name = node.namespaces[-1]
        async with node.open(vanishing) as hierarchy:
            await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), vanishing)])

        def remove(url: str, now: str, moment: str = moment, name: str = name) -> None:
            if moment == now and url.partition("?")[0] == f"shm://{name}":
                shutil.rmtree(root_of(name))

        def opens(namespace: str, remove: Removing = remove) -> AbstractAsyncContextManager[TierDriver]:
            remove(namespace, "before it is opened")
            return first(namespace)

        async def reads(tier: TierDriver, rank: int, remove: Removing = remove) -> ReplicationJob:
            remove(tier.url, "once it is open")
            job = await read(tier, rank)
            remove(tier.url, "once it was read")
            return job

        monkeypatch.setattr(roster_module, "first_tier", opens)
        monkeypatch.setattr(roster_module, "read_job", reads)
        async with running(node) as agent:
            for replicator in agent.registry:
                if replicator.job != good:
                    await until(lambda replicator=replicator: replicator.gone, moment)  # type: ignore[misc]
            await agent.registry.tidy()
            assert [each.job for each in agent.registry] == [good], moment
        assert not root_of(name).exists(), f"it came back, empty: {moment}"


async def test_memory_that_is_removed_under_a_mover_ends_it(node: Node) -> None:
    job = node.job(node.shm())
    root = root_of(node.namespaces[-1])
    async with running(node) as agent, node.open(job) as hierarchy:
        async with trainer(node, job) as (mover, _, _):
            await mover.register()
        (replicator,) = agent.registry
        await until(lambda: replicator.state == "moving", "the mover")
        del hierarchy
        shutil.rmtree(root)
        await until(lambda: replicator.gone, "its end")
        assert (replicator.state, replicator.needed) == ("gone", False)
        await agent.registry.tidy()
        assert len(agent.registry) == 0
    assert not root.exists()


async def test_what_could_not_be_taken_up_is_tried_again(node: Node, clock: Clock) -> None:
    first, unknown = node.shm(), node.shm()
    job = node.job(first)
    async with node.open(job) as hierarchy:
        await open_generation(hierarchy)
        await hierarchy.first.driver.put(str(JobKey(0)), [b"half of it"])
        odd = node.job(unknown, durable="nonsense://x")
    async with make_driver(unknown) as driver:
        await driver.put(str(JobKey(0)), [seal(JobKey(0), odd)])
    async with running(node) as agent:
        serving = asyncio.create_task(agent.serve())
        (troubled,) = agent.registry
        await until(lambda: troubled.trouble is not None, "the trouble")
        assert "no driver nonsense://" in str(troubled.trouble)
        assert len(agent.registry.unreadable) == 1
        async with make_driver(first) as driver:
            await driver.put(str(JobKey(0)), [seal(JobKey(0), job)])
        clock.ahead_s += 60
        await until(lambda: len(agent.registry) == 2 and not agent.registry.unreadable, "another look")
        agent.drain_first = False
        agent.ending.set()
        await serving


async def test_memory_of_one_process_cannot_be_nominated(node: Node) -> None:
    async with running(node), await connect_agent(node.name) as client:
        with pytest.raises(ConfigurationError, match="sees nothing of memory://"):
            await client.register("memory://mine", 0, 1)
        with pytest.raises(ConfigurationError, match="no driver nonsense://"):
            await client.register("nonsense://mine", 0, 1)


async def test_a_newer_generation_replaces_the_older_one(node: Node) -> None:
    first = node.shm()
    old, new = node.job(first), node.job(first, generation=2)
    async with running(node) as agent, trainer(node, old) as (older, hierarchy, client):
        await older.register()
        await capture(hierarchy, base(0))
        await older.drain(10, closing=False)
        await open_generation(hierarchy, 2, parent=1, left_at=0)
        newer = RemoteMover(client, hierarchy.first.driver, new)
        await newer.register()
        assert [each.job.generation for each in agent.registry] == [2]
        await capture(hierarchy, base(0, generation=2))
        await newer.drain(10, closing=True)
        assert str(CommitKey(2, 0)) in await held(hierarchy)
        with pytest.raises(JobConflict, match="has been registered already"):
            await older.register()


async def test_a_superseded_mover_tells_its_trainer_and_closes_its_tiers(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, _):
        await mover.register()
        await mover.drain(10, closing=False)
        life = asyncio.create_task(mover.run())
        await hierarchy.tiers[-1].driver.put(str(LineageKey(2)), [b"another job's"])
        async with asyncio.timeout(10):
            await life
        assert "generation 2 of this job has opened" in str(mover.conflict)
        with pytest.raises(JobConflict):
            await mover.room_for_base(1)
        (replicator,) = agent.registry
        assert (replicator.state, replicator.needed) == ("superseded", False)


async def client_waits(mover: RemoteMover) -> None:
    """Whether it is done before the pause comes is chance."""
    try:
        await mover.drain(20, closing=True)
    except Transient as error:
        assert "broken off" in str(error)


def holding(node: Node, job: ReplicationJob) -> TrainerLock:
    """Of a trainer that is about to recover."""
    return TrainerLock(RunDirectory.of(node.name), job.namespace, job.rank)


async def test_while_a_trainer_recovers_nothing_moves(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await mover.drain(10, closing=False)
        lock = holding(node, job)
        await client.pause(job.namespace, 0)
        (replicator,) = agent.registry
        assert (replicator.state, replicator.needed) == ("paused", True)
        await capture(hierarchy, base(0))
        with pytest.raises(DeadlineExceeded, match="its replication job is paused"):
            await mover.drain(1.0, closing=False)
        assert await held(hierarchy) == []
        await mover.register()
        lock.recovered()
        await mover.drain(10, closing=False)
        assert str(CommitKey(1, 0)) in await held(hierarchy)
        lock.release()


async def test_what_an_agent_shows_is_what_its_mover_saw_and_no_tier_is_asked(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = node.job(node.shm())
    run, calls = FileDriver.run, list[str]()

    async def counted(self: FileDriver, *given: Any, **named: Any) -> Any:
        calls.append(self.url)
        return await run(self, *given, **named)

    monkeypatch.setattr(FileDriver, "run", counted)
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        await capture(hierarchy, base(0))
        await mover.register()
        await mover.drain(10, closing=False)
        lock = holding(node, job)
        await client.pause(job.namespace, 0)  # what the mover itself asks of its tiers ends here
        calls.clear()
        for _ in range(3):
            tiers = (await client.status())["ranks"][0]["tiers"]
            assert [(tier["holds"]["bases"], tier["holds"]["committed"]) for tier in tiers] == [([0], []), ([0], [0])]
            assert [tier["survives"] for tier in tiers] == ["process", "rack"]
            await agent._page()
            await agent._metrics()
        assert calls == []
        lock.release()


async def test_a_pause_ends_with_who_asked_for_it_and_breaks_off_what_waits(node: Node) -> None:
    job = node.job(node.shm(), world_size=2)
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await capture(hierarchy, base(0), base(10))
        (replicator,) = agent.registry
        await until(lambda: replicator.state == "moving", "the mover")
        (node.durable / "g000001").mkdir(exist_ok=True)
        waiting = asyncio.create_task(client_waits(mover))
        lock = holding(node, job)
        await client.pause(job.namespace, 0)
        assert replicator.state == "paused"
        lock.release()  # as the kernel does, however the process ends
        await until(lambda: replicator.state == "moving", "the end of the pause")
        await waiting
        await client.pause("shm://nobody", 3)


async def test_whoever_does_not_hold_the_rank_pauses_nothing(node: Node) -> None:
    """Such as another job of the name, which is refused: the mover of the one that trains goes on."""
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        lock = holding(node, job)
        await mover.register()
        lock.recovered()
        with pytest.raises(JobConflict, match=r"this process is using shm://.* for rank 0 already"):
            holding(node, job)
        await client.pause(job.namespace, 0)
        (replicator,) = agent.registry
        assert replicator.state != "paused"
        await capture(hierarchy, base(0))
        await mover.drain(10, closing=False)
        lock.release()


async def test_an_agent_that_comes_back_finds_the_pause(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, hierarchy, _):
        await mover.register()
        await mover.drain(10, closing=False)
    lock = holding(node, job)
    async with node.open(job) as hierarchy:
        await capture(hierarchy, base(0))
        async with running(node) as agent:
            (replicator,) = agent.registry
            assert replicator.state == "paused"
            assert replicator._living is not None
            await asyncio.wait([replicator._living], timeout=0.2)
            assert await held(hierarchy) == []
            lock.release()
            await until(lambda: replicator.status.watermark == 0, "the end of the pause")


async def test_what_is_withdrawn_is_forgotten(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await mover.withdraw()
        await mover.withdraw()
        assert len(agent.registry) == 0
        assert [info async for info in hierarchy.first.driver.list("replication/")] == []
        with pytest.raises(NotFound, match="knows no replication job of rank 0"):
            await client.request(Look(5.0, job.namespace, job.rank, 1), RankReply)


async def test_a_look_that_finds_nothing_any_more_does_not_register_again(node: Node) -> None:
    """The trainer looks about once a second, also just before and after it has taken its leave."""
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        looks = asyncio.create_task(mover.run())
        asked, answered = client.request, asyncio.Event()

        async def late(request: Any, reply: Any) -> Any:
            if isinstance(request, Look):
                answered.set()
                await until(lambda: len(agent.registry) == 0, "the leave")
            return await asked(request, reply)

        client.request = late  # type: ignore[method-assign, assignment]
        await answered.wait()
        await mover.withdraw()
        async with asyncio.timeout(20):
            await looks
        assert len(agent.registry) == 0
        assert [info async for info in hierarchy.first.driver.list("replication/")] == []


async def test_a_mover_nominates_again_where_the_agent_has_forgotten(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await client.withdraw(job.namespace, 0, 1)
        await capture(hierarchy, base(0))
        await mover.drain(10, closing=True)
        assert mover.status.watermark == 0


@pytest.mark.parametrize("lacking", ["", "torch"])
async def test_it_says_whether_it_could_fold(node: Node, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    monkeypatch.setattr("tiercheck.agent.server.service.find_spec", lambda name: None if name == lacking else name)
    async with running(node), await connect_agent(node.name) as client:
        assert client.hello.lacks_to_fold == lacking
