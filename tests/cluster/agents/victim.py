"""Agents that are killed while they move; run as a module by ``test_kills.py``.

Forks an agent again and again and kills it with SIGKILL before a later and later call to the operating system, until
one lives through all it has to do. After each death everything that was captured must still be there, whole.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path

from tests.cluster.dying import die_before_event, lives_through
from tests.servers.agents import Node, base, capture, fake_peer, open_generation, record
from tiercheck.agent.server.service import Agent
from tiercheck.format import container
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import CommitKey, JobKey, MarkerKey, ShardKey, parse
from tiercheck.replication.job import ReplicationJob
from tiercheck.replication.objects.records import seal

BASES = (0, 6, 12)
LAST = 17
NBYTES = 150_000


async def prepare(node: Node, job: ReplicationJob) -> None:
    async with node.open(job) as hierarchy:
        await open_generation(hierarchy)
        await hierarchy.first.driver.put(str(JobKey(0)), [seal(JobKey(0), job)])
        await capture(hierarchy, *(base(version) for version in BASES), nbytes=NBYTES)
        await capture(hierarchy, *(record(version) for version in range(1, LAST + 1)), nbytes=NBYTES)


async def live(node: Node, number: int | None) -> None:
    async with Agent(node.settings(drain_s=60.0), make_peer_server=fake_peer) as agent:
        if number is not None:
            die_before_event(number)
        await agent.drain()


async def check(node: Node, job: ReplicationJob, *, finished: bool) -> None:
    """What is in the tiers is whole, and every version after the newest committed base can be had."""
    async with node.open(job) as hierarchy:
        held = [await whole(hierarchy, index) for index in range(2)]
        commits = [key.version for key in held[1] if isinstance(key, CommitKey)]
        for version in commits:
            assert ShardKey.base(1, version, 0) in held[1], f"base {version} is committed, and not there"
        shards = [key for each in held for key in each if isinstance(key, ShardKey)]
        covered = {v for key in shards if key.stream == "differential" for v in key.versions}
        bases = {key.first for key in shards if key.stream == "base"}
        assert max(BASES) in bases, "the newest base is gone"
        for anchor in (version for version in bases if version <= max(BASES)):
            if anchor in commits[-1:] or anchor == max(BASES):
                assert covered.issuperset(range(anchor + 1, LAST + 1)), f"versions after {anchor} are gone: {covered}"
        if finished:
            assert commits[-1] == max(BASES)
            assert not any(isinstance(key, MarkerKey) for key in held[1]), "what is committed needs no marker"
            durable = {v for key in held[1] if isinstance(key, ShardKey) for v in key.versions}
            assert durable.issuperset(range(max(BASES), LAST + 1))


async def whole(hierarchy: OpenHierarchy, index: int) -> list[object]:
    """The keys of a tier, each shard verified."""
    found: list[object] = []
    async for info in hierarchy.tiers[index].driver.list():
        key = parse(info.key)
        if not isinstance(key, ShardKey | MarkerKey | CommitKey):
            continue
        found.append(key)
        if isinstance(key, ShardKey):
            container.parse(await hierarchy.tiers[index].driver.get(info.key), key=info.key).verify()
    return found


def kill_at_every_point(node: Node, step: int) -> int:
    """How many times an agent was killed."""
    killed = number = 0
    while True:
        job = node.job(node.shm(), durable=f"nvme://{node.folder}/durable-{number}?survives=rack", batch=3)
        asyncio.run(prepare(node, job))
        lived = lives_through(functools.partial(live, node, number))
        asyncio.run(check(node, job, finished=lived))
        # The next one finds the replication job by itself and goes on with what is left.
        asyncio.run(live(node, None))
        asyncio.run(check(node, job, finished=True))
        node.clear_memory()
        if lived:
            return killed
        killed += 1
        number += step


if __name__ == "__main__":
    victim = Node(Path(sys.argv[1]))
    try:
        print(kill_at_every_point(victim, int(sys.argv[2])))
    finally:
        victim.clear_memory()
