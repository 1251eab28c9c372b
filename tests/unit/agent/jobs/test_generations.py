"""Trainers of several generations at one agent: what an older one says or writes never harms a newer one."""

from __future__ import annotations

import asyncio
import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.servers.agents import Node, base, capture, held, node, open_generation, record
from tests.unit.agent.server.test_service import brisk, running, trainer, until
from tiercheck.agent.client.client import AgentClient, connect_agent
from tiercheck.agent.client.remote_mover import AGENT, RemoteMover
from tiercheck.agent.jobs.job_store import as_agent_opens, read_job, write_job
from tiercheck.agent.jobs.states import State
from tiercheck.agent.protocol.messages import RankReply
from tiercheck.agent.protocol.rundir import RunDirectory
from tiercheck.errors import CapacityExceeded, ConfigurationError, JobConflict, NotFound, Transient
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import CommitKey, JobKey, LineageKey
from tiercheck.replication.objects.records import seal
from tiercheck.tiers.registry import make_driver

__all__ = ["brisk", "node"]


async def next_generation(
    node: Node, first: str, hierarchy: OpenHierarchy, client: AgentClient, generation: int = 2
) -> RemoteMover:
    """The mover of a generation that follows the first, registered."""
    await open_generation(hierarchy, generation, parent=1)
    mover = RemoteMover(client, hierarchy.first.driver, node.job(first, generation=generation))
    await mover.register()
    return mover


async def recorded(hierarchy: OpenHierarchy) -> int:
    return (await read_job(hierarchy.first.driver, 0)).generation


@pytest.mark.parametrize("what", ["run", "cycle", "room_for_base", "drain", "withdraw"])
async def test_a_trainer_that_was_replaced_while_it_stood_still_is_told(node: Node, what: str) -> None:
    first = node.shm()
    async with running(node), trainer(node, node.job(first)) as (older, hierarchy, client):
        await older.register()
        newer = await next_generation(node, first, hierarchy, client)
        asked = {
            "run": older.run,
            "cycle": older.cycle,
            "room_for_base": lambda: older.room_for_base(5),
            "drain": lambda: older.drain(5, closing=True),
            "withdraw": older.withdraw,
        }[what]
        async with asyncio.timeout(20):
            if what == "run":
                await asked()  # which is at its end thereby
            else:
                with pytest.raises(JobConflict, match="has taken up generation 2 of rank 0, while generation 1 is"):
                    await asked()
        assert what == "withdraw" or "generation 2" in str(older.conflict)
        assert await recorded(hierarchy) == 2
        await capture(hierarchy, base(0, generation=2))
        await newer.drain(10, closing=True)
        assert str(CommitKey(2, 0)) in await held(hierarchy)


async def test_an_older_trainer_keeps_no_newer_one_alive(node: Node) -> None:
    first = node.shm()
    async with running(node) as agent, trainer(node, node.job(first)) as (older, hierarchy, client):
        await older.register()
        await next_generation(node, first, hierarchy, client)
        (replicator,) = agent.registry
        before = replicator._heard_at
        with pytest.raises(JobConflict):
            await older.cycle()
        assert replicator._heard_at == before


async def test_an_older_nomination_leaves_a_newer_record_as_it_is(node: Node) -> None:
    first = node.shm()
    async with running(node), trainer(node, node.job(first)) as (older, hierarchy, client):
        await older.register()
        await next_generation(node, first, hierarchy, client)
        content = bytes(await hierarchy.first.driver.get(str(JobKey(0))))
        with pytest.raises(JobConflict, match="has been registered already"):
            await older.register()
        assert bytes(await hierarchy.first.driver.get(str(JobKey(0)))) == content


async def test_a_record_that_changes_under_the_writer_is_looked_at_again(node: Node) -> None:
    """The newer one comes between the older one's look and its put."""
    first = node.shm()
    old = node.job(first)
    new = replace(old, generation=2)
    async with node.open(old) as hierarchy:
        driver = hierarchy.first.driver
        await open_generation(hierarchy, 2, parent=1)
        await write_job(driver, replace(old, generation=0))
        put, between = driver.put, [new]

        async def late_put(key: str, *args: object, **options: object) -> object:
            if between:
                await put(key, [seal(JobKey(0), between.pop())])
            return await put(key, *args, **options)  # type: ignore[arg-type]

        await open_generation(hierarchy)
        driver.put = late_put  # type: ignore[method-assign, assignment]
        with pytest.raises(JobConflict, match="generation 2"):
            await write_job(driver, old)
        assert await recorded(hierarchy) == 2


async def test_what_cannot_be_read_is_written_over(node: Node) -> None:
    job = node.job(node.shm())
    async with node.open(job) as hierarchy:
        for content in (b"\xc1 nonsense", seal(JobKey(0), {"tiers": []})):
            await hierarchy.first.driver.put(str(JobKey(0)), [content])
            await write_job(hierarchy.first.driver, job)
            assert await read_job(hierarchy.first.driver, 0) == job


async def test_a_record_that_an_older_leave_took_along_is_put_again(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node) as agent, trainer(node, job) as (mover, hierarchy, client):
        ask, lost = client.register, [True]

        async def register(*args: object, **options: object) -> RankReply:
            if lost:
                lost.clear()
                await hierarchy.first.driver.delete([str(JobKey(0))])
            return await ask(*args, **options)  # type: ignore[arg-type]

        client.register = register  # type: ignore[method-assign, assignment]
        await mover.register()
        assert await recorded(hierarchy) == 1
        assert len(agent.registry) == 1


async def test_a_nomination_that_is_not_there_is_not_waited_for(node: Node) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, _, client):

        async def register(*_: object, **__: object) -> RankReply:
            raise NotFound("gone again", key="replication/000000")

        client.register = register  # type: ignore[method-assign, assignment]
        with pytest.raises(NotFound, match="gone again"):
            await mover.register()


async def test_who_begins_anew_is_taken_up_although_the_agent_remembers(node: Node) -> None:
    """As a RecoveryError advises: what the newest generations left is removed, and the numbers begin again."""
    first = node.shm()
    fifth = node.job(first, generation=5)
    async with running(node) as agent, trainer(node, fifth) as (crashed, hierarchy, client):
        await crashed.register()
        for tier in hierarchy.tiers:
            await tier.driver.delete([str(LineageKey(5))])
        await open_generation(hierarchy, 1)
        anew = RemoteMover(client, hierarchy.first.driver, node.job(first, generation=1))
        await anew.register()
        assert [each.job.generation for each in agent.registry] == [1]
        assert await recorded(hierarchy) == 1
        await capture(hierarchy, base(0))
        await anew.drain(10, closing=True)
        assert str(CommitKey(1, 0)) in await held(hierarchy)
        # Should the other one live after all, it does not take over again.
        with pytest.raises(JobConflict, match="generation 5 was removed"):
            await crashed.cycle()
        await crashed._client.withdraw(first, 0, 5)
        assert await recorded(hierarchy) == 1
        assert [each.job.generation for each in agent.registry] == [1]
        assert anew.conflict is None
        assert await anew.cycle()


async def test_memory_that_neighbours_have_filled_keeps_no_agent_from_coming_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = node.job(node.shm("64MiB"))
    async with node.open(job) as hierarchy:
        await open_generation(hierarchy)
        await write_job(hierarchy.first.driver, job)
        await capture(hierarchy, base(0))

        def full(path: object) -> object:
            return SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=1 << 20)

        for module in ("driver", "segments"):
            monkeypatch.setattr(f"tiercheck.tiers.shm.{module}.os", SimpleNamespace(**{**vars(os), "statvfs": full}))
        async with make_driver(job.namespace) as driver:
            with pytest.raises(CapacityExceeded):
                await driver.reserve("more", 1 << 20)
        async with running(node) as agent, await connect_agent(node.name) as client:
            assert agent.registry.unreadable == {}
            (replicator,) = agent.registry
            await until(lambda: replicator.status.watermark == 0, "the base's commit")
            assert replicator.trouble is None
            mover = RemoteMover(client, hierarchy.first.driver, job)
            await mover.register()
            await mover.room_for_base(5)
            await mover.withdraw()
            assert len(agent.registry) == 0
        assert str(CommitKey(1, 0)) in await held(hierarchy)


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("shm://run", "shm://run?make=no"),
        ("shm://run?size=4GiB", "shm://run?make=no&pool=2147483648"),
        ("shm://run?size=4GiB&pool=1GiB&pin=on&mount=/mnt/huge", "shm://run?pool=1GiB&mount=/mnt/huge&make=no"),
        ("nvme:///x?size=1", "nvme:///x?size=1"),
    ],
)
def test_the_agent_leaves_the_limits_of_the_first_tier_to_its_trainer(url: str, opened: str) -> None:
    assert as_agent_opens(url) == opened


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"the option 'size' of shm://run\?size=much cannot be used"):
        as_agent_opens("shm://run?size=much")


async def test_a_process_without_files_left_goes_on_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    job = node.job(node.shm())
    async with running(node), trainer(node, job) as (mover, hierarchy, _):
        await mover.register()
        life = asyncio.create_task(mover.run())
        with monkeypatch.context() as patch:

            def fails(self: RunDirectory) -> str:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            patch.setattr(RunDirectory, "incarnation", fails)
            await until(lambda: life.done() or AGENT in mover.status.errors, "the trouble")
            assert not life.done()
            assert "Too many open files" in mover.status.errors[AGENT]
            with pytest.raises(Transient, match=r"cannot be spoken to: .*Too many open files"):
                await mover.room_for_base(1)
        await until(lambda: AGENT not in mover.status.errors, "the end of the trouble")
        await capture(hierarchy, base(0))
        await mover.drain(10, closing=True)
        assert not life.done()
        life.cancel()
        await asyncio.wait([life])


@pytest.mark.parametrize("kept", [(), (1,)])
async def test_what_was_left_behind_on_purpose_stays(node: Node, kept: tuple[int, ...]) -> None:
    first = node.shm()
    async with running(node):
        async with trainer(node, node.job(first)) as (mover, hierarchy, _):
            await mover.register()
            await capture(hierarchy, base(0), record(1), record(2))
            await mover.drain(10, closing=True)
        async with trainer(node, node.job(first, generation=2)) as (mover, hierarchy, _):
            await open_generation(hierarchy, 2, parent=1, left_at=1, kept=kept)
            await mover.register()
            await capture(hierarchy, base(1, generation=2), base(5, generation=2))
            await mover.drain(10, closing=True)
            left = {key for key in map(str, (base(0), CommitKey(1, 0))) if key in await held(hierarchy)}
            assert left == ({str(base(0)), str(CommitKey(1, 0))} if kept else set())


async def test_the_job_of_a_rank_that_is_no_more_is_superseded_and_moves_nothing(node: Node) -> None:
    """The next start is on fewer ranks, so that nobody registers a job in its place."""
    departed = node.job(node.shm(), rank=1, world_size=2)
    async with running(node) as agent, trainer(node, departed) as (mover, hierarchy, _):
        await mover.register()
        (replicator,) = agent.registry
        await open_generation(hierarchy, 2, parent=1)
        await capture(hierarchy, base(0, rank=1), record(1, rank=1))
        with pytest.raises((JobConflict, Transient), match=r"generation 2|is superseded"):
            await mover.cycle()
        await until(lambda: replicator.state is State.SUPERSEDED, "it is superseded")
        assert await held(hierarchy) == []
