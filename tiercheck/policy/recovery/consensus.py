"""The version at which all ranks can meet: the recovery point.

It is the newest version that *every* rank can reach, each from an anchor of its own: a base and an unbroken run of
differentials after it, or a base and the snapshot that was made for it. The ranks need no base in common. If a base,
differential or snapshot of a rank failed, the rank has made a base of its own since, at a version of which the others
have no base. Ranks whose optimizer's step takes all of them are the exception (:func:`from_one_base`). A minimum of the
ranks' maxima would be cheaper and wrong: it can name a version that some rank has already purged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.recovery.spans import Span, both, joined, spans_of

__all__ = ["Reachable", "Readable", "RecoveryPoint", "admitted", "common", "decide", "from_one_base", "meeting"]


Reachable = tuple[tuple[int, tuple[Span, ...]], ...]
"""What a rank can reach, the newest generation first: its number, and the versions."""


@dataclass(frozen=True)
class RecoveryPoint:
    """One rank's way to the version at which all ranks meet. ``last`` is the same on every rank. The other fields are
    the rank's own."""

    generation: int
    """The generation of the shards that lead there. The opening base of a generation is the version at which it left
    its parent, so a rank may reach that version in either generation."""
    anchor: int
    """The rank's newest base that leads to ``last``."""
    last: int
    """The version at which the ranks meet."""
    by_snapshot: bool = False
    """A snapshot leads from ``anchor`` to ``last``, instead of differentials."""

    @property
    def replayed(self) -> int:
        """The number of differentials to replay."""
        return 0 if self.by_snapshot else self.last - self.anchor


@dataclass(frozen=True)
class Readable:
    """What one rank can read: ``(generation, version)`` of bases and of single differentials, and ``(generation, base,
    version)`` of snapshots."""

    bases: frozenset[tuple[int, int]]
    differentials: frozenset[tuple[int, int]]
    snapshots: frozenset[tuple[int, int, int]] = frozenset()

    @classmethod
    def of(cls, shards: Iterable[ShardKey]) -> Readable:
        bases: set[tuple[int, int]] = set()
        differentials: set[tuple[int, int]] = set()
        snapshots: set[tuple[int, int, int]] = set()
        found = list(shards)
        constants = {shard for shard in found if shard.stream is Stream.CONSTANT}
        for shard in found:
            if shard.stream is Stream.CONSTANT:
                continue
            if shard.stream is Stream.BASE:
                if shard.constants is None or shard.constants in constants:  # without what it refers to it is none
                    bases.add((shard.generation, shard.first))
            elif shard.stream is Stream.SNAPSHOT:
                snapshots.add((shard.generation, shard.first - 1, shard.last))
            else:
                differentials.update((shard.generation, version) for version in shard.versions)
        return cls(frozenset(bases), frozenset(differentials), frozenset(snapshots))

    def points(self) -> dict[tuple[int, int], RecoveryPoint]:
        """The rank's way to each ``(generation, version)`` that it can reach, from the newest base. Differentials are
        preferred to a snapshot, since they may be exact."""
        ways: dict[tuple[int, int], RecoveryPoint] = {}
        for generation, anchor in self.bases:
            last = anchor
            ways[generation, last] = RecoveryPoint(generation, anchor, last)
            # The next base is an anchor itself.
            while (generation, last + 1) in self.differentials and (generation, last + 1) not in self.bases:
                last += 1
                ways[generation, last] = RecoveryPoint(generation, anchor, last)
        for generation, anchor, last in sorted(self.snapshots, reverse=True):
            if (generation, anchor) in self.bases:
                ways.setdefault((generation, last), RecoveryPoint(generation, anchor, last, by_snapshot=True))
        return ways

    def reach(self) -> Reachable:
        """The versions that the rank can reach."""
        versions: dict[int, list[int]] = {}
        for generation, version in self.points():
            versions.setdefault(generation, []).append(version)
        return tuple((generation, spans_of(versions[generation])) for generation in sorted(versions, reverse=True))

    def runs(self, lineage: Lineage) -> dict[tuple[int, int], int]:
        """By ``(generation, base)`` of the job's own past, the last version that differentials alone lead to from
        there, past newer bases."""
        found: dict[tuple[int, int], int] = {}
        for generation, base in self.bases:
            last = base
            while (generation, last + 1) in self.differentials:
                last += 1
            limit = lineage.limit(generation, last)
            if limit is not None and limit >= base:
                found[generation, base] = limit
        return found

    def possible(self, lineage: Lineage) -> dict[int, list[RecoveryPoint]]:
        """The rank's ways to each version of the job's own past that it can reach, the best first: differentials are
        preferred to a snapshot, then the newest generation."""
        ways: dict[int, list[RecoveryPoint]] = {}
        for point in sorted(self.points().values(), key=lambda point: (point.by_snapshot, -point.generation)):
            if lineage.admits(point.generation, point.last):
                ways.setdefault(point.last, []).append(point)
        return ways

    def ways(self, lineage: Lineage) -> dict[int, RecoveryPoint]:
        """The best of :meth:`possible` to each version."""
        return {version: ways[0] for version, ways in self.possible(lineage).items()}


def admitted(reach: Reachable, lineage: Lineage) -> tuple[Span, ...]:
    """The versions of the job's own past among these."""
    found: list[Span] = []
    for generation, spans in reach:
        for first, last in spans:
            limit = lineage.limit(generation, last)
            if limit is not None and first <= limit:
                found.append((first, limit))
    return joined(found)


def common(ranks: Iterable[Reachable], lineage: Lineage) -> tuple[Span, ...]:
    """The versions that every rank can come to, oldest first.

    In the job's own past a version is one state, whatever generation wrote it.
    """
    each = {admitted(reach, lineage) for reach in set(ranks)}  # most ranks reach the same versions
    return reduce(both, each)


def meeting(ranks: Iterable[Reachable], lineage: Lineage) -> int | None:
    """The newest version that every rank can come to; ``None`` if there is none."""
    versions = common(ranks, lineage)
    return versions[-1][1] if versions else None


def from_one_base(ranks: Iterable[Mapping[tuple[int, int], int]]) -> RecoveryPoint | None:
    """The newest version that all ranks can come to by the same steps, from a base that all have: what ranks need whose
    optimizer's step takes all of them. Of several bases the newest. ``ranks``, at least one: as of
    :meth:`Readable.runs`. ``None``: they have no base in common."""
    every = [*ranks]
    bases = set.intersection(*(set(each) for each in every))
    points = [RecoveryPoint(*base, min(each[base] for each in every)) for base in bases]
    return max(points, key=lambda point: (point.last, point.generation, point.anchor), default=None)


def decide(ranks: Sequence[Readable], lineage: Lineage) -> tuple[RecoveryPoint, ...] | None:
    """Each rank's way, in rank order, to the newest version that every rank can reach; ``None`` if there is none."""
    version = meeting((rank.reach() for rank in ranks), lineage)
    return None if version is None else tuple(rank.ways(lineage)[version] for rank in ranks)
