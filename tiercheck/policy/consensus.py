"""Where all ranks can meet: the recovery point.

The newest version that *every* rank can come to, each from whatever anchor it has: a base of its own and an unbroken
run of differentials after it, or a base and the snapshot that was made for it. The ranks need no base in common: a rank
whose base, differential or snapshot failed has made a base of its own since, at a version where the others have none. A
minimum of the ranks' maxima would be cheaper and wrong: it can name a version that some rank has already purged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.lineage import Lineage

__all__ = ["Readable", "RecoveryPoint", "decide"]


@dataclass(frozen=True)
class RecoveryPoint:
    """One rank's way to the version at which all ranks meet. ``last`` is the same on every rank; the rest is its
    own."""

    generation: int
    """Of the shards that lead there. The base that a generation opens with is the version at which it left its parent,
    so that one rank may come to that by either of the two."""
    anchor: int
    """The rank's newest base that leads to ``last``."""
    last: int
    """The version at which the ranks meet."""
    by_snapshot: bool = False
    """A snapshot leads from ``anchor`` to ``last``, not differentials."""

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
        for shard in shards:
            if shard.stream is Stream.SNAPSHOT:
                snapshots.add((shard.generation, shard.first - 1, shard.last))
            else:
                versions = bases if shard.stream is Stream.BASE else differentials
                versions.update((shard.generation, version) for version in shard.versions)
        return cls(frozenset(bases), frozenset(differentials), frozenset(snapshots))

    def points(self) -> dict[tuple[int, int], RecoveryPoint]:
        """The rank's way to each ``(generation, version)`` that it can come to: by differentials where they lead there,
        since they may be exact; from the newest base."""
        ways: dict[tuple[int, int], RecoveryPoint] = {}
        for generation, anchor in self.bases:
            last = anchor
            ways[generation, last] = RecoveryPoint(generation, anchor, last)
            # The next base is an anchor of its own.
            while (generation, last + 1) in self.differentials and (generation, last + 1) not in self.bases:
                last += 1
                ways[generation, last] = RecoveryPoint(generation, anchor, last)
        for generation, anchor, last in sorted(self.snapshots, reverse=True):
            if (generation, anchor) in self.bases:
                ways.setdefault((generation, last), RecoveryPoint(generation, anchor, last, by_snapshot=True))
        return ways

    def ways(self, lineage: Lineage) -> dict[int, RecoveryPoint]:
        """The rank's way to each version of the job's own past that it can come to; the newest generation's, but
        differentials before a snapshot."""
        points = sorted(self.points().values(), key=lambda point: (not point.by_snapshot, point.generation))
        return {point.last: point for point in points if lineage.admits(point.generation, point.last)}


def decide(ranks: Sequence[Readable], lineage: Lineage) -> tuple[RecoveryPoint, ...] | None:
    """The way of each rank, in rank order, to the newest version that every rank can reach; ``None`` for none.

    Of the job's own past there is one state a version, whatever generation wrote it.
    """
    ways = [rank.ways(lineage) for rank in ranks]
    common = reduce(frozenset.intersection, (frozenset(each) for each in ways))
    return tuple(each[max(common)] for each in ways) if common else None
