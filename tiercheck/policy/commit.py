"""When a base counts as committed in a tier that all ranks share.

Each rank puts a marker behind its shard. The coordinator (rank 0) checks every marker against its shard, then
publishes the commit record with a conditional put. Markers and commit records carry the generation. When a newer
generation has opened, an older one commits and purges nothing: a process of the older generation that is still alive
cannot change the job any more.

A tier that lies inside a node needs no commit: a rank's shards there are published one by one, and recovery uses what
every rank can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from tiercheck.keys import CommitKey, MarkerKey, ShardKey
from tiercheck.policy.observation import Contents, Observation
from tiercheck.policy.placement import own_bases
from tiercheck.schema import Count, Generation, Version

__all__ = ["COORDINATOR", "CommitRecord", "CommittedShard", "Marker", "lagging", "superseded", "to_commit", "to_mark"]

COORDINATOR = 0
RANKS_NAMED_MAX = 8


@dataclass(frozen=True)
class Marker:
    """What a rank says about its shard: its length, the digest in its header, and its generation's token."""

    nbytes: Count
    digest: str
    token: str


class CommittedShard(Struct, frozen=True, array_like=True):
    """What a commit record says of one rank's shard."""

    nbytes: Count
    digest: str


@dataclass(frozen=True)
class CommitRecord:
    """The committed base: what every rank's marker says, in rank order."""

    generation: Generation
    version: Version
    token: str
    """The generation's token. Each marker has the same token."""
    shards: tuple[CommittedShard, ...]

    @classmethod
    def of(cls, generation: int, version: int, markers: Sequence[Marker]) -> CommitRecord:
        """``markers``: of all ranks, in rank order."""
        shards = tuple(CommittedShard(marker.nbytes, marker.digest) for marker in markers)
        return cls(generation, version, markers[0].token, shards)


def to_mark(seen: Observation, tier: int) -> list[MarkerKey]:
    """Markers that this rank has to put into the tier: for its uncommitted bases there without a marker."""
    if not seen.roles[tier].shared:
        return []
    contents = seen.contents[tier]
    keys = [MarkerKey(base.generation, base.first, base.rank) for base in _uncommitted(seen, contents)]
    return [key for key in keys if key not in contents]


def to_commit(seen: Observation, tier: int) -> list[CommitKey]:
    """Commit records that the coordinator has to publish in the tier, oldest first: all ranks' markers are there, and
    the record is not."""
    if seen.rank != COORDINATOR or not seen.roles[tier].shared:
        return []
    contents = seen.contents[tier]
    keys = [
        CommitKey(base.generation, base.first)
        for base in _uncommitted(seen, contents)
        if all(MarkerKey(base.generation, base.first, rank) in contents for rank in range(seen.world_size))
    ]
    return [key for key in keys if key not in contents]


def _uncommitted(seen: Observation, contents: Contents) -> list[ShardKey]:
    """The rank's bases that are newer than the newest commit. Older bases are superseded, and other ranks may be
    deleting their shards of them."""
    newest = max((commit.version for commit in contents.commits if commit.generation == seen.generation), default=-1)
    return [base for base in own_bases(seen, contents) if base.first > newest]


def lagging(seen: Observation) -> str:
    """Which ranks are late, in words: those without a marker for this rank's oldest base that is not committed."""
    if not seen.durable.shared:
        return "the ranks have agreed on none that is newer"
    contents = seen.contents[seen.durable.index]
    waiting = [base for base in own_bases(seen, contents) if CommitKey(base.generation, base.first) not in contents]
    newest = max((commit.version for commit in contents.commits if commit.generation == seen.generation), default=-1)
    waiting = [base for base in waiting if base.first > newest]
    if not waiting:
        return "what is committed has not been deleted yet"
    markers = (MarkerKey(waiting[0].generation, waiting[0].first, rank) for rank in range(seen.world_size))
    late = [marker.rank for marker in markers if marker not in contents]
    if not late:
        return f"base {waiting[0].first} is not committed yet by rank {COORDINATOR}"
    named = ", ".join(map(str, late[:RANKS_NAMED_MAX])) + (", ..." if len(late) > RANKS_NAMED_MAX else "")
    return f"base {waiting[0].first} has not come whole from rank {named}"


def superseded(seen: Observation) -> int | None:
    """The newer generation that has opened. ``None``: there is none, and this generation may commit and purge."""
    newest = seen.newest_generation
    return newest if newest > seen.generation else None
