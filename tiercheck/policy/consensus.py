"""Where all ranks can meet: the recovery point.

The newest base in the *intersection* of what the ranks can read, then the longest unbroken run of
differentials that all of them can read after it; or, where that is newer, a version of which each has a snapshot and
the base that its own was made for. A minimum of the ranks' maxima would be cheaper and wrong: it can name a version
that some rank has already purged.
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
    """The anchor (a base) and the last differential replayed after it, in one generation."""

    generation: int
    anchor: int
    last: int
    by_snapshot: bool = False
    """Whether each rank comes to ``last`` by a snapshot from a base of its own, or has it as a base, instead of by
    differentials. ``anchor`` is the oldest of these bases then."""

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

    def without_differentials(self) -> dict[tuple[int, int], int]:
        """The versions that the rank can come to without differentials, and the newest base for each."""
        found = {
            (generation, version): base
            for generation, base, version in sorted(self.snapshots)
            if (generation, base) in self.bases
        }
        return found | {(generation, version): version for generation, version in self.bases}


def decide(ranks: Sequence[Readable], lineage: Lineage) -> RecoveryPoint | None:
    """The newest point every rank can reach, or ``None``.

    Generations are tried newest first. A generation opens with a base at the version it left its parent, so
    any point in it is at least as new as all that counts of its ancestors. Within one, the newest common
    base is the best anchor: an older one cannot reach further, since its run has to pass the same gap. Snapshots pass
    any gap, and need no common base: a rank whose base or snapshot failed has made one of its own since. Of two ways to
    the same version differentials are taken, which may be exact.
    """
    bases = reduce(frozenset.intersection, (rank.bases for rank in ranks))
    differentials = reduce(frozenset.intersection, (rank.differentials for rank in ranks))
    hops = [rank.without_differentials() for rank in ranks]
    common = reduce(frozenset.intersection, (frozenset(each) for each in hops))
    for generation, limit in lineage.chain:
        anchors = [version for found, version in bases if found == generation and (limit is None or version <= limit)]
        anchor = last = max(anchors, default=-1)
        while anchors and (limit is None or last < limit) and (generation, last + 1) in differentials:
            last += 1
        newer = [
            version
            for found, version in common
            if found == generation and version > last and (limit is None or version <= limit)
        ]
        if newer:
            last = max(newer)
            return RecoveryPoint(generation, min(each[generation, last] for each in hops), last, by_snapshot=True)
        if anchors:
            return RecoveryPoint(generation, anchor, last)
    return None
