"""After a job's clean end, or when its rank is no more: what its neighbours kept for it goes, if a tier that outlives
more has everything."""

from __future__ import annotations

import asyncio
import logging

from tiercheck.agent.jobs.departed import captured
from tiercheck.errors import TierCheckError
from tiercheck.hierarchy import OpenTier
from tiercheck.replication.job import ReplicationJob
from tiercheck.tiers.url import TierURL

__all__ = ["free_copies"]

log = logging.getLogger(__name__)

FREE_S_MAX = 10.0
PEER = "peer"
EVERYWHERE = "everywhere"
"""The policy's name in a replication job."""


async def free_copies(job: ReplicationJob) -> None:
    """Delete this rank's objects, up to the job's generation, from the neighbour's memory. Called once everything
    captured is where policy wants it; after a clean end the first tier keeps what it has until its namespace is
    removed. If policy does not send everything everywhere, a tier that outlives more may lack what the neighbour has,
    which stays there.

    A neighbour that cannot be reached is left as it is: what it keeps goes with its namespace.
    """
    if set(job.placement) != {EVERYWHERE}:
        return
    hierarchy = job.hierarchy.open()
    outlives = hierarchy.survives
    schemes = [TierURL.parse(tier.url).scheme for tier in job.tiers]
    for tier, scheme in zip(hierarchy.tiers, schemes, strict=True):
        if scheme == PEER and outlives > tier.capabilities.survives:
            try:
                async with asyncio.timeout(FREE_S_MAX):
                    await free(tier, job)
            except (TierCheckError, TimeoutError) as error:
                log.info("rank %d: what %s keeps stays there: %s", job.rank, tier.driver.url, error)


async def free(tier: OpenTier, job: ReplicationJob) -> None:
    async with tier.driver as driver:
        await driver.delete(await captured(driver, job))
