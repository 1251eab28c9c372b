"""From where each object of a recovery is read.

Tiers are asked in the order of the hierarchy, cheapest first: own memory, the node's, a neighbour's, remote
storage. A copy that fails verification is quarantined and the plan is made again without it; when no copy of
a version is left, the rank says so and the ranks decide on another recovery point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.consensus import RecoveryPoint

__all__ = ["Availability", "Plan", "Source", "Unreachable", "availability", "plan"]


@dataclass(frozen=True, order=True)
class Source:
    """One copy of a shard: the tier's index in the hierarchy, and the key."""

    tier: int
    key: ShardKey


@dataclass(frozen=True)
class Plan:
    """What one rank reads: the anchor, then the batches whose versions follow it, in order."""

    point: RecoveryPoint
    anchor: Source
    batches: tuple[Source, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.anchor, *self.batches)


@dataclass(frozen=True)
class Unreachable:
    """The version of a stream that this rank has no good copy of."""

    stream: Stream
    version: int


@dataclass(frozen=True)
class Availability:
    """A cell row of the availability matrix: what one tier can give one rank for the recovery point."""

    rank: int
    tier: str
    anchor: bool
    differentials: tuple[int, ...]
    """The versions after the anchor that are there, ascending."""


def plan(point: RecoveryPoint, rank: int, sources: Iterable[Source]) -> Plan | Unreachable:
    """The cheapest way for ``rank`` to the recovery point, given the copies it can still read."""
    usable = sorted(
        source for source in sources if source.key.rank == rank and source.key.generation == point.generation
    )
    anchors = [s for s in usable if s.key.stream is Stream.BASE and s.key.first == point.anchor]
    if not anchors:
        return Unreachable(Stream.BASE, point.anchor)
    differentials = [s for s in usable if s.key.stream is Stream.DIFFERENTIAL]
    batches: list[Source] = []
    version = point.anchor + 1
    while version <= point.last:
        holding = [source for source in differentials if version in source.key.versions]
        if not holding:
            return Unreachable(Stream.DIFFERENTIAL, version)
        # The cheapest tier; within it the object that reaches furthest.
        best = min(holding, key=lambda source: (source.tier, -source.key.last))
        batches.append(best)
        version = best.key.last + 1
    return Plan(point, anchors[0], tuple(batches))


def availability(
    point: RecoveryPoint, tiers: Sequence[str], sources: Sequence[Iterable[Source]]
) -> tuple[Availability, ...]:
    """The availability matrix of a recovery point: a row for each rank (``sources[rank]``) and tier."""
    rows: list[Availability] = []
    for rank, held in enumerate(sources):
        own = [source for source in held if source.key.rank == rank and source.key.generation == point.generation]
        for index, tier in enumerate(tiers):
            here = [source.key for source in own if source.tier == index]
            versions = {version for key in here if key.stream is Stream.DIFFERENTIAL for version in key.versions} & set(
                range(point.anchor + 1, point.last + 1)
            )
            anchor = any(key.stream is Stream.BASE and key.first == point.anchor for key in here)
            rows.append(Availability(rank, tier, anchor, tuple(sorted(versions))))
    return tuple(rows)
