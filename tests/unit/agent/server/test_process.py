"""How an agent begins and ends: one of a name, for as long as somebody needs it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.servers.agents import (
    FakePeer,
    FakeStatistics,
    Node,
    base,
    capture,
    fake_peer,
    held,
    node,
    open_generation,
    record,
)
from tests.unit.agent.server.test_service import Clock, brisk, clock, running, trainer, until
from tiercheck.agent.client import start
from tiercheck.agent.client.client import AgentClient, connect_agent
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.agent.protocol.messages import Hello, pack_request
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.agent.protocol.settings import AgentSettings
from tiercheck.agent.server.neighbours import OpenNamespace
from tiercheck.agent.server.process import END_S_MAX
from tiercheck.agent.server.service import OVERDUE_S, Agent
from tiercheck.agent.status.metrics import metrics_text
from tiercheck.agent.status.page import render
from tiercheck.cli.agent import ask
from tiercheck.errors import ConfigurationError, JobConflict
from tiercheck.keys import ShardKey
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.tiers.registry import make_driver

__all__ = ["brisk", "clock", "node"]


async def test_two_agents_of_one_name_cannot_run(node: Node) -> None:
    async with running(node):
        with pytest.raises(JobConflict, match=r"an agent of node .* runs already"):
            async with running(node):
                pass
    async with running(node):
        pass


async def test_an_agent_that_no_longer_answers_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise OverflowError("a bug")

    monkeypatch.setattr("tiercheck.agent.server.router.Router._accept", broken)
    async with running(node) as agent:
        serving = asyncio.create_task(agent.serve())
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(agent.run.address)
            await stranger.send(pack_request(1, Hello(5.0)))
            async with asyncio.timeout(20):
                with pytest.raises(OverflowError, match="a bug"):
                    await serving


async def test_an_agent_whose_neighbours_nobody_serves_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(node, bind=None) as agent:
        serving = asyncio.create_task(agent.serve())

        def stopped(_: FakePeer) -> None:
            raise RuntimeError("the peer server has stopped")

        monkeypatch.setattr(FakePeer, "check", stopped)
        async with asyncio.timeout(20):
            with pytest.raises(RuntimeError, match="peer server has stopped"):
                await serving


async def test_one_that_somebody_else_was_starting_does_as_well(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank was killed while it started the agent; the next one starts another, which finds the first one there."""
    run = RunDirectory.of(node.name)
    async with AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()

        def spawn(*_: object) -> int:
            asyncio.run_coroutine_threadsafe(stack.enter_async_context(running(node)), loop).result(20)
            return 1

        monkeypatch.setattr(start, "_spawn", spawn)
        await start.start_detached(run, node.settings(), {}, 20)
        assert run.agent_lives()


async def test_one_that_waits_for_the_lock_of_a_platforms_is_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.of(node.name)
    leave = threading.Event()
    async with AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()

        def spawn(*_: object) -> int:
            asyncio.run_coroutine_threadsafe(stack.enter_async_context(running(node)), loop).result(20)
            leave.wait(20)
            return 1

        monkeypatch.setattr(start, "_spawn", spawn)
        await start.start_detached(run, node.settings(), {}, 20)
        assert not leave.is_set()
        assert run.agent_lives()
        leave.set()


async def test_files_beside_the_lock_are_kept_from_who_removes_old_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent of the node finds its port there."""
    monkeypatch.setattr("tiercheck.agent.server.service.TICK_S", 0.01)
    async with running(node) as agent:
        serving = asyncio.create_task(agent.serve())
        said = agent.run.info.read_bytes()
        beside = [path for path in (agent.run.info, agent.run.peer_socket) if path.exists()]
        for path in beside:
            os.utime(path, (0, 0))
        await until(lambda: all(path.stat().st_mtime > 0 for path in beside), "they are new")
        agent.run.info.unlink()
        await until(agent.run.info.exists, "it is written again")
        assert json.loads(agent.run.info.read_bytes())["incarnation"] == json.loads(said)["incarnation"]
        agent.ending.set()
        await serving


async def test_the_platforms_agent_relieves_one_that_a_trainer_started(node: Node) -> None:
    job = node.job(node.shm())
    async with AsyncExitStack() as stack:
        older = await stack.enter_async_context(running(node, detached=True))
        mover, hierarchy, client = await stack.enter_async_context(trainer(node, job))
        await mover.register()

        async def serve_and_close() -> None:
            await older.serve()
            await older.close()

        serving = asyncio.create_task(serve_and_close())
        newer = await stack.enter_async_context(running(node, detached=False))
        await serving
        assert [each.job for each in newer.registry] == [job]
        await capture(hierarchy, base(0))
        await mover.drain(10, closing=True)
        assert client.hello.incarnation == newer.hello().incarnation


async def test_a_detached_agent_ends_when_nobody_needs_it(node: Node, clock: Clock) -> None:
    job = node.job(node.shm())
    async with running(node, linger_s=600.0) as agent:
        serving = asyncio.create_task(agent.serve())
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0))
            (replicator,) = agent.registry
            life = asyncio.create_task(mover.run())
            for _ in range(5):
                clock.ahead_s += 400
                await until(lambda: replicator.silent_s < 300, "a word of the trainer's")
                assert agent.unneeded_s() < 1
            assert not serving.done(), "its trainer lives"
            life.cancel()
            await asyncio.wait([life])
        clock.ahead_s += 1000
        assert agent.unneeded_s() < 1, "what the trainer left has not been looked after"
        await until(lambda: not replicator.needed, "the end of what there was to do")
        clock.ahead_s += 500
        assert agent.unneeded_s() < 600
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done()
        clock.ahead_s += 200
        async with asyncio.timeout(10):
            await serving
        assert replicator.status.watermark == 0, "it ended before everything was where it belongs"


async def test_after_a_crash_it_lingers_once(node: Node, clock: Clock) -> None:
    job = node.job(node.shm())
    async with running(node, linger_s=600.0) as agent:
        serving = asyncio.create_task(agent.serve())
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0), record(1))
        (replicator,) = agent.registry
        clock.ahead_s += 20
        await until(lambda: replicator.needed_at < clock() - 0.01, "the end of what there was to do")
        clock.ahead_s += 590
        assert agent.unneeded_s() < 600
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done()
        clock.ahead_s += 20
        async with asyncio.timeout(10):
            await serving
        assert str(ShardKey.differential(1, 1, 1, 0)) in await held_at_the_end(node, job)


async def held_at_the_end(node: Node, job: ReplicationJob) -> list[str]:
    async with node.open(job) as hierarchy:
        return await held(hierarchy)


async def test_what_no_tier_ever_takes_is_left_to_the_next_agent(node: Node, clock: Clock) -> None:
    """Such as the copy for a neighbour that is never started again, when the whole job was given up."""
    (node.folder / "notadir").write_text("in the way")
    away = JobTier("peer", f"nvme://{node.folder}/notadir/x?survives=node")
    plain = node.job(node.shm())
    job = replace(plain, tiers=(plain.tiers[0], away, plain.tiers[1]))
    async with running(node, linger_s=600.0, abandon_s=86400.0) as agent:
        serving = asyncio.create_task(agent.serve())
        async with trainer(node, plain) as (_, hierarchy, client):
            await RemoteMover(client, hierarchy.first.driver, job).register()
            await capture(hierarchy, base(0), record(1))
        (replicator,) = agent.registry
        clock.ahead_s += 80_000
        await until(lambda: "peer" in replicator.status.errors, "the trouble")
        assert agent.unneeded_s() < 1, "the neighbour may come back"
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done()
        clock.ahead_s += 10_000
        async with asyncio.timeout(10):
            await serving
    (node.folder / "notadir").unlink()
    async with running(node) as agent:
        (replicator,) = agent.registry
        await until(lambda: (node.folder / "notadir" / "x" / str(base(0))).exists(), "the copy")


async def test_the_platforms_agent_never_gives_up(node: Node, clock: Clock) -> None:
    (node.folder / "notadir").write_text("in the way")
    job = node.job(node.shm(), durable=f"nvme://{node.folder}/notadir/x?survives=rack")
    async with running(node, detached=False) as agent, await connect_agent(node.name) as client:
        async with node.open(replace(job, tiers=job.tiers[:1])) as hierarchy:
            await open_generation(hierarchy)
            await RemoteMover(client, hierarchy.first.driver, job).register()
            await capture(hierarchy, base(0))
        (replicator,) = agent.registry
        clock.ahead_s += 1_000_000
        await agent.registry.tidy()
        assert list(agent.registry) == [replicator]
        (node.folder / "notadir").unlink()
        await until(lambda: replicator.status.watermark == 0, "the base's commit")


async def test_the_platforms_agent_stays(node: Node, clock: Clock) -> None:
    async with running(node, linger_s=0.0, detached=False) as agent:
        serving = asyncio.create_task(agent.serve())
        clock.ahead_s += 10_000
        await asyncio.wait([serving], timeout=0.1)
        assert not serving.done()
        agent.ending.set()
        await serving


async def test_what_nobody_has_needed_for_a_day_is_forgotten(node: Node, clock: Clock) -> None:
    job = node.job(node.shm())
    async with (
        running(node, detached=False, linger_s=60.0) as agent,
        trainer(node, job) as (mover, hierarchy, _),
    ):
        serving = asyncio.create_task(agent.serve())
        await mover.register()
        (replicator,) = agent.registry
        clock.ahead_s += 100
        await until(lambda: replicator.state == "resting", "rest")
        await agent.registry.tidy()
        assert len(agent.registry) == 1
        clock.ahead_s += 100_000
        await until(lambda: len(agent.registry) == 0, "its being forgotten")
        await capture(hierarchy, base(0))
        await mover.drain(10, closing=True)  # which registers again
        assert mover.status.watermark == 0
        agent.ending.set()
        await serving


async def test_neighbours_keep_a_detached_agent(node: Node) -> None:
    peers: list[FakePeer] = []

    def make(settings: object, open_namespace: object, bind: str) -> FakePeer:
        peers.append(FakePeer(bind))
        return peers[-1]

    async with Agent(node.settings(bind=None), make_peer_server=make) as agent:
        (peer,) = peers
        assert peer.running
        agent._needed_at = -1e9
        peer.statistics = FakeStatistics(objects_put=1)
        assert agent.unneeded_s() < 1
        agent._needed_at = -1e9
        assert agent.unneeded_s() > 1e8
    assert not peer.running


async def test_the_peer_server_comes_back_to_its_port(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.agent.server.service.PORT_AGAIN_S", 0.01)
    binds: list[str] = []
    refused: dict[str, int] = {}

    def make(settings: AgentSettings, open_namespace: OpenNamespace, bind: str) -> FakePeer:
        binds.append(bind)
        if refused.get(bind, 0) > 0:
            refused[bind] -= 1
            raise ConfigurationError(f"the peer server cannot bind {bind}: Address already in use")
        return fake_peer(settings, open_namespace, bind)

    settings = node.settings(bind=None, keys="/k")
    async with Agent(settings, make_peer_server=make) as agent:
        first = agent.hello().peer_endpoint
        assert first is not None
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        port = int(first.rpartition(":")[2])
        assert not low <= port <= high, "the system may give it to anybody as soon as the agent is dead"
    refused[f"tcp://{first}"] = 3
    async with Agent(settings, make_peer_server=make) as agent:
        assert agent.hello().peer_endpoint == first, "it has not waited for the port"
        snapshot = agent.snapshot()
        assert snapshot.peer is not None
        assert snapshot.peer.lost_port is None
    refused[f"tcp://{first}"] = 10**6
    monkeypatch.setattr("tiercheck.agent.server.service.PORT_S_MAX", 0.05)
    async with Agent(settings, make_peer_server=make) as agent:
        assert agent.hello().peer_endpoint != first
        snapshot = agent.snapshot()
        assert snapshot.peer is not None
        assert snapshot.peer.lost_port == str(port)
        assert f"ranks that know port {port} are cut off" in render(snapshot)
        assert "tiercheck_peer_lost_port 1.0" in metrics_text(snapshot)[1]


async def test_an_agent_whose_first_port_is_taken_takes_another(node: Node) -> None:
    tried: list[str] = []

    def make(settings: AgentSettings, open_namespace: OpenNamespace, bind: str) -> FakePeer:
        tried.append(bind)
        if not bind.endswith(":0"):
            raise ConfigurationError(f"the peer server cannot bind {bind}: Address already in use")
        return fake_peer(settings, open_namespace, bind)

    async with Agent(node.settings(bind=None, keys="/k"), make_peer_server=make) as agent:
        assert agent.hello().peer_endpoint is not None
    assert len(tried) == len(set(tried)) > 10


async def test_the_end_drains(node: Node) -> None:
    job = node.job(node.shm(), batch=5)
    async with running(node, drain_s=20) as agent:
        serving = asyncio.create_task(agent.serve())
        async with trainer(node, job) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0), record(1), record(2))
            agent.ending.set()
            await serving
            assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)


async def test_the_end_does_not_wait_for_a_store_that_is_down(node: Node) -> None:
    (node.folder / "notadir").write_text("in the way")
    bad = node.job(node.shm(), durable=f"nvme://{node.folder}/notadir/x?survives=rack")
    async with running(node, drain_s=0.2) as agent, await connect_agent(node.name) as client:
        async with make_driver(bad.namespace) as first:
            await RemoteMover(client, first, bad).register()
        agent.ending.set()
        async with asyncio.timeout(10):
            await agent.serve()


async def test_a_stop_waits_for_as_long_as_the_agent_may_drain(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def lives(self: AgentClient, wanted: bool, until: float) -> bool:
        waits.append(until - asyncio.get_running_loop().time())
        return True

    monkeypatch.setattr(AgentClient, "_agent_lives", lives)
    async with running(node, drain_s=300.0) as agent:
        assert (await ask(node.name, stop=True))["ended"]
        assert agent.ending.is_set()
        async with await connect_agent(node.name) as client:
            await client.stop(drain=False)
    slack_s = OVERDUE_S + END_S_MAX
    assert 300 + slack_s < waits[0] < 400, "it would give up on a sound end"
    assert slack_s < waits[1] < 100


async def test_a_status_page_without_its_port_is_one_clear_error(node: Node) -> None:
    async with running(node) as agent:
        port = agent.hello().http.rstrip("/").rpartition(":")[2]
        other = AgentSettings(node=f"{node.name}-2", bind="", http_port=int(port))
        with pytest.raises(ConfigurationError, match=rf"cannot have port {port} .* in use; give another --http-port"):
            async with Agent(other):
                pass
        assert not RunDirectory.of(other.node).agent_lives(), "the next one can start"


async def test_the_status_says_everything(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, hierarchy, client):
        await mover.register()
        await capture(hierarchy, base(0), record(1), record(2))
        await mover.drain(10, closing=True)
        status = await client.status()
        (rank,) = status["ranks"]
        assert (rank["state"], rank["rank"], rank["generation"]) == ("moving", 0, 1)
        assert rank["mover"]["watermark"] == 0
        assert rank["tiers"][1]["holds"]["committed"] == [0]
        assert rank["tiers"][1]["holds"]["batches"] == [[1, 2]]
        assert status["http"] == client.hello.http
        info = json.loads((node.folder / "run" / f"agent-{node.name}.json").read_text())
        assert (info["pid"], info["http"]) == (client.hello.pid, client.hello.http)
