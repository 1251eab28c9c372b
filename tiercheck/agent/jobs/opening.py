"""What an agent opens for a replication job: its tiers, though some may be away, and the lineage that they tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tiercheck.agent.jobs.job_store import as_agent_opens
from tiercheck.errors import NotFound, TierError
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.replication.objects.lineage_records import read_branches
from tiercheck.tiers.shm.namespaces import SHM, is_to_be_left, namespace_path
from tiercheck.tiers.url import TierURL
from tiercheck.tiers.wrappers.lazy_open import CallsUnderWay

__all__ = ["FirstTierGone", "for_the_agent", "is_leaving", "lineage_of"]


class FirstTierGone(NotFound):
    """The memory that a rank's objects were captured in was removed."""


def is_leaving(url: str) -> bool:
    """Whether the first tier, where it is shared memory, was removed, or waits for its users to let go."""
    whole = TierURL.parse(url)
    if whole.scheme != "shm":
        return False
    root = namespace_path(whole.location, Path(whole.options.get("mount", SHM)))
    return not root.is_dir() or is_to_be_left(root)


def for_the_agent(hierarchy: Hierarchy, calls: CallsUnderWay) -> Hierarchy:
    """The same, as an agent opens it: a store may be away, but not the first tier, without which there is nothing to
    move. ``calls`` notes what the other tiers are asked."""
    first, *others = hierarchy.tiers
    first = replace(first, url=as_agent_opens(first.url))
    return replace(hierarchy, tiers=(first, *others)).lazily_opened(calls=calls)


async def lineage_of(hierarchy: OpenHierarchy, registered: int) -> Lineage:
    """The chain that ends in the registered generation, as the tiers tell it.

    A tier that is away may be done without if another has the record of that generation, which tells of those before.
    Errors: that tier's if none has.
    """
    branches: dict[int, Branch] = {}
    away: list[TierError] = []
    for tier in hierarchy.tiers:
        try:
            for branch in (await read_branches(tier, newest=registered))[0]:
                branches.setdefault(branch.generation, branch)
        except TierError as error:
            away.append(error)
    if away and registered not in branches:
        raise away[0]
    return Lineage.of(branches.values())
