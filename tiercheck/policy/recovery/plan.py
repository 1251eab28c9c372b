"""From which tier each object of a recovery is read.

Tiers are asked in the order of the hierarchy, cheapest first: own memory, the node's, a neighbour's, remote
storage. If a copy fails verification, it is quarantined, and the plan is made again without it. If no copy of
a version is left, the rank says so, and the ranks decide on another recovery point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint

__all__ = ["Availability", "Plan", "Unreachable", "availability", "batches", "grouped", "plan"]


@dataclass(frozen=True)
class Plan:
    """What one rank reads: the anchor, then the batches whose versions follow it, in order, or the one snapshot."""

    point: RecoveryPoint
    anchor: Copy
    batches: tuple[Copy, ...]

    @property
    def sources(self) -> tuple[Copy, ...]:
        return (self.anchor, *self.batches)


@dataclass(frozen=True)
class Unreachable:
    """A version of a stream of which this rank has no sound copy."""

    stream: Stream
    version: int


@dataclass(frozen=True)
class Availability:
    """A row of the availability matrix: what one tier can give one rank for the recovery point."""

    rank: int
    tier: str
    anchor: bool
    differentials: tuple[int, ...]
    """The versions after the anchor that the tier has, ascending. For a snapshot: only its own version."""


def plan(point: RecoveryPoint, rank: int, sources: Iterable[Copy]) -> Plan | Unreachable:
    """The cheapest way for ``rank`` to the recovery point, given the copies it can still read."""
    own = sorted(s for s in sources if (s.key.rank, s.key.generation) == (rank, point.generation))
    bases: dict[int, Copy] = {}
    for source in own:
        if source.key.stream is Stream.BASE:
            bases.setdefault(source.key.first, source)
    if point.anchor not in bases:
        return Unreachable(Stream.BASE, point.anchor)
    if point.by_snapshot:
        snapshot = ShardKey.snapshot(point.generation, point.anchor, point.last, rank)
        led = next((source for source in own if source.key == snapshot), None)
        return Plan(point, bases[point.anchor], (led,)) if led else Unreachable(Stream.SNAPSHOT, point.last)
    following = batches(point, point.anchor + 1, rank, own)
    return following if isinstance(following, Unreachable) else Plan(point, bases[point.anchor], following)


def batches(point: RecoveryPoint, first: int, rank: int, sources: Iterable[Copy]) -> tuple[Copy, ...] | Unreachable:
    """The cheapest objects that together hold the versions from ``first`` to the point's last one, in order. An object
    may begin before ``first``, or overlap the object before it."""
    usable = sorted(
        source
        for source in sources
        if source.key.stream is Stream.DIFFERENTIAL
        and (source.key.rank, source.key.generation) == (rank, point.generation)
    )
    chosen: list[Copy] = []
    version = first
    while version <= point.last:
        holding = [source for source in usable if version in source.key.versions]
        if not holding:
            return Unreachable(Stream.DIFFERENTIAL, version)
        # The cheapest tier; within it the object that reaches furthest.
        best = min(holding, key=lambda source: (source.tier, -source.key.last))
        chosen.append(best)
        version = best.key.last + 1
    return tuple(chosen)


def grouped(sources: Sequence[Copy], versions_max: int) -> tuple[tuple[Copy, ...], ...]:
    """Groups of consecutive objects to read together. A group has up to ``versions_max`` versions, or is one object."""
    groups: list[list[Copy]] = []
    room = 0
    for source in sources:
        if len(source.key.versions) > room:
            groups.append([])
            room = versions_max
        groups[-1].append(source)
        room -= len(source.key.versions)
    return tuple(tuple(group) for group in groups)


def availability(
    points: Sequence[RecoveryPoint], tiers: Sequence[str], sources: Sequence[Iterable[Copy]]
) -> tuple[Availability, ...]:
    """The availability matrix of a recovery point: a row for each rank and tier. ``points[rank]`` is the rank's way
    to the point, and ``sources[rank]`` are its copies."""
    rows: list[Availability] = []
    for rank, (point, held) in enumerate(zip(points, sources, strict=True)):
        own = [source for source in held if source.key.rank == rank and source.key.generation == point.generation]
        for index, tier in enumerate(tiers):
            here = [source.key for source in own if source.tier == index]
            anchor = any(key.stream is Stream.BASE and key.first == point.anchor for key in here)
            if point.by_snapshot:
                snapshot = ShardKey.snapshot(point.generation, point.anchor, point.last, rank)
                versions = {key.last for key in here if key == snapshot}
            else:
                versions = {version for key in here if key.stream is Stream.DIFFERENTIAL for version in key.versions}
                versions &= set(range(point.anchor + 1, point.last + 1))
            rows.append(Availability(rank, tier, anchor, tuple(sorted(versions))))
    return tuple(rows)
