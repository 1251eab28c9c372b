"""Opening a generation: the record that fences every older process of the job out.

Of two jobs that ask for one generation at the same time at most one may get it. If the tier takes conditional
puts, the record itself decides: it is created, once. If it does not (most fsspec file systems, some object
stores), a **claim** decides:

1. put the claim, an object under a name that nobody else uses (:class:`tiercheck.keys.ClaimKey`);
2. list the claims of that generation: another one there means ``JobConflict``, and one's own is withdrawn;
3. alone: put the record.

Of two claimants the one that lists last sees both claims, as long as the store shows in a listing what was put before
it (S3, GCS, Azure and every POSIX file system do); so both may lose, and the user starts one of them again, but never
do both win. A claim that a crash left behind is no record: the next job asks for a higher number, past every claim.

A record tells of the generations before its own as well, and older records are deleted
(:class:`tiercheck.policy.watermark.Retention`). A deleted record leaves its number free again. So whoever has put its
record looks once more: it takes the record back if a newer generation is there. A record is deleted only after a newer
one was put, so that such a listing shows a newer one wherever the number was another's before.

A tier that cannot be written to just now need not stop a recovery that memory serves. The generation is recorded there
later, by the mover, before it puts or deletes anything there: who has gone on in that tier meanwhile has won.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from tiercheck import keys
from tiercheck.errors import AlreadyExists, Corruption, JobConflict, NotFound, TierError, Transient, Unsupported
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.keys import ClaimKey, LineageKey, ShardKey, captured_prefix
from tiercheck.policy.recovery.lineage import Branch, Lineage, LineageRecord, strangers
from tiercheck.replication.objects.asking import patiently
from tiercheck.replication.objects.lineage_records import listed_lineage, read_branches, read_lineage
from tiercheck.replication.objects.records import read_record, seal
from tiercheck.types import PutMode

__all__ = [
    "EMPTIED",
    "UNSEEN",
    "Opening",
    "finds_probe",
    "open_generation",
    "put_probe",
    "record_generation",
    "remove_probe",
    "withdraw_captures",
    "withdraw_records",
]

log = logging.getLogger(__name__)

EMPTIED = "has no record of this job, though this node's memory says that the job has saved there"
UNSEEN = 16
"""Numbers that are left out where a tier could not be asked which are taken: it may know of starts that failed."""


@dataclass(frozen=True)
class Opening:
    """What became of one rank's part."""

    later: Mapping[str, str] = field(default_factory=dict)
    """Tiers in which the generation is not recorded yet, and why."""
    occupied: bool = False
    """Something that is no record lies under this number: another one is to be tried."""
    created: Mapping[str, str] = field(default_factory=dict)
    """The shared tiers in which this rank seems to have put the record, and no other one before, and their URLs. After
    a try that failed its own record and another rank's look alike."""


async def open_generation(
    hierarchy: OpenHierarchy,
    branch: Branch,
    *,
    past: Collection[Branch] = (),
    stores: Collection[str] = (),
    may_wait: bool = False,
    deadline_s: float | None = None,
) -> Opening:
    """Record the generation in each of this rank's tiers, with what is worth telling of its ``past``.

    Every rank does so, and in a shared tier all write the same record. ``stores``: URLs of shared tiers that have a
    record of an older one, so that this is still known if they are away. ``may_wait``: a tier behind the first one that
    fails is left for later. Any other one is asked again if its error may pass. All of them together have
    ``deadline_s``, if there is one: a tier that may wait half of what is left, so that it leaves some to the next.
    Errors: ``JobConflict`` if another job opened a generation of this number at the same time; ``TierError``.
    """
    until = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
    later: dict[str, str] = {}
    created: dict[str, str] = {}
    recorded: list[str] = []
    # Shared tiers first: a job that loses the race there leaves no record in tiers of its own. And those tell of the
    # shared ones, so that an empty one is told from one that has nothing yet.
    for tier in sorted(hierarchy.tiers, key=lambda tier: not tier.role.shared):
        waits = may_wait and tier is not hierarchy.first
        record = LineageRecord.of(branch, past, () if tier.role.shared else recorded)
        try:
            is_first = await _record_until(tier, record, until, waits=waits)
        except (Corruption, Unsupported) as error:
            log.warning("generation %d is passed over: %s", branch.generation, error)
            return Opening(occupied=True)
        except TierError as error:
            if not waits:
                raise
            later[tier.name] = str(error)
            recorded += [tier.driver.url] if tier.driver.url in stores else []
        else:
            recorded += [tier.driver.url] if tier.role.shared else []
            if tier.role.shared and is_first:
                created[tier.name] = tier.driver.url
    return Opening(later, created=created)


async def record_generation(
    tier: OpenTier, branch: Branch, lineage: Lineage, rank: int, first: OpenTier, *, again: bool = False
) -> None:
    """Have the generation recorded in a tier before anything else is put there. Idempotent. ``first``: the rank's
    first tier, which has the record. ``again``: the tier had the record, and has what is committed still.

    A damaged record of it is replaced. Errors: ``JobConflict`` if another job has opened this number, or has gone on
    there from an older version than ``lineage`` did, and has captured something of this ``rank``; ``Transient`` if
    the tier had records before and has none; ``TierError``.
    """
    key = LineageKey(branch.generation)
    record = LineageRecord.of(branch, lineage.branches.values())
    try:
        if (await read_lineage(tier, key)).branch != branch:
            raise _conflict(tier, branch)
        return
    except NotFound:
        pass
    except Corruption as error:
        log.warning("%s; it is written again", error)
        mode = PutMode.OVERWRITE
        if tier.capabilities.conditional_put:
            mode = PutMode.UPDATE((await tier.driver.stat(str(key))).etag)
        await tier.driver.put(str(key), [seal(key, record)], mode=mode)
        return
    if tier.role.shared:
        listed = await listed_lineage(tier)
        if not listed and not again:
            await _check_emptied(tier, key, first)
        await _check_strangers(tier, listed, branch, lineage, rank)
    await _put_record(tier, record)


async def _check_emptied(tier: OpenTier, key: LineageKey, first: OpenTier) -> None:
    """The tier was away when the generation opened. Now it answers, and holds no lineage record."""
    with suppress(NotFound, Corruption):
        record = await read_lineage(first, key)
        if tier.driver.url in record.stores:
            raise Transient(f"it {EMPTIED}: it is not mounted, or was emptied. Mount it", tier=tier.driver.url)


async def _check_strangers(
    tier: OpenTier, listed: Mapping[LineageKey, int], branch: Branch, lineage: Lineage, rank: int
) -> None:
    told, _ = await read_branches(tier, listed)
    if any(each.token != lineage.branches.get(each.generation, each).token for each in told):
        raise _conflict(tier, branch)
    recorded = {key.generation for key in listed} | {each.generation for each in told}
    others = [each for each in strangers(lineage, recorded, recorded) if await _captured(tier, each, rank)]
    if others:
        raise JobConflict(
            f"generation {others[-1]} of another job has gone on in {tier.driver.url} while this one, generation "
            f"{branch.generation}, could not reach it; this one stops saving. Two jobs must not share a hierarchy: end "
            "one of them, or give it a name of its own"
        )


async def _captured(tier: OpenTier, generation: int, rank: int) -> bool:
    async for info in tier.driver.list(captured_prefix(rank, generation)):
        if isinstance(keys.parse(info.key), ShardKey):
            return True
    return False


async def _put_record(tier: OpenTier, record: LineageRecord) -> bool:
    """Whether it is known that nobody had put it before. Errors: ``JobConflict``; ``Corruption`` if something else lies
    there; ``Unsupported`` if it is a directory; ``TierError``."""
    created = False
    if tier.capabilities.conditional_put:
        created = await _create(tier, record)
    else:
        await _claim(tier, record)
    newest = max(await listed_lineage(tier), default=LineageKey(0))
    if newest.generation > record.generation:
        await _withdraw(tier, record.branch)
        raise JobConflict(
            f"another job opened generation {newest.generation} in {tier.driver.url} while this one opened generation "
            f"{record.generation}; two jobs must not share a hierarchy: end one of them, or give it a name of its own"
        )
    return created


async def _record_until(tier: OpenTier, record: LineageRecord, until: float | None, *, waits: bool) -> bool:
    """As :func:`_put_record`. What may pass is tried again, but in a tier that ``waits``."""
    created = False

    async def put() -> None:
        nonlocal created
        created = await _put_record(tier, record)

    if until is None:
        await put()
        return created
    left_s = max(0.0, until - asyncio.get_running_loop().time())
    retry_s, answer_s = (0.0, left_s / 2) if waits else (left_s, left_s)
    error = await patiently(put, tier, retry_s, answer_s, insist=False)
    if error is not None:
        raise error
    return created


async def put_probe(tier: OpenTier, branch: Branch) -> None:
    """Put an object that no other rank of the generation puts, for others to find. Errors: ``TierError``."""
    key = ClaimKey(branch.generation, branch.token)
    await tier.driver.put(str(key), [seal(key, branch)])


async def finds_probe(tier: OpenTier, branch: Branch) -> bool:
    """Errors: ``TierError``."""
    try:
        await tier.driver.stat(str(ClaimKey(branch.generation, branch.token)))
    except NotFound:
        return False
    return True


async def remove_probe(tier: OpenTier, branch: Branch) -> None:
    """Idempotent. Errors: ``TierError``."""
    await tier.driver.delete([str(ClaimKey(branch.generation, branch.token))])


async def withdraw_captures(hierarchy: OpenHierarchy, branch: Branch, rank: int) -> None:
    """Remove from the first tier what this rank captured of a generation that is given up before a mover ran.

    Its records must outlive what all ranks captured: versions without one would be refused. Errors: ``TierError``.
    """
    first = hierarchy.first.driver
    await first.delete([info.key async for info in first.list(captured_prefix(rank, branch.generation))])


async def withdraw_records(hierarchy: OpenHierarchy, branch: Branch) -> None:
    """Remove this very branch's records, and its claims, from this rank's tiers. Errors: ``TierError``."""
    for tier in hierarchy.tiers:
        await _withdraw(tier, branch)


async def _withdraw(tier: OpenTier, branch: Branch) -> None:
    key = LineageKey(branch.generation)
    found: LineageRecord | None = None
    with suppress(NotFound, Corruption):
        found = await read_record(tier.driver, key, LineageRecord)
    gone = [str(ClaimKey(branch.generation, branch.token))]
    await tier.driver.delete([*gone, str(key)] if found is not None and found.branch == branch else gone)


async def _create(tier: OpenTier, record: LineageRecord) -> bool:
    key = LineageKey(record.generation)
    try:
        await tier.driver.put(str(key), [seal(key, record)], mode=PutMode.CREATE)
    except AlreadyExists:
        if (await read_lineage(tier, key)).branch != record.branch:
            raise _conflict(tier, record) from None
        return False
    return True


async def _claim(tier: OpenTier, record: LineageRecord) -> None:
    own = ClaimKey(record.generation, record.token)
    key = LineageKey(record.generation)
    await tier.driver.put(str(own), [seal(own, record.branch)])
    found = [keys.parse(info.key) async for info in tier.driver.list(str(key))]
    rivals = [each for each in found if isinstance(each, ClaimKey) and each != own]
    if rivals or (key in found and (await read_lineage(tier, key)).branch != record.branch):
        await tier.driver.delete([str(own)])
        raise _conflict(tier, record)
    await tier.driver.put(str(key), [seal(key, record)])


def _conflict(tier: OpenTier, branch: Branch) -> JobConflict:
    return JobConflict(
        f"another job opened generation {branch.generation} in {tier.driver.url} just now; two jobs must not "
        "share a hierarchy: end one of them, or give it a name of its own"
    )
