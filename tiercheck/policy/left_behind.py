"""What nothing needs any more of what others have left in a tier: ranks that run elsewhere now or have departed, older
generations, and bases whose constants went out of use."""

from __future__ import annotations

from tiercheck.keys import Key, ShardKey
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import own_bases
from tiercheck.policy.recovery.relayout import left_to

__all__ = ["LINEAGE_RECORDS_KEPT", "left_behind", "markers_done", "records_passed", "unreferred"]

LINEAGE_RECORDS_KEPT = 3
"""The newest one tells of those before; the others are for the case that it is damaged."""


def left_behind(seen: Observation, role: Role) -> list[ShardKey]:
    """Other ranks' shards of older generations. Those ranks run elsewhere now, or have another neighbour. No rank goes
    back behind what the present generation has settled, so every rank that sees such shards deletes them.

    Constants are another matter: a rank of the job may refer to its older ones, which others see no base do that came
    after they listed the tier. So its own mover deletes them, wherever it is. Of what it has left in a first tier it
    knows nothing: that goes when a listing of all that was captured until the generation had settled shows that the
    rank is not there. To the other tiers a base may come at any time, or never: what a rank of the job has left there
    stays until it opens a generation without them (:mod:`tiercheck.policy.recovery.opening`)."""
    held = seen.contents[role.index]
    found: list[ShardKey] = []
    for rank in held.left_behind(seen.generation):
        if rank != seen.rank:
            found += (*held.bases(rank), *held.differentials(rank), *held.snapshots(rank))
            if rank >= seen.world_size or (role.index == 0 and seen.relisted and not _lives_here(seen, held, rank)):
                found += (key for key in held.constants(rank) if not _is_referred_to(seen, role, key))
    return [key for key in found if key.generation < seen.generation]


def _lives_here(seen: Observation, held: Contents, rank: int) -> bool:
    """Whether another rank captures into this tier, too, if the tier was listed after the generation had settled: it
    has a base of the generation by then, and the newest two stay."""
    captured = (*held.bases(rank), *held.differentials(rank), *held.snapshots(rank), *held.constants(rank))
    return any(key.generation == seen.generation for key in captured)


def unreferred(seen: Observation, role: Role) -> list[ShardKey]:
    """Constants in the tier to which no base refers, and no later one will. Whoever records refers to its newest
    constants or to none: once a base of the present generation is newer than they are, that base tells."""
    contents = seen.contents[role.index]
    newest = max((base.first for each in seen.contents for base in own_bases(seen, each)), default=None)
    gone = [
        key
        for key in contents.constants(seen.rank)
        if newest is not None and (key.generation, key.first) < (seen.generation, newest)
    ]
    for rank in left_to(seen.rank, seen.world_size, seen.lineage) if role.shared else ():
        gone += [key for key in contents.constants(rank) if key.generation < seen.generation]
    return [key for key in gone if not _is_referred_to(seen, role, key)]


def _is_referred_to(seen: Observation, role: Role, key: ShardKey) -> bool:
    """Whether a base needs the constants in this tier. Bases in a shared tier that has them need none inside a node."""
    if role.shared:
        return seen.refers(key.rank, key) is not None
    tiers = [held for each, held in zip(seen.roles, seen.contents, strict=True) if not each.shared or key not in held]
    return any(base.constants == key for held in tiers for base in held.bases(key.rank))


def records_passed(seen: Observation, role: Role) -> list[Key]:
    """Lineage records and claims of older generations: the newest record tells what is worth knowing of them. A few
    stay, in case that it is damaged."""
    contents = seen.contents[role.index]
    if seen.generation not in contents.recorded:
        return []
    oldest = contents.recorded[-LINEAGE_RECORDS_KEPT:][0]
    return [key for key in contents.generations if key.generation < oldest]


def markers_done(seen: Observation, contents: Contents) -> list[Key]:
    """This rank's markers of what is committed, or is not there any more; and those that departed ranks left to it."""
    own = [key for key in contents.markers(seen.rank) if key.commit in contents or key.shard not in contents]
    departed = left_to(seen.rank, seen.world_size, seen.lineage)
    return [*own, *(key for rank in departed for key in contents.markers(rank))]
