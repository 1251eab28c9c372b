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


async def brought(
    ranks: Ranks, tiers: OpenHierarchy, constants: ShardKey, references: References, sound: Collection[Copy]
) -> bool:
    """Whether the constants are in the first tier, from where they are copied on: if they are not, they are put there,
    from another of the job's tiers. If none has them, the generation writes its own. ``sound``: the rank's copies that
    are."""
    key = str(constants)

    async def bring(tier: OpenTier) -> None:
        if tier is tiers.first:
            await tier.driver.stat(key)  # another rank of the node may have taken it for what nobody needs
            return
        content = await tier.driver.get(key)
        shard = container.parse(content, key=key, tier=tier.name)
        references.check(shard.header, tier=tier.name)
        await asyncio.to_thread(shard.verify)
        await tiers.first.driver.put(key, [content])

    held = {copy.tier for copy in sound if copy.key == constants}
    for tier in (tier for tier in tiers.tiers if tier.index in held):
        try:
            await ranks.call(bring(tier), f"bringing {key} to {tiers.first.name}")
        except TierCheckError as error:
            log.warning("%s is not brought from %s: %s", key, tier.name, error)
        else:
            return True
    log.warning("what does not change is written once more: none of the job's tiers has what an older base refers to")
    return False
