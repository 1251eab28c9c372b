"""What an object of a tier needs to be of use: the one place that says so, for whatever copies or deletes objects.

A version needs the shards of every rank's way to it, and a base the constants that it refers to. A commit record needs
the shards that it speaks of.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.keys import CommitKey, ShardKey, Stream

__all__ = ["commits_of", "shards_of_commit", "shards_of_version"]

COMMITTED = (Stream.BASE, Stream.SNAPSHOT)
"""What commit records speak of."""


def shards_of_version(chosen: Recoverable) -> list[ShardKey]:
    """The shards that every rank reads to come to the version; what they refer to comes before them."""
    return list(dict.fromkeys(source.key for plan in chosen.plans for source in plan.sources))


def shards_of_commit(inventory: Inventory, commit: CommitKey) -> list[ShardKey]:
    """The shards that a commit record says are stored whole. Of a generation whose record is lost: those that are
    known."""
    branch = inventory.branches.get(commit.generation)
    ranks = range(branch.world_size) if branch else sorted(inventory.copies)
    found: list[ShardKey] = []
    for rank in ranks:
        held = (copy.key for copy in inventory.copies.get(rank, ()) if copy.key.stream in COMMITTED)
        shard = next((key for key in held if CommitKey.of(key) == commit), commit.shard(rank))
        found += [shard] if shard.constants is None else [shard.constants, shard]
    return found


def commits_of(shards: Iterable[ShardKey]) -> set[CommitKey]:
    """The commit records that speak of these shards, if there are any."""
    return {CommitKey.of(shard) for shard in shards if shard.stream in COMMITTED}
