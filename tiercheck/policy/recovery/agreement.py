"""What the ranks agree on if they share no tier: the mark.

Without a shared tier, nothing tells a rank which bases the others still have, and no commit record says that a base is
whole. So whenever a base is due, each rank tells the others which versions it can reach from its node's memory alone,
and also from the tiers alone that outlive its node: either of the two may fail next. The newest version that all ranks
can reach is the mark. Each rank keeps its own ways to the mark, and everything newer
(:class:`tiercheck.policy.watermark.Retention`). A rank that was told no mark deletes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Observation, Role, lasting
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.spans import Span, both, spans_of

__all__ = ["NO_MARK", "agreed", "held_twice", "needs_agreement", "reach", "way_to_mark"]

NO_MARK = -1


def needs_agreement(roles: Sequence[Role], world_size: int) -> bool:
    """Whether the ranks must agree on a mark: there are several ranks, and no tier that all of them see."""
    return world_size > 1 and not any(role.shared for role in roles)


def reach(seen: Observation) -> tuple[Span, ...]:
    """The versions of the job's own past that this rank can reach, whichever of its copies are lost. Oldest first."""
    return spans_of(held_twice({role.index: seen.own(role) for role in seen.roles}, seen.roles, seen.lineage.readable))


def held_twice(held: Mapping[int, Iterable[ShardKey]], roles: Sequence[Role], lineage: Lineage) -> set[int]:
    """The versions that a rank can reach from the tiers that outlive its node, and also from the other tiers alone. If
    all tiers outlive the node, or none does: the versions that it can reach from all tiers together. ``held``: the
    rank's shards, by tier index."""
    outliving = {role.index for role in lasting(roles)}
    groups = [[index for index in held if (index in outliving) is each] for each in (True, False)]
    ways = [
        set(Readable.of(key for index in group for key in held[index]).ways(lineage))
        for group, roled in zip(groups, (True, False), strict=True)
        if any((role.index in outliving) is roled for role in roles)
    ]
    return set.intersection(*ways)


def agreed(ranks: Iterable[tuple[Span, ...]]) -> int:
    """The newest version that every rank can reach; :data:`NO_MARK` if there is none."""
    common = reduce(both, set(ranks))  # most ranks reach the same versions
    return max((last for _, last in common), default=NO_MARK)


def way_to_mark(seen: Observation) -> RecoveryPoint | None:
    """This rank's way to the mark from its lasting tiers, by what they hold now. A rank that is alone computes the mark
    by itself."""
    mark = seen.mark
    if seen.world_size == 1:
        mark = agreed([reach(seen)])
    if mark is None or mark == NO_MARK:
        return None
    held = (key for role in lasting(seen.roles) for key in seen.own(role))
    return Readable.of(held).ways(seen.lineage.readable).get(mark)
