"""From which tier each object of a recovery is read.

Tiers are asked in the order of their cost: own memory, the node's, a neighbour's, another node's, remote storage. It
is the order of the hierarchy, unless another one is given. If a copy fails verification, it is quarantined, and the
plan is made again without it. If no copy of a version is left, the rank says so, and the ranks decide on another
recovery point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.spans import Span, both, joined, spans_of

__all__ = [
    "Availability",
    "Held",
    "HeldByNodes",
    "Plan",
    "Unreachable",
    "availability",
    "availability_of_nodes",
    "batches",
    "grouped",
    "held",
    "plan",
]


@dataclass(frozen=True)
class Plan:
    """What one rank reads: the anchor, then the batches whose versions follow it, in order, or the one snapshot."""

    point: RecoveryPoint
    anchor: Copy
    batches: tuple[Copy, ...]
    constants: Copy | None = None
    """What the anchor refers to."""

    @property
    def leading(self) -> tuple[Copy, ...]:
        """What the base is read from: what it refers to comes first."""
        return (self.anchor,) if self.constants is None else (self.constants, self.anchor)

    @property
    def sources(self) -> tuple[Copy, ...]:
        return (*self.leading, *self.batches)


@dataclass(frozen=True)
class Unreachable:
    """A version of a stream of which this rank has no sound copy."""

    stream: Stream
    version: int


Held = tuple[tuple[bool, tuple[Span, ...]], ...]
"""By tier, what it can give one rank for the recovery point: whether it has the anchor, and which of the versions after
the anchor it has. For a snapshot: only its own version."""


HeldByNodes = tuple[tuple[str, bool, tuple[Span, ...]], ...]
"""The same of the other nodes' memory that has anything of it, by its name."""


@dataclass(frozen=True)
class Availability:
    """A row of the availability matrix: what one tier can give these ranks for the recovery point."""

    ranks: tuple[Span, ...]
    tier: str
    anchor: bool
    differentials: tuple[Span, ...]

    @property
    def count(self) -> int:
        """The number of ranks."""
        return sum(last - first + 1 for first, last in self.ranks)


def plan(point: RecoveryPoint, rank: int, sources: Iterable[Copy], order: Sequence[int] = ()) -> Plan | Unreachable:
    """The cheapest way for ``rank`` to the recovery point, given the copies it can still read. ``order``: all tiers,
    cheapest first."""
    cost = {tier: at for at, tier in enumerate(order)}
    everything = sorted(sources, key=lambda source: (cost.get(source.tier, source.tier), source))
    own = [source for source in everything if (source.key.rank, source.key.generation) == (rank, point.generation)]
    anchor = next((s for s in own if s.key.stream is Stream.BASE and s.key.first == point.anchor), None)
    if anchor is None:
        return Unreachable(Stream.BASE, point.anchor)
    # The constants are of this generation or an older one. Any tier's will do: the base says what they must be.
    constants = next((s for s in everything if s.key == anchor.key.constants), None)
    if anchor.key.refers_to and constants is None:
        return Unreachable(Stream.CONSTANT, anchor.key.refers_to[1])
    if point.by_snapshot:
        snapshot = ShardKey.snapshot(point.generation, point.anchor, point.last, rank)
        led = next((source for source in own if source.key == snapshot), None)
        return Plan(point, anchor, (led,), constants) if led else Unreachable(Stream.SNAPSHOT, point.last)
    following = batches(point, point.anchor + 1, rank, own, order)
    return following if isinstance(following, Unreachable) else Plan(point, anchor, following, constants)


def batches(
    point: RecoveryPoint, first: int, rank: int, sources: Iterable[Copy], order: Sequence[int] = ()
) -> tuple[Copy, ...] | Unreachable:
    """The cheapest objects that together hold the versions from ``first`` to the point's last one, in order. An object
    may begin before ``first``, or overlap the object before it. ``order``: as for :func:`plan`."""
    cost = {tier: at for at, tier in enumerate(order)}
    by_tier: dict[int, list[Copy]] = {}
    for source in sources:
        key = source.key
        if (key.stream, key.rank, key.generation) == (Stream.DIFFERENTIAL, rank, point.generation):
            by_tier.setdefault(source.tier, []).append(source)
    walks = [_Walk(sorted(by_tier[tier])) for tier in sorted(by_tier, key=lambda tier: cost.get(tier, tier))]
    chosen: list[Copy] = []
    version = first
    while version <= point.last:
        # The cheapest tier; within it the object that reaches furthest.
        best = next((found for walk in walks if (found := walk.holding(version)) is not None), None)
        if best is None:
            return Unreachable(Stream.DIFFERENTIAL, version)
        chosen.append(best)
        version = best.key.last + 1
    return tuple(chosen)


class _Walk:
    """One tier's objects, from the oldest to the newest."""

    def __init__(self, sources: Sequence[Copy]) -> None:
        self._left = deque(sources)
        self._furthest: Copy | None = None

    def holding(self, version: int) -> Copy | None:
        """Of the objects that hold the version, the one that reaches furthest. Versions are asked for in order."""
        while self._left and self._left[0].key.first <= version:
            source = self._left.popleft()
            if self._furthest is None or source.key.last > self._furthest.key.last:
                self._furthest = source
        furthest = self._furthest
        return furthest if furthest is not None and furthest.key.last >= version else None


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


def held(point: RecoveryPoint, rank: int, tiers: int, sources: Iterable[Copy]) -> Held:
    """What each of so many tiers can give ``rank`` for the recovery point."""
    own = [source for source in sources if (source.key.rank, source.key.generation) == (rank, point.generation)]
    found: list[tuple[bool, tuple[Span, ...]]] = []
    for tier in range(tiers):
        here = [source.key for source in own if source.tier == tier]
        anchor = any(key.stream is Stream.BASE and key.first == point.anchor for key in here)
        if point.by_snapshot:
            snapshot = ShardKey.snapshot(point.generation, point.anchor, point.last, rank)
            spans = spans_of({key.last for key in here if key == snapshot})
        else:
            spans = joined((key.first, key.last) for key in here if key.stream is Stream.DIFFERENTIAL)
            spans = both(spans, [(point.anchor + 1, point.last)]) if point.anchor < point.last else ()
        found.append((anchor, spans))
    return tuple(found)


def availability(tiers: Sequence[str], ranks: Sequence[Held]) -> tuple[Availability, ...]:
    """The availability matrix of a recovery point, from what is held of each rank, in rank order. Ranks of which a tier
    holds the same have a row together."""
    rows: list[Availability] = []
    for index, tier in enumerate(tiers):
        alike: dict[tuple[bool, tuple[Span, ...]], list[int]] = {}
        for rank, each in enumerate(ranks):
            alike.setdefault(each[index], []).append(rank)
        rows += [Availability(spans_of(found), tier, *what) for what, found in alike.items()]
    return tuple(rows)


def availability_of_nodes(ranks: Sequence[HeldByNodes]) -> tuple[Availability, ...]:
    """Further rows of the matrix: the other nodes' memory that can give some rank something."""
    alike: dict[tuple[str, bool, tuple[Span, ...]], list[int]] = {}
    for rank, each in enumerate(ranks):
        for row in each:
            alike.setdefault(row, []).append(rank)
    return tuple(Availability(spans_of(found), *row) for row, found in sorted(alike.items()))
