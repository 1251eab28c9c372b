"""What may go: reclamation by watermark.

The watermark is the newest base committed in the tier that survives most. What it makes purgeable:

- in a volatile tier: bases older than the newest two (two deep, so that a crash in mid-capture never costs
  the last whole one, and since ranks that train in lock step are never more than one base apart), and
  differentials before the older of the two, once the durable tier no longer needs either;
- in the tier that survives most: what comes before the last ``keep_last`` committed bases. Its differentials
  are kept from the oldest of these on, so one interval longer than a recovery needs;
- what another future of the job left behind (versions outside its lineage), once the present generation has
  a base of its own to stand on.

A snapshot supersedes those before it. Ranks that train in lock step are never more than one version apart, so that the
newest two are kept in a volatile tier, and the newest two of every Nth version, which are what a shared tier is given;
in a shared tier those from the newest on that every rank has there, with the base that it was made for.

Never the newest committed base, and never anything newer than it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey, Stream
from tiercheck.policy.commit import COORDINATOR
from tiercheck.policy.observation import Contents, Observation, Role

__all__ = ["BASES_IN_VOLATILE_TIERS", "SNAPSHOTS_IN_VOLATILE_TIERS", "Retention", "watermark"]

BASES_IN_VOLATILE_TIERS = 2
SNAPSHOTS_IN_VOLATILE_TIERS = 2


def watermark(seen: Observation) -> CommitKey | None:
    """The newest base committed in the tier that survives most; ``None`` for none, or for no shared tier."""
    commits = seen.contents[seen.durable.index].commits if seen.durable.shared else ()
    return commits[-1] if commits else None


@dataclass(frozen=True)
class Retention:
    """``keep_last``: committed bases of the job's own past kept in the durable tier. ``keep_every``: besides, each
    base whose version is a multiple of it (0: none); these keep no differentials. ``batch``: that of
    :class:`tiercheck.policy.placement.Placement`."""

    keep_last: int = 2
    keep_every: int = 0
    batch: int = 5

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {self.keep_last}: the last base is never deleted")
        if self.keep_every < 0:
            raise ValueError(f"keep_every must not be negative, not {self.keep_every}")
        if self.batch < 1:
            raise ValueError(f"a batch holds at least one version, not {self.batch}")

    def reclaimable(self, seen: Observation) -> dict[int, list[Key]]:
        """Per tier index, this rank's objects that nothing needs any more. Commit records come first: a base
        that is being deleted must not look committed."""
        return {
            role.index: self._durable(seen, role) if role.shared else self._volatile(seen, role) for role in seen.roles
        }

    def _volatile(self, seen: Observation, role: Role) -> list[Key]:
        contents = seen.contents[role.index]
        superseded = self._superseded(seen, contents)
        bases = contents.bases(seen.rank)
        kept = bases[-BASES_IN_VOLATILE_TIERS:]
        if len(kept) < BASES_IN_VOLATILE_TIERS or kept[-1].generation != seen.generation:
            return superseded
        oldest = kept[0]
        mark = watermark(seen)

        def drained(key: ShardKey) -> bool:
            """Whether the durable tier has no more use for this copy."""
            if not seen.durable.shared:
                return True
            return mark is not None and (key.generation, key.last) <= (mark.generation, mark.version)

        older = [base for base in bases if base < oldest and drained(base)]
        passed = [
            key
            for key in (*contents.differentials(seen.rank), *contents.snapshots(seen.rank))
            if (key.generation, key.last) <= (oldest.generation, oldest.last) and drained(key)
        ]
        return [*older, *passed, *(key for key in superseded if key not in passed)]

    def _superseded(self, seen: Observation, contents: Contents) -> list[Key]:
        """Snapshots in a volatile tier that newer ones make superfluous."""
        own = [key for key in contents.snapshots(seen.rank) if key.generation == seen.generation]
        meeting = [key for key in own if key.last % self.batch == 0]
        kept = {*own[-SNAPSHOTS_IN_VOLATILE_TIERS:], *meeting[-SNAPSHOTS_IN_VOLATILE_TIERS:]}
        return [key for key in own if key not in kept]

    def _durable(self, seen: Observation, role: Role) -> list[Key]:
        contents = seen.contents[role.index]
        if not contents.commits or contents.commits[-1].generation != seen.generation:
            return []
        commits = [commit for commit in contents.commits if seen.lineage.admits(commit.generation, commit.version)]
        if not commits:
            return []  # the lineage, as far as it is known, has no committed base: nothing may go
        # A restart commits the version it resumed from once more: that is one version to go back to, not two.
        latest = {commit.version: commit for commit in commits}
        kept = set(sorted(latest.values())[-self.keep_last :])
        oldest, newest = min(kept), commits[-1]
        if self.keep_every:
            kept |= {commit for commit in commits if commit.version % self.keep_every == 0}
        gone = [
            base
            for base in contents.bases(seen.rank)
            if CommitKey(base.generation, base.first) not in kept
            and (base.generation, base.first) < (newest.generation, newest.version)
        ]
        common = common_snapshots(seen, contents)
        passed = [
            key
            for key in (*contents.differentials(seen.rank), *contents.snapshots(seen.rank))
            if (key.generation, key.last) <= (oldest.generation, oldest.version)
            or (key.stream is Stream.SNAPSHOT and key.last < common.get(key.generation, -1))
        ]
        return [*_records(seen, contents, gone), *gone, *passed]


def common_snapshots(seen: Observation, contents: Contents) -> dict[int, int]:
    """Per generation the newest version of which every rank has a snapshot here, and the base that it was made for."""
    usable = {
        (key.generation, key.last, key.rank)
        for rank in contents.ranks
        for key in contents.snapshots(rank)
        if ShardKey.base(key.generation, key.first - 1, rank) in contents
    }
    ranks = Counter((generation, last) for generation, last, _ in usable)
    return dict(sorted(version for version, count in ranks.items() if count == seen.world_size))


def _records(seen: Observation, contents: Contents, bases: list[ShardKey]) -> list[Key]:
    """The commit records (the coordinator's to delete) and own markers of these bases."""
    commits: list[Key] = [CommitKey(base.generation, base.first) for base in bases]
    markers: list[Key] = [MarkerKey(base.generation, base.first, base.rank) for base in bases]
    owed = [*(commits if seen.rank == COORDINATOR else []), *markers]
    return [key for key in owed if key in contents]
