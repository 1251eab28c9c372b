"""Where all ranks can meet: the recovery point.

The newest base in the *intersection* of what the ranks can read, then the longest unbroken run of
differentials that all of them can read after it, or the newest snapshot of what has changed since the base. A minimum
of the ranks' maxima would be cheaper and wrong: it can name a version that some rank has already purged.
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
    """Whether one snapshot leads from the anchor to ``last``, instead of the differentials."""

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


def decide(ranks: Sequence[Readable], lineage: Lineage) -> RecoveryPoint | None:
    """The newest point every rank can reach, or ``None``.

    Generations are tried newest first. A generation opens with a base at the version it left its parent, so
    any point in it is at least as new as all that counts of its ancestors. Within one, the newest common
    base is the best anchor: an older one cannot reach further, since its run has to pass the same gap. A snapshot
    passes any gap after the base that it was made for; of two ways to the same version differentials are taken, which
    may be exact.
    """
    bases = reduce(frozenset.intersection, (rank.bases for rank in ranks))
    differentials = reduce(frozenset.intersection, (rank.differentials for rank in ranks))
    snapshots = reduce(frozenset.intersection, (rank.snapshots for rank in ranks))
    for generation, limit in lineage.chain:
        anchors = [version for found, version in bases if found == generation and (limit is None or version <= limit)]
        if not anchors:
            continue
        anchor = last = max(anchors)
        while (limit is None or last < limit) and (generation, last + 1) in differentials:
            last += 1
        hops = [
            (version, base)
            for found, base, version in snapshots
            if found == generation and base in anchors and version > last and (limit is None or version <= limit)
        ]
        if hops:
            last, anchor = max(hops)
        return RecoveryPoint(generation, anchor, last, by_snapshot=bool(hops))
    return None
