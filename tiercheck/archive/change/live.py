"""What a job that runs needs of its tiers, as far as that can be known from outside.

A job in another machine leaves no trace that tells whether it runs: a store keeps no lock. So the rule is that a job is
taken to run until the user says that it is dead, and that what it needs is what the mover's guard
(:mod:`tiercheck.policy.guard`) keeps for each rank of the newest generation. On this node a process is known by its
locks, and then nothing that the user says counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from tiercheck.archive.change.removal import in_order
from tiercheck.archive.inventory import Inventory
from tiercheck.errors import JobConflict
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import Key, MarkerKey, ShardKey
from tiercheck.policy.guard import Refusal, checked_deletions
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.runtime.process_lock import holder_of
from tiercheck.types import Survives

__all__ = ["NOWHERE", "guarded", "observations", "refuse_processes"]

NOWHERE = Role(0, "a job's first tier", Survives.PROCESS)
"""Stands for the tier in which the job captures, of which nothing is known: it holds nothing."""


def observations(inventory: Inventory, lineage: Lineage) -> Iterator[Observation]:
    """What each rank of the newest generation sees in the tiers, each of which is taken for one that all ranks share.
    A tier's index is its index in the inventory and 1."""
    branch = inventory.branches.get(lineage.newest)
    if branch is None:
        return
    roles = [NOWHERE]
    contents = [Contents()]
    for tier in inventory.tiers:
        survives = max(tier.role.survives, Survives.RACK)
        roles.append(replace(tier.role, index=len(roles), survives=survives))
        contents.append(Contents.of((key, info.nbytes) for key, info in tier.objects.items()))
    for rank in range(branch.world_size):
        yield Observation(tuple(roles), tuple(contents), rank, branch.world_size, lineage.newest, lineage)


def guarded(
    inventory: Inventory, gone: Mapping[int, Collection[Key]], lineage: Lineage, who: str
) -> tuple[dict[int, list[Key]], list[str]]:
    """Of what is to go, by tier index, what no rank of the newest generation needs; and why the rest stays."""
    allowed: dict[int, list[Key]] = {index: [] for index in gone}
    refusals: dict[Refusal, None] = {}
    asked: dict[int, dict[int, list[Key]]] = defaultdict(lambda: defaultdict(list))
    branch = inventory.branches.get(lineage.newest)
    for index, keys in gone.items():
        for key in in_order(keys):
            asked[rank_of(key) % branch.world_size if branch else 0][index + 1].append(key)
    for seen in observations(inventory, lineage):
        if seen.rank not in asked:
            continue
        passed, refused = checked_deletions(seen, asked[seen.rank], who)
        refusals |= dict.fromkeys(refused)
        for index in gone:
            allowed[index] += passed[index + 1]
    return allowed, list(map(str, refusals))


def rank_of(key: Key) -> int:
    """Whose it is. What concerns all ranks is the coordinator's."""
    return key.rank if isinstance(key, ShardKey | MarkerKey) else 0


def refuse_processes(hierarchy: OpenHierarchy, inventory: Inventory) -> None:
    """Errors: ``JobConflict`` naming a process of this node that has one of the tiers."""
    ranks = {*inventory.copies, *range(max((each.world_size for each in inventory.branches.values()), default=1))}
    for tier in hierarchy.tiers:
        for rank in sorted(ranks):
            if (process := holder_of(tier.driver.url, rank)) is not None:
                raise JobConflict(
                    f"process {process} of this node trains rank {rank} with {tier.driver.url}: the job is not dead. "
                    "End it first"
                )
