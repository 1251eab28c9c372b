"""What is deleted from the tiers inside the nodes when a generation opens, before it captures anything.

All ranks have read and verified the recovery point by then. Two versions matter: the recovery point, and the version
that a failure of a node would leave. Nobody needs what leads to neither of them: older bases, what an earlier attempt
to restart has captured, another future of the job. If it stayed, a job that crashes again and again before anything has
reached its durable tier would fill its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.observation import Copy, Role, lasting
from tiercheck.policy.recovery.agreement import NO_MARK, agreed, held_twice
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.spans import Span, both, spans_of
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS

__all__ = ["Anew", "Reach", "anew", "lost_versions", "superseded_at_opening"]


@dataclass(frozen=True)
class Reach:
    """The versions of the job's own past that one rank can reach."""

    twice: tuple[Span, ...]
    """Whichever of its copies are lost: see :mod:`tiercheck.policy.recovery.agreement`."""
    lasting: tuple[Span, ...]
    """From the tiers that outlive its node."""
    anyhow: tuple[Span, ...]
    """From all of its tiers together."""

    @classmethod
    def of(cls, held: Collection[Copy], roles: Sequence[Role], lineage: Lineage) -> Reach:
        """``held``: the rank's own copies that are sound."""
        outliving = {role.index for role in lasting(roles)}
        return cls(
            spans_of(held_twice({role.index: _keys(held, {role.index}) for role in roles}, roles, lineage)),
            spans_of(Readable.of(_keys(held, outliving)).ways(lineage)),
            spans_of(Readable.of(source.key for source in held).ways(lineage)),
        )


@dataclass(frozen=True)
class Anew:
    """What the ranks know together when a generation opens."""

    mark: int
    """See :mod:`tiercheck.policy.recovery.agreement`."""
    versions: tuple[int, ...]
    """What must stay within reach, the most important first: the recovery point, then the mark. If there is no mark:
    what the failure of each node would leave."""


def anew(ranks: Sequence[Reach], reached: int | None) -> Anew:
    """``reached``: the version that was recovered; ``None``: the job begins anew, whatever lies there."""
    if reached is None:
        return Anew(NO_MARK, ())
    mark = agreed([rank.twice for rank in ranks])
    if mark != NO_MARK:
        return Anew(mark, (reached, mark))
    anyhow = reduce(both, {rank.anyhow for rank in ranks})
    left = {agreed([anyhow, lasting]) for lasting in {rank.lasting for rank in ranks}}
    return Anew(mark, (reached, *sorted(left - {NO_MARK, reached})))


def superseded_at_opening(
    held: Collection[Copy],
    rank: int,
    roles: Sequence[Role],
    lineage: Lineage,
    versions: Sequence[int],
    sound: Collection[Copy],
    seen_by_owner: Container[Copy],
    recovered: ShardKey | None = None,
) -> list[Copy]:
    """The shards that ``rank`` deletes, of those that it sees (``held``, other ranks' among them).

    ``versions``: what must stay within reach, from all tiers together, and from each tier that reaches it alone: nobody
    knows which tiers fail next. If that needs more bases than leave room for another one, the last versions are given
    up.
    ``sound``: the rank's own copies without those that were found damaged. ``lineage``: that of the recovery.
    ``seen_by_owner``: what the other ranks see of their own shards. A shard that its owner does not see lies in memory
    that the owner has left, and the owner has reached the recovery point without it. Of
    constants there may be copies there and where the owner is now: those stay (:mod:`tiercheck.policy.watermark`).
    ``recovered``: the constants that the recovered base refers to; the bases of the generation that opens may, too.
    """
    gone = [source for source in held if source.key.rank != rank and source not in seen_by_owner]
    inside = {role.index for role in roles if not role.shared}
    # A shared tier that has what its bases refer to needs no copy inside the nodes.
    pairs = [(source.tier, source.key.constants) for source in sound if source.key.constants is not None]
    referred = {recovered, *(key for tier, key in pairs if tier in inside or Copy(tier, key) not in sound)}
    by_any = _ways([source.key for source in sound], lineage, versions)
    for role in roles:
        whole = {source.key for source in sound if source.tier == role.index}
        # A damaged copy is no part of a way: who goes that way reads another copy.
        parts = [way for way in by_any if any(_leads_to(way, key, lineage) for key in whole)]
        bases = {(key.generation, key.first) for key in whole if key.stream is Stream.BASE}
        based = [way for way in parts if (way.generation, way.anchor) in bases]
        ways = [*parts, *_ways(whole, lineage, versions, based)]
        here = [source for source in held if source.tier == role.index and source.key.rank == rank]
        # Admission has counted two bases that stay: a damaged one takes the room of none.
        useless = {source for source in here if source.key.stream is Stream.BASE and source.key not in whole}
        leading = {source for source in here if any(_leads_to(way, source.key, lineage) for way in ways)}
        leading |= {source for source in here if source.key in referred}
        gone += [source for source in here if source in useless or source not in leading]
    return sorted(source for source in gone if source.tier in inside)


def lost_versions(
    gone: Collection[Copy], sound: Collection[Copy], roles: Sequence[Role], lineage: Lineage
) -> tuple[Span, ...]:
    """The versions of the job's own past that a rank's ``gone`` copies held, and no other sound copy does: a user who
    asks for one of them does not get it any more. Without a shared tier nobody can count on having them."""
    if not any(role.shared for role in roles):
        return ()

    def of(copies: Iterable[Copy]) -> set[tuple[int, int]]:
        keys = {source.key for source in copies if source.key.stream in (Stream.BASE, Stream.DIFFERENTIAL)}
        return {(key.generation, version) for key in keys for version in range(key.first, key.last + 1)}

    lost = of(gone) - of(set(sound).difference(gone))
    return spans_of(version for generation, version in lost if lineage.admits(generation, version))


def _keys(held: Iterable[Copy], tiers: Collection[int]) -> list[ShardKey]:
    return [source.key for source in held if source.tier in tiers]


def _ways(
    held: Iterable[ShardKey], lineage: Lineage, versions: Sequence[int], taken: Iterable[RecoveryPoint] = ()
) -> list[RecoveryPoint]:
    """A way to each version that ``held`` reach, from no more bases than may stay; those of ``taken`` stay anyhow."""
    possible = Readable.of(held).possible(lineage)
    bases = {(way.generation, way.anchor) for way in taken}
    chosen: list[RecoveryPoint] = []
    for version in versions:
        for way in possible.get(version, ()):
            base = (way.generation, way.anchor)
            if base in bases or len(bases) < BASES_IN_VOLATILE_TIERS:
                bases.add(base)
                chosen.append(way)
                break
    return chosen


def _leads_to(way: RecoveryPoint, key: ShardKey, lineage: Lineage) -> bool:
    """Whether the shard is part of the way, or follows it in the same generation: another copy of a version in between
    may still be found."""
    if key.generation != way.generation or not lineage.admits(key.generation, key.first):
        return False
    if key.stream is Stream.CONSTANT:
        return False
    if key.stream is Stream.BASE:
        return key.first == way.anchor
    if key.stream is Stream.SNAPSHOT:
        return way.by_snapshot and (key.first - 1, key.last) == (way.anchor, way.last)
    return key.last > way.anchor
