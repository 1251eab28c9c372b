"""Which ranks are lost, as far as all ranks know together; and what was made anew before."""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck.policy.recovery.consensus import meeting
from tiercheck.policy.recovery.lost_stage import lost_ranks
from tiercheck.recovery.finding.past import Past

__all__ = ["OPTION", "lost_in", "made_before", "newest_of"]

OPTION = (
    '. The ranks of which nothing was found are stages of a pipeline: attach(..., on_lost_stage="neighbours") makes '
    'those anew that lie between two others ("neighbours-and-ends" the first and the last one, too; "older-base" takes '
    "lost ones back to what is left of their own), and the others lose nothing. What comes of it is approximate"
)
"""What the refusal of a pipeline with lost ranks says."""


def lost_in(past: Past, behind_max: int | None = None) -> frozenset[int]:
    """The ranks that the others could go on without. ``behind_max``: as of
    :func:`~tiercheck.policy.recovery.lost_stage.lost_ranks`. There are none while a tier is away, while other ranks
    see something of one of them, and if nothing was trained yet."""
    if past.away or past.only_begun:
        return frozenset()
    lost = lost_ranks({rank: each.reach for rank, each in enumerate(past.told)}, past.own_lineage, behind_max)
    return frozenset() if lost & past.seen_by_others else lost


def newest_of(past: Past, ranks: Iterable[int]) -> int | None:
    """The newest version that these ranks can come to; ``None`` if there is none."""
    return meeting((past.told[rank].reach for rank in ranks), past.own_lineage)


def made_before(past: Past, parent: int) -> tuple[str, ...]:
    """What was made anew, and not recovered, on the way to the generation ``parent``: what was trained since is
    approximate."""
    known = {branch.generation: branch for branch in past.branches}
    chain = sorted(generation for generation, _ in past.as_of(parent).chain)
    return tuple(f"generation {each}: {said}" for each in chain if each in known for said in known[each].made)
