"""Where all ranks can meet: the recovery point.

The newest base in the *intersection* of what the ranks can read, then the longest unbroken run of
differentials that all of them can read after it. A minimum of the ranks' maxima would be cheaper and wrong:
it can name a version that some rank has already purged.
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

    @property
    def replayed(self) -> int:
        """The number of differentials to replay."""
        return self.last - self.anchor


@dataclass(frozen=True)
class Readable:
    """What one rank can read: ``(generation, version)`` of bases and of single differentials."""

    bases: frozenset[tuple[int, int]]
    differentials: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, shards: Iterable[ShardKey]) -> Readable:
        bases: set[tuple[int, int]] = set()
        differentials: set[tuple[int, int]] = set()
        for shard in shards:
            versions = bases if shard.stream is Stream.BASE else differentials
            versions.update((shard.generation, version) for version in shard.versions)
        return cls(frozenset(bases), frozenset(differentials))


def decide(ranks: Sequence[Readable], lineage: Lineage) -> RecoveryPoint | None:
    """The newest point every rank can reach, or ``None``.

    Generations are tried newest first. A generation opens with a base at the version it left its parent, so
    any point in it is at least as new as all that counts of its ancestors. Within one, the newest common
    base is the best anchor: an older one cannot reach further, since its run has to pass the same gap.
    """
    bases = reduce(frozenset.intersection, (rank.bases for rank in ranks))
    differentials = reduce(frozenset.intersection, (rank.differentials for rank in ranks))
    for generation, limit in lineage.chain:
        anchors = [version for found, version in bases if found == generation and (limit is None or version <= limit)]
        if not anchors:
            continue
        anchor = last = max(anchors)
        while (limit is None or last < limit) and (generation, last + 1) in differentials:
            last += 1
        return RecoveryPoint(generation, anchor, last)
    return None
