"""The lineage records of a tier, read. What cannot be used of them is set aside and told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiercheck import keys
from tiercheck.errors import Corruption, NotFound
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import LINEAGE, LineageKey
from tiercheck.policy.recovery.lineage import Branch, LineageRecord
from tiercheck.replication.objects.asking import asked_twice
from tiercheck.replication.objects.records import read_record

__all__ = ["SetAside", "branches_of", "listed_lineage", "read_branches", "read_lineage", "read_records"]

log = logging.getLogger(__name__)


class SetAside(NamedTuple):
    """An object that was not used, and why."""

    key: str
    tier: str
    reason: str


async def listed_lineage(tier: OpenTier) -> dict[LineageKey, int]:
    """The lineage records of a tier, and their lengths. Errors: ``TierError``."""
    found = [(keys.parse(info.key), info.nbytes) async for info in tier.driver.list(LINEAGE)]
    return {key: nbytes for key, nbytes in found if isinstance(key, LineageKey)}


async def read_branches(
    tier: OpenTier, listed: Mapping[LineageKey, int] | None = None, *, newest: int | None = None
) -> tuple[list[Branch], list[SetAside]]:
    """The branches that a tier's lineage records tell of, and the records that cannot be used. Options and errors: as
    of :func:`read_records`."""
    records, set_aside = await read_records(tier, listed, newest=newest)
    return branches_of(records), set_aside


def branches_of(records: Iterable[LineageRecord]) -> list[Branch]:
    """All that they tell of, oldest first. ``records``: newest first."""
    told: dict[int, Branch] = {}
    for record in records:
        for branch in (record.branch, *record.told):
            told.setdefault(branch.generation, branch)
    return sorted(told.values())


async def read_records(
    tier: OpenTier, listed: Mapping[LineageKey, int] | None = None, *, newest: int | None = None
) -> tuple[list[LineageRecord], list[SetAside]]:
    """A tier's lineage records, newest first, and those that cannot be used, which are logged.

    The newest record is read, and each one of which none that was read tells. ``listed``: the records, and their
    lengths. ``newest``: no record of a newer generation counts. Errors: ``TierError`` if the tier cannot be asked.
    """
    if listed is None:
        listed = await listed_lineage(tier)
    records: list[LineageRecord] = []
    told: set[int] = set()
    set_aside: list[SetAside] = []
    for key, nbytes in sorted(listed.items(), reverse=True):
        if key.generation in told or (newest is not None and key.generation > newest):
            continue
        try:
            record = await read_lineage(tier, key, nbytes=nbytes)
        except NotFound:
            continue  # somebody has removed it just now
        except Corruption as error:
            log.warning("a lineage record is set aside: %s", error)
            set_aside.append(SetAside(str(key), tier.name, error.message))
            continue
        records.append(record)
        told.update(branch.generation for branch in (record.branch, *record.told))
    return records, set_aside


async def read_lineage(tier: OpenTier, key: LineageKey, *, nbytes: int | None = None) -> LineageRecord:
    """Errors: ``Corruption`` for what is no lineage record of that generation; ``NotFound``; ``TierError``."""
    record = await asked_twice(lambda: read_record(tier.driver, key, LineageRecord, nbytes=nbytes))
    if record.generation != key.generation:
        raise Corruption(f"the record speaks of generation {record.generation}", tier=tier.name, key=str(key))
    return record
