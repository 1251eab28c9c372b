"""Carrying out a removal.

Right before each call it is asked whether a newer generation of the job has opened: then nothing more is deleted, since
it was decided without knowing what that generation needs. An interrupted removal has deleted a beginning of what it was
to delete, and the next one ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from tiercheck.archive.change.removal import Removal, steps
from tiercheck.archive.tiers import open_tier, within
from tiercheck.errors import JobConflict, TierError
from tiercheck.hierarchy import Hierarchy, OpenTier, Tier
from tiercheck.keys import Key, LineageKey
from tiercheck.replication.objects.lineage_records import listed_lineage

__all__ = ["carry_out"]

KEYS_AT_ONCE = 1000

Progress = Callable[[int, int], None]


async def carry_out(removal: Removal, urls: Sequence[str], *, deadline_s: float, progress: Progress) -> None:
    """``urls``: of the tiers, in the inventory's order.

    Errors: ``JobConflict`` if a newer generation has opened; ``TierError`` naming the tier, and what is left.
    """
    async with AsyncExitStack() as stack:
        tiers = [tier for tier in Hierarchy.of(*map(Tier, urls)).open().tiers if removal.gone.get(tier.index)]
        for tier in tiers:
            await open_tier(tier, deadline_s)
            stack.push_async_callback(tier.driver.close)
        listed = {key for tier in removal.inventory.tiers for key in tier.objects if isinstance(key, LineageKey)}
        newest = max((key.generation for key in listed), default=0)
        done, total = 0, removal.objects
        for tier in tiers:
            for keys in calls(removal.gone[tier.index]):
                try:
                    await within(tier, deadline_s, fence(tier, newest, total - done))
                    await within(tier, deadline_s, tier.driver.delete(list(map(str, keys))))
                except TierError as error:
                    error.message += f"; {total - done} of {total} objects are left, and the same command goes on"
                    error.tier = error.tier or tier.driver.url
                    raise
                done += len(keys)
                progress(done, total)


def calls(keys: Sequence[Key]) -> list[Sequence[Key]]:
    return [each[start : start + KEYS_AT_ONCE] for each in steps(keys) for start in range(0, len(each), KEYS_AT_ONCE)]


async def fence(tier: OpenTier, newest: int, left: int) -> None:
    """Errors: ``JobConflict``."""
    opened = max((key.generation for key in await listed_lineage(tier)), default=0)
    if opened > newest:
        raise JobConflict(
            f"generation {opened} of the job has opened in {tier.driver.url} meanwhile: {left} objects are left. Look "
            "again"
        )
