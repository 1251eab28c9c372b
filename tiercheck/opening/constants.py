"""What a recovered base referred to is referred to again: a restart does not write it anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from tiercheck.errors import TierCheckError
from tiercheck.format import container
from tiercheck.format.references import References
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.recovery.ranks import Ranks

__all__ = ["brought"]

log = logging.getLogger(__name__)

SHARE_OF_DEADLINE = 0.5
"""For all tiers together. The rest is for the opening base, which follows in the same collective."""


async def brought(
    ranks: Ranks, tiers: OpenHierarchy, constants: ShardKey, references: References, sound: Collection[Copy]
) -> bool:
    """Whether the constants are in the first tier, from where they are copied on: if they are not, they are put there,
    from another of the job's tiers. If none has them, or none brings them in half of the deadline, the generation
    writes its own: the other ranks wait no longer than the deadline. ``sound``: the rank's copies that are."""
    key, scheduler = str(constants), ranks.scheduler
    until = scheduler.time() + ranks.deadline_s * SHARE_OF_DEADLINE

    async def bring(tier: OpenTier) -> None:
        if tier is tiers.first:
            await tier.driver.stat(key)  # it may be gone since the rank looked
            return
        content = await tier.driver.get(key)
        shard = container.parse(content, key=key, tier=tier.name)
        references.check(shard.header, tier=tier.name)
        await asyncio.to_thread(shard.verify)
        await tiers.first.driver.put(key, [content])

    held = {copy.tier for copy in sound if copy.key == constants}
    for tier in (tier for tier in tiers.tiers if tier.index in held):
        try:
            what, left_s = f"bringing {key} to {tiers.first.name}", max(0.0, until - scheduler.time())
            await scheduler.call(bring(tier), what=what, deadline_s=left_s)
        except TierCheckError as error:
            log.warning("%s is not brought from %s: %s", key, tier.name, error)
        else:
            return True
    log.warning("what does not change is written once more: none of the job's tiers gave what an older base refers to")
    return False
