"""When a base, or a snapshot, counts as committed in a tier that all ranks share.

Each rank puts a marker behind its shard. The marker's name tells the shard's size and checksum. The coordinator (rank
0) checks every marker against its shard, then publishes the commit record with a conditional put. Nobody but the
coordinator lists what other ranks have put: a rank learns from the commit record that all of them have a shard.
Markers and commit records carry the generation. When a newer generation has opened, an older one commits and purges
nothing: a process of the older generation that is still alive cannot change the job any more.

A tier that lies inside a node needs no commit: a rank's shards there are published one by one, and recovery uses what
every rank can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from tiercheck.keys import CommitKey, MarkerKey, ShardKey
from tiercheck.policy.observation import Contents, Observation
from tiercheck.policy.placement import own_bases, own_snapshots
from tiercheck.schema import Count, Generation, Version

__all__ = [
    "COORDINATOR",
    "CommitRecord",
    "CommittedShard",
    "lagging",
    "superseded",
    "to_commit",
    "to_mark",
    "uncommitted",
]

COORDINATOR = 0
RANKS_NAMED_MAX = 8


class CommittedShard(Struct, frozen=True, array_like=True):
    """What a commit record says of one rank's shard."""

    nbytes: Count
    digest: str


@dataclass(frozen=True)
class CommitRecord:
    """What is committed: what every rank's marker says, in rank order."""

    generation: Generation
    version: Version
    base: Version
    """The version of the base; an older one than ``version`` if snapshots lead from it."""
    token: str
    """The generation's token. Each marker has the same token."""
    shards: tuple[CommittedShard, ...]
    layout: str = ""
    """A digest of what the bases of all ranks say of their tensors (:mod:`tiercheck.format.index`): bases with the same
    one are laid out alike. Empty for snapshots, which lie as their base does."""

    @classmethod
    def of(cls, key: CommitKey, markers: Sequence[MarkerKey], layout: str = "") -> CommitRecord:
        """``markers``: of all ranks, in rank order."""
        shards = tuple(CommittedShard(marker.nbytes, marker.digest) for marker in markers)
        return cls(key.generation, key.version, key.base, markers[0].token, shards, layout)

    @property
    def world_size(self) -> int:
        return len(self.shards)


def to_mark(seen: Observation, tier: int) -> list[ShardKey]:
    """The shards in the tier that this rank has to mark: its uncommitted bases and snapshots there without a marker."""
    if not seen.roles[tier].shared:
        return []
    contents = seen.contents[tier]
    return [
        shard for shard in _uncommitted(seen, contents) if not contents.marked(CommitKey.of(shard)).get(seen.rank, ())
    ]


def to_commit(seen: Observation, tier: int) -> list[CommitKey]:
    """Commit records that the coordinator has to publish in the tier, oldest first, snapshots last: all ranks' markers
    are there, and the record is not."""
    if seen.rank != COORDINATOR or not seen.roles[tier].shared:
        return []
    contents = seen.contents[tier]
    keys = [CommitKey.of(shard) for shard in _uncommitted(seen, contents)]
    return [key for key in keys if key not in contents and not _unmarked(seen, contents, key)]


def _unmarked(seen: Observation, contents: Contents, key: CommitKey) -> list[int]:
    """The ranks without a marker."""
    marked = contents.marked(key)
    return [rank for rank in range(seen.world_size) if rank not in marked]


def _uncommitted(seen: Observation, contents: Contents) -> list[ShardKey]:
    """The rank's bases that are newer than any committed one, and its snapshots that are newer than anything committed.
    What is older is superseded, and other ranks may be deleting their shards of it."""
    bases, snapshots = _newest_committed(seen, contents)
    return [
        *(base for base in own_bases(seen, contents) if base.first > bases and contents.completes(base)),
        *(shard for shard in own_snapshots(seen, contents) if shard.last > max(bases, snapshots)),
    ]


def _newest_committed(seen: Observation, contents: Contents) -> tuple[int, int]:
    """The newest version of this generation that a committed base has, and the newest that committed snapshots lead to;
    -1 if there is none."""
    bases, snapshots = (
        max((each.version for each in commits if each.generation == seen.generation), default=-1)
        for commits in (contents.commits, contents.snapshot_commits)
    )
    return bases, snapshots


def lagging(seen: Observation) -> str:
    """Which ranks are late, in words. The coordinator sees who has no marker for the oldest base that is not committed.
    Any other rank sees only that it is not."""
    if not seen.durable.shared:
        return "the ranks have not agreed yet on a newer version that each of them can reach if a node fails"
    contents = seen.contents[seen.durable.index]
    newest, _ = _newest_committed(seen, contents)
    waiting = next((base for base in own_bases(seen, contents) if base.first > newest), None)
    if waiting is None:
        return "what is committed has not been deleted yet"
    commit = CommitKey.of(waiting)
    late = _unmarked(seen, contents, commit)
    if seen.rank != COORDINATOR:
        return f"base {waiting.first} is not committed yet by rank {COORDINATOR}, which sees whose shard is late"
    if not late:
        return f"base {waiting.first} is not committed yet by rank {COORDINATOR}"
    names = ", ".join(map(str, late[:RANKS_NAMED_MAX])) + (", ..." if len(late) > RANKS_NAMED_MAX else "")
    return f"base {waiting.first} is not known to have come whole to {seen.durable.name} from rank {names}"


def uncommitted(seen: Observation) -> str:
    """Why the durable tier has no committed base of this generation, though it has one of this rank's, in words; empty
    if it has, or should have none. Only the coordinator knows."""
    if seen.rank != COORDINATOR or not seen.durable.shared:
        return ""
    contents = seen.contents[seen.durable.index]
    newest, _ = _newest_committed(seen, contents)
    return "" if newest >= 0 or not own_bases(seen, contents) else lagging(seen)


def superseded(seen: Observation) -> int | None:
    """The newer generation that has opened. ``None``: there is none, and this generation may commit and purge."""
    newest = seen.newest_generation
    return newest if newest > seen.generation else None
