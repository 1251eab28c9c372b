"""Opening a generation: the record that fences every older process of the job out.

Of two jobs that ask for one generation at the same time at most one may get it. Where the tier takes conditional
puts, the record itself decides: it is created, once. Where it does not (most fsspec file systems, some object
stores), a **claim** decides:

1. put the claim, an object under a name that nobody else uses (:class:`tiercheck.keys.ClaimKey`);
2. list the claims of that generation: another one there means ``JobConflict``, and one's own is withdrawn;
3. alone: put the record.

Of two claimants the one that lists last sees both claims, as long as the store shows in a listing what was put before
it (S3, GCS, Azure and every POSIX file system do); so both may lose, and the user starts one of them again, but never
do both win. A claim that a crash left behind is no record: the next job asks for a higher number, past every claim.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from tiercheck import keys
from tiercheck.errors import AlreadyExists, Corruption, JobConflict, NotFound
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ClaimKey, LineageKey, ShardKey, generation_prefix
from tiercheck.policy.lineage import Branch
from tiercheck.records import read_record, seal
from tiercheck.types import PutMode

__all__ = ["open_generation", "propose", "withdraw_captures", "withdraw_records"]

TOKEN_BYTES = 8


def propose(
    branches: Iterable[Branch], claims: Iterable[ClaimKey], *, parent: int, left_at: int, world_size: int
) -> Branch:
    """The generation after all that were opened or asked for. Rank 0 proposes, and all ranks open the same one."""
    taken = [branch.generation for branch in branches] + [claim.generation for claim in claims]
    return Branch(max(taken, default=0) + 1, parent, left_at, world_size, secrets.token_hex(TOKEN_BYTES))


async def open_generation(hierarchy: OpenHierarchy, branch: Branch) -> None:
    """Record the generation in each of this rank's tiers.

    Every rank does so, and in a shared tier all write the same record. Errors: ``JobConflict`` where another
    job opened a generation of this number at the same time; ``TierError``.
    """
    # Shared tiers first: a job that loses the race there leaves no record in tiers of its own.
    for tier in sorted(hierarchy.tiers, key=lambda tier: not tier.role.shared):
        if tier.capabilities.conditional_put:
            await _create(tier, branch)
        else:
            await _claim(tier, branch)


async def withdraw_captures(hierarchy: OpenHierarchy, branch: Branch, rank: int) -> None:
    """Remove from the first tier what this rank captured of a generation that is given up before a mover ran.

    Its records must outlive what all ranks captured: versions without one would be refused. Errors: ``TierError``.
    """
    first = hierarchy.first.driver
    listed = [keys.parse(info.key) async for info in first.list(generation_prefix(branch.generation))]
    await first.delete([str(key) for key in listed if isinstance(key, ShardKey) and key.rank == rank])


async def withdraw_records(hierarchy: OpenHierarchy, branch: Branch) -> None:
    """Remove this very branch's records, and its claims, from this rank's tiers. Errors: ``TierError``."""
    for tier in hierarchy.tiers:
        key = LineageKey(branch.generation)
        try:
            found = await read_record(tier.driver, key)
        except (NotFound, Corruption):
            found = None
        gone = [str(ClaimKey(branch.generation, branch.token))]
        await tier.driver.delete([*gone, str(key)] if found == branch.to_object() else gone)


async def _create(tier: OpenTier, branch: Branch) -> None:
    key = LineageKey(branch.generation)
    try:
        await tier.driver.put(str(key), [seal(key, branch.to_object())], mode=PutMode.CREATE)
    except AlreadyExists:
        value = await read_record(tier.driver, key)
        try:
            found = Branch.from_object(value)
        except ValueError as error:
            raise Corruption(str(error), tier=tier.name, key=str(key)) from error
        if found != branch:
            raise _conflict(tier, branch) from None


async def _claim(tier: OpenTier, branch: Branch) -> None:
    own = ClaimKey(branch.generation, branch.token)
    record = LineageKey(branch.generation)
    await tier.driver.put(str(own), [seal(own, branch.to_object())])
    found = [keys.parse(info.key) async for info in tier.driver.list(str(record))]
    rivals = [key for key in found if isinstance(key, ClaimKey) and key != own]
    if rivals:
        await tier.driver.delete([str(own)])
        raise _conflict(tier, branch)
    await tier.driver.put(str(record), [seal(record, branch.to_object())])


def _conflict(tier: OpenTier, branch: Branch) -> JobConflict:
    return JobConflict(
        f"another job opened generation {branch.generation} in {tier.driver.url} just now; two jobs must not "
        "share a hierarchy: end one of them, or give it a name of its own"
    )
