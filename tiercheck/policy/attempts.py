"""What earlier attempts to start have left in a shared tier.

A generation opens with a base. If the job dies before all ranks have theirs there, nothing is committed, and the next
generation opens with another one. A job that crashes again and again would fill the tier with them. So a rank deletes
its older ones, and what only they refer to, as soon as its opening base is there: without waiting for the others, which
may never come so far.
"""

from __future__ import annotations

from tiercheck.keys import CommitKey, Key, ShardKey
from tiercheck.policy.observation import Contents, Observation

__all__ = ["left_by_attempts"]


def left_by_attempts(seen: Observation, contents: Contents) -> list[Key]:
    """This rank's bases, their markers and their constants that older generations never committed in the tier, and that
    nobody needs beside the present generation's: those of the same version of the job's past, and those of another
    future."""
    own = contents.bases(seen.rank)
    present = {base.first for base in own if base.generation == seen.generation and contents.completes(base)}
    if not present:
        return []
    left = {
        base
        for base in own
        if base.generation < seen.generation
        and base.generation not in seen.lineage.kept
        and CommitKey.of(base) not in contents
        and (not seen.lineage.admits(base.generation, base.first) or _is_same_state(seen, base, present))
    }
    staying = [
        base for held in seen.contents for base in held.bases(seen.rank) if held is not contents or base not in left
    ]
    referred = {base.refers_to for base in staying}
    constants = [
        key
        for key in contents.constants(seen.rank)
        if key.generation < seen.generation
        and key.generation not in seen.lineage.kept
        and (key.generation, key.first) not in referred
    ]
    return [*(key for key in contents.markers(seen.rank) if key.shard in left), *sorted(left), *constants]


def _is_same_state(seen: Observation, base: ShardKey, versions: set[int]) -> bool:
    """Whether this rank's base of one of these versions holds the same: not if the layout has changed since."""
    return base.first in versions and seen.lineage.readable.admits(base.generation, base.first)
