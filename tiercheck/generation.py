"""Opening a generation: the record that fences every older process of the job out."""

from __future__ import annotations

import secrets
from typing import Any

from tiercheck import objects
from tiercheck.errors import AlreadyExists, Corruption, JobConflict, Unsupported
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import LineageKey
from tiercheck.policy.lineage import Branch
from tiercheck.types import PutMode

__all__ = ["open_generation", "propose"]


def propose(branches: tuple[Branch, ...], *, parent: int, left_at: int, world_size: int) -> Branch:
    """The next generation after ``branches``. Rank 0 proposes, and all ranks open the same one."""
    generation = max((branch.generation for branch in branches), default=0) + 1
    return Branch(generation, parent, left_at, world_size, secrets.token_hex(8))


async def open_generation(hierarchy: OpenHierarchy, branch: Branch) -> None:
    """Record the generation in each of this rank's tiers.

    Every rank does so, and in a shared tier all write the same record. Errors: ``JobConflict`` where another
    job opened a generation of this number at the same time; ``TierError``.
    """
    # Shared tiers first: a job that loses the race there leaves no record in tiers of its own.
    for tier in sorted(hierarchy.tiers, key=lambda tier: not tier.role.shared):
        await _record(tier, branch)


async def _record(tier: OpenTier, branch: Branch) -> None:
    key = str(LineageKey(branch.generation))
    content = objects.pack(branch.to_object())
    if not tier.capabilities.conditional_put:
        if tier.role.shared:
            raise Unsupported("opening a generation takes a conditional put", tier=tier.name, key=key)
        await tier.driver.put(key, [content])
        return
    try:
        await tier.driver.put(key, [content], mode=PutMode.CREATE)
    except AlreadyExists:
        value: Any = objects.unpack(await tier.driver.get(key))
        try:
            found = Branch.from_object(value)
        except ValueError as error:
            raise Corruption(str(error), tier=tier.name, key=key) from error
        if found != branch:
            raise JobConflict(
                f"another job opened generation {branch.generation} in {tier.driver.url} just now; two jobs must not "
                "share a hierarchy: end one of them, or give it a name of its own"
            ) from None
