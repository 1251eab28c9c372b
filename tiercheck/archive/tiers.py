"""Tiers that are opened to read, and what lies in each of them: the objects of all ranks, listed once.

A tier that cannot be opened or listed is *away*: the others are shown without it, and it is told of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from tiercheck import keys
from tiercheck.errors import DeadlineExceeded, TierError, Transient
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, OpenTier, Tier
from tiercheck.keys import CommitKey, Key, LineageKey, ShardKey
from tiercheck.policy.observation import Role
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.objects.lineage_records import SetAside, read_branches
from tiercheck.runtime.waiting import abandonable
from tiercheck.tiers.wrappers.read_only import ReadOnlyDriver
from tiercheck.types import ObjectInfo

__all__ = [
    "CLOSE_S",
    "TierContents",
    "answered",
    "look_into",
    "open_tier",
    "opened_to_read",
    "within",
]

T = TypeVar("T")

FOREIGN_NAMED_MAX = 3
CLOSE_S = 5.0


@dataclass(frozen=True)
class TierContents:
    """What one tier holds, or why that is not known (``away``)."""

    role: Role
    url: str
    away: str | None = None
    error: TierError | None = None
    """Why it could not be listed."""
    objects: Mapping[Key, ObjectInfo] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    """What its lineage records say."""
    set_aside: tuple[SetAside, ...] = ()
    """Lineage records that cannot be used, and why."""
    foreign: int = 0
    """Objects that are none of TierCheck's."""
    foreign_named: tuple[str, ...] = ()
    """The first of them."""

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def nbytes(self) -> int:
        """Of TierCheck's objects."""
        return sum(info.nbytes for info in self.objects.values())

    @property
    def shards(self) -> Iterator[ShardKey]:
        return (key for key in self.objects if isinstance(key, ShardKey))

    @property
    def recorded(self) -> frozenset[int]:
        """The generations that have a lineage record, readable or not, and those that such records tell of."""
        listed = {key.generation for key in self.objects if isinstance(key, LineageKey)}
        return frozenset(listed.union(branch.generation for branch in self.branches))

    @property
    def commits(self) -> frozenset[CommitKey]:
        return frozenset(key for key in self.objects if isinstance(key, CommitKey))


@asynccontextmanager
async def opened_to_read(urls: Sequence[str], deadline_s: float) -> AsyncIterator[tuple[OpenHierarchy, dict[int, str]]]:
    """The tiers at ``urls``, open, and for each that is not, by its index: why.

    Errors: ``ConfigurationError`` for a URL that is none; the first tier's own if none of them can be opened.
    """
    hierarchy = Hierarchy.of(*(Tier(url, wrap=ReadOnlyDriver) for url in urls)).open()
    outcomes = await asyncio.gather(*(open_tier(tier, deadline_s) for tier in hierarchy.tiers), return_exceptions=True)
    try:
        away: dict[int, str] = {}
        for tier, outcome in zip(hierarchy.tiers, outcomes, strict=True):
            if isinstance(outcome, TierError):
                away[tier.index] = str(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        if len(away) == len(hierarchy.tiers) and isinstance(outcomes[0], BaseException):
            raise outcomes[0]
        yield hierarchy, away
    finally:
        for tier, outcome in zip(hierarchy.tiers, outcomes, strict=True):
            if outcome is not None:
                continue
            with suppress(DeadlineExceeded):  # nothing was written: the process may end without
                await answered(tier.driver.close(), CLOSE_S)


async def open_tier(tier: OpenTier, deadline_s: float) -> None:
    """Errors: the driver's own; ``Transient`` after the deadline."""
    try:
        await answered(tier.driver.open(), deadline_s)
    except DeadlineExceeded:
        trouble = tier.driver.facts().get("trouble", "it does not answer")
        advice = "check its address, or give it longer (deadline_s, or --deadline-s)"
        said = f"it could not be opened within {deadline_s:g} s: {trouble}; {advice}"
        raise Transient(said, tier=tier.driver.url) from None


async def within(tier: OpenTier, deadline_s: float, work: Awaitable[T], what: str = "it has not answered") -> T:
    """What the tier is asked to do. Errors: its own; ``Transient`` saying ``what`` after the deadline."""
    try:
        return await answered(work, deadline_s)
    except DeadlineExceeded:
        raise Transient(f"{what} within {deadline_s:g} s", tier=tier.driver.url) from None


async def answered(work: Awaitable[T], deadline_s: float) -> T:
    """The result of ``work``. Errors: its own; ``DeadlineExceeded``. A call that does not end when it is cancelled,
    such as one to a mount that hangs, is left to itself."""
    try:
        async with asyncio.timeout(deadline_s) as scope:
            return await abandonable(work)
    except TimeoutError:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"a tier has not answered within {deadline_s:g} s") from None


async def look_into(tier: OpenTier, away: str | None, deadline_s: float) -> TierContents:
    """What lies in the tier now; one that cannot be listed within the deadline is away. ``away``: why it is not
    open."""
    if away is not None:
        return TierContents(Role(tier.index, tier.name, tier.capabilities.survives), tier.driver.url, away=away)
    try:
        return await answered(_listed(tier), deadline_s)
    except DeadlineExceeded:
        why: TierError = Transient(f"it was not listed within {deadline_s:g} s", tier=tier.driver.url)
    except TierError as error:
        why = error
    return TierContents(tier.role, tier.driver.url, away=str(why), error=why)


async def _listed(tier: OpenTier) -> TierContents:
    objects: dict[Key, ObjectInfo] = {}
    foreign: list[str] = []
    count = 0
    async for info in tier.driver.list():
        key = keys.parse(info.key)
        if key is not None:
            objects[key] = info
        else:
            count += 1
            if len(foreign) < FOREIGN_NAMED_MAX:
                foreign.append(info.key)
    records = {key: info.nbytes for key, info in objects.items() if isinstance(key, LineageKey)}
    branches, set_aside = await read_branches(tier, records)
    return TierContents(
        tier.role,
        tier.driver.url,
        objects=objects,
        branches=tuple(branches),
        set_aside=tuple(set_aside),
        foreign=count,
        foreign_named=tuple(foreign),
    )
