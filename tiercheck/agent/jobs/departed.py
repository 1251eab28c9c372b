"""Frees the memory of ranks that have left this node, once no recovery can need what they captured.

A rank leaves a node when the job starts again with fewer ranks, under another layout, or with its hosts in another
order. The agent then still holds the rank's replication job, of an older generation, and its memory. (After a clean end
it holds the memory alone.) When the newest generation has committed a base in a shared tier, no recovery goes back
behind that base. Then the agent forgets the replication job and deletes what the rank captured. If the rank comes back,
it finds what it needs in the shared tiers.

No trainer tells the agent which generation is the newest. So the agent looks in the shared tier, after 15 s at first,
and less and less often while nothing changes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tiercheck import keys
from tiercheck.agent.jobs.job_store import first_tier, registered, remove_job
from tiercheck.errors import NotFound
from tiercheck.keys import JOB, CommitKey, LineageKey, ShardKey, rank_prefix
from tiercheck.replication.job import ReplicationJob
from tiercheck.runtime.backoff import Backoff
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.shm.namespaces import SHM, remove_unheld
from tiercheck.tiers.url import TierURL

__all__ = ["LOOK_AGAIN", "LOOK_S_MAX", "captured", "free_memory", "is_past"]

LOOK_AGAIN = Backoff(15.0, 600.0)
LOOK_S_MAX = 30.0


async def is_past(job: ReplicationJob) -> bool:
    """Whether a newer generation has settled: the newest one that the job's durable tier tells of has committed a base
    there. Without a shared tier nobody can tell. Errors: ``TierError``."""
    tiers = job.hierarchy.open(rank=job.rank).tiers
    durable = max(tiers, key=lambda tier: (tier.role.survives, tier.index))
    if not durable.role.shared:
        return False
    async with durable.driver:
        found = {keys.parse(info.key) async for info in durable.driver.list(JOB)}
    newest = max((key.generation for key in found if isinstance(key, LineageKey)), default=0)
    committed = any(isinstance(key, CommitKey) and key.is_of_base and key.generation == newest for key in found)
    return newest > job.generation and committed


async def free_memory(job: ReplicationJob) -> None:
    """Delete the job's record in the first tier and what :func:`captured` names. If nothing else is in the memory under
    this name, and no process has it open, it goes as a whole. What has changed meanwhile stays.
    Errors: ``JobConflict``; ``TierError``."""
    try:
        async with first_tier(job.namespace) as first:
            if not await is_newest(first, job):
                return
            await first.delete(await captured(first, job))
            await remove_job(first, job.rank, job.generation)
            is_empty = not [info async for info in first.list("r")]
    except NotFound:
        return  # it was removed
    url = TierURL.parse(job.namespace)
    if is_empty and url.scheme == "shm":
        await asyncio.to_thread(remove_unheld, url.location, 0.0, Path(url.options.get("mount", SHM)))


async def is_newest(first: TierDriver, job: ReplicationJob) -> bool:
    """Whether no other job was registered for the rank; this one's record may be gone."""
    try:
        return await registered(first, job.rank) == job
    except NotFound:
        return True


async def captured(tier: TierDriver, job: ReplicationJob) -> list[str]:
    """What the rank has there, up to the job's generation. Nothing if a newer generation of the rank captures there,
    too: its bases may refer to older constants, and its own mover deletes what they do not need."""
    found = {info.key: keys.parse(info.key) async for info in tier.list(rank_prefix(job.rank))}
    shards = {name: key for name, key in found.items() if isinstance(key, ShardKey)}
    if any(key.generation > job.generation for key in shards.values()):
        return []
    return list(shards)
