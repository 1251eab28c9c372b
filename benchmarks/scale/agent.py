"""What a node's agent costs: the processor time of a real one, by how many ranks it moves for, at rest and at a version
a second of each rank. Objects are of 64 bytes, so that copying them does not count."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tiercheck.agent.client.client import connect_agent, ensure_agent
from tiercheck.agent.client.remote_mover import RemoteMover
from tiercheck.errors import NotFound
from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import LineageKey, ShardKey
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.replication.objects.records import seal
from tiercheck.tiers.shm.namespaces import remove_namespace

__all__ = ["AgentCost", "agent_cost"]

TOKEN = "ab" * 8
BATCH = 5
DRAIN_S = 60.0
END_S_MAX = 30.0
RUN_DIR = "TIERCHECK_RUN_DIR"
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class AgentCost:
    """Shares of one processor."""

    ranks: int
    idle: float
    version_a_second: float


async def agent_cost(ranks: int, seconds: float, settle_s: float) -> AgentCost:
    """Measure each for so many seconds; at rest after ``settle_s``, when pauses between looks have grown."""
    async with _node(ranks) as (agent, tiers, movers):
        await asyncio.sleep(settle_s)
        begun = _processor_s(agent)
        await asyncio.sleep(seconds)
        idle = _processor_s(agent) - begun
        begun, start = _processor_s(agent), time.perf_counter()
        for version in range(1, round(seconds) + 1):
            for rank, (hierarchy, mover) in enumerate(zip(tiers, movers, strict=True)):
                await _put(hierarchy, ShardKey.differential(1, version, version, rank), ranks)
                mover.nudge()
            await asyncio.sleep(max(0.0, start + version - time.perf_counter()))
        busy = (_processor_s(agent) - begun) / (time.perf_counter() - start)
    return AgentCost(ranks, idle / seconds, busy)


@asynccontextmanager
async def _node(ranks: int) -> AsyncIterator[tuple[psutil.Process, list[OpenHierarchy], list[RemoteMover]]]:
    """An agent of its own, and the ranks of a job whose first base has reached the durable tier."""
    folder, name = Path(tempfile.mkdtemp(prefix="tc-")), f"scale-{uuid.uuid4().hex[:8]}"
    before = os.environ.get(RUN_DIR)
    os.environ[RUN_DIR] = str(folder / "run")
    (folder / "run").mkdir(mode=0o700)
    places = (JobTier("shm", f"shm://{name}?size=512MiB"), JobTier("nvme", f"nvme://{folder}/durable?survives=rack"))
    agent: psutil.Process | None = None
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(await ensure_agent(name))
            agent = psutil.Process(client.hello.pid)
            tiers: list[OpenHierarchy] = []
            movers: list[RemoteMover] = []
            for rank in range(ranks):
                job = ReplicationJob(places, name, rank, ranks, 1, BATCH)
                hierarchy = await stack.enter_async_context(job.hierarchy.open(rank=rank))
                if not rank:
                    for tier in hierarchy.tiers:
                        await tier.driver.put(str(LineageKey(1)), [seal(LineageKey(1), Branch(1, 0, 0, ranks, TOKEN))])
                own = await stack.enter_async_context(await connect_agent(name))
                movers.append(RemoteMover(own, hierarchy.first.driver, job))
                tiers.append(hierarchy)
                await movers[-1].register()
                await _put(hierarchy, ShardKey.base(1, 0, rank), ranks)
            for mover in movers:
                await mover.drain(DRAIN_S, closing=False)
            yield agent, tiers, movers
    finally:
        if agent is not None:
            agent.terminate()
            await asyncio.to_thread(agent.wait, END_S_MAX)
        with suppress(NotFound):
            remove_namespace(name)
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(RUN_DIR)
        if before is not None:
            os.environ[RUN_DIR] = before


def _processor_s(process: psutil.Process) -> float:
    """To the nanosecond; ``psutil`` counts in hundredths of a second, which a version does not take."""
    clock = ctypes.c_int()
    if number := _libc.clock_getcpuclockid(process.pid, ctypes.byref(clock)):
        raise OSError(number, os.strerror(number))
    return time.clock_gettime(clock.value)


async def _put(hierarchy: OpenHierarchy, key: ShardKey, world_size: int) -> None:
    metadata = ShardMetadata.of(key, world_size, TOKEN)
    shard = container.payload(metadata, [TensorEntry(f"{key.first}/x", "U8", (64,), bytes(64))])
    await hierarchy.first.driver.put(str(key), list(shard))
