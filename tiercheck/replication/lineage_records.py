"""The lineage records of a tier, read. What cannot be used of them is set aside and told."""

from __future__ import annotations

import logging
from typing import NamedTuple

from tiercheck import keys
from tiercheck.errors import Corruption, NotFound
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import LINEAGE, LineageKey
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.asking import asked_twice
from tiercheck.replication.records import read_record

__all__ = ["SetAside", "read_branch", "read_branches"]

log = logging.getLogger(__name__)


class SetAside(NamedTuple):
    """An object that was not used, and why."""

    key: str
    tier: str
    reason: str


async def read_branches(
    tier: OpenTier, listed: dict[LineageKey, int] | None = None
) -> tuple[list[Branch], list[SetAside]]:
    """The lineage records of a tier (``listed``: those, and their lengths), and those that cannot be used, which are
    logged. Errors: ``TierError`` if the tier cannot be asked."""
    if listed is None:
        found = [(keys.parse(info.key), info.nbytes) async for info in tier.driver.list(LINEAGE)]
        listed = {key: nbytes for key, nbytes in found if isinstance(key, LineageKey)}
    branches: list[Branch] = []
    set_aside: list[SetAside] = []
    for key, nbytes in sorted(listed.items()):
        try:
            branches.append(await read_branch(tier, key, nbytes=nbytes))
        except NotFound:
            continue  # somebody has removed it just now
        except Corruption as error:
            log.warning("a lineage record is set aside: %s", error)
            set_aside.append(SetAside(str(key), tier.name, error.message))
    return branches, set_aside


async def read_branch(tier: OpenTier, key: LineageKey, *, nbytes: int | None = None) -> Branch:
    """Errors: ``Corruption`` for what is no lineage record of that generation; ``NotFound``; ``TierError``."""
    branch = await asked_twice(lambda: read_record(tier.driver, key, Branch, nbytes=nbytes))
    if branch.generation != key.generation:
        raise Corruption(f"the record speaks of generation {branch.generation}", tier=tier.name, key=str(key))
    return branch
