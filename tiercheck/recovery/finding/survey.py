"""What one rank finds in its tiers before a recovery.

Nothing that cannot be read costs more than what it alone could tell: a damaged lineage record is set aside and told of,
and its generation's number counts as taken; a tier that cannot be listed is *away*, and those who decide are told so.
A lineage record is told apart from an error of the tier: damage is not asked for again, an error is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import xxhash

from tiercheck import keys, schema
from tiercheck.errors import TierError
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import COMMITS, LINEAGE, ClaimKey, CommitKey, LineageKey, ShardKey, Stream, rank_prefix
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.replication.objects.asking import patiently
from tiercheck.replication.objects.lineage_records import SetAside, branches_of, read_records

__all__ = ["Looked", "Survey", "lineage_digest", "look_into", "survey"]

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Looked:
    """What lies in one tier, as far as one rank needs to know."""

    own: dict[ShardKey, int] = field(default_factory=dict)
    """The rank's shards, and their bytes."""
    others: set[ShardKey] = field(default_factory=set)
    """The newest shard of each other rank, in a tier inside a node. In a tier that all ranks share, each looks for its
    own."""
    branches: list[Branch] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    """Generations with a lineage record here, readable or not, and those that such records tell of."""
    claims: set[ClaimKey] = field(default_factory=set)
    commits: set[CommitKey] = field(default_factory=set)
    """In a tier that all ranks share, as rank 0 sees them: one listing is enough."""
    generations: set[int] = field(default_factory=set)
    """Generations of which this rank has a shard here; in a tier inside a node, any rank."""
    set_aside: list[SetAside] = field(default_factory=list)
    stores: Sequence[str] = ()
    """As in :class:`Survey`."""


@dataclass(frozen=True)
class Survey:
    """What one rank found in all its tiers. ``tier`` is always an index in the hierarchy that is read: the job's tiers,
    and behind them the other nodes' memory in which it has looked."""

    sources: frozenset[Copy] = frozenset()
    """Copies of the rank's own shards."""
    others: frozenset[Copy] = frozenset()
    """As in :class:`Looked`."""
    branches: frozenset[tuple[int, Branch]] = frozenset()
    """What lineage records tell: (tier, branch)."""
    recorded: frozenset[tuple[int, int]] = frozenset()
    """(tier, generation) of lineage records, readable or not."""
    claims: frozenset[ClaimKey] = frozenset()
    generations: frozenset[tuple[int, int]] = frozenset()
    """(tier, generation) of shards, as in :class:`Looked`."""
    set_aside: frozenset[SetAside] = frozenset()
    away: tuple[tuple[int, str], ...] = ()
    """Tiers that could not be listed, and why."""
    commits: frozenset[CommitKey] = frozenset()
    """As in :class:`Looked`."""
    stores: frozenset[str] = frozenset()
    """URLs of tiers that all ranks share, of which another tier says that a generation was recorded there."""
    nbytes: Mapping[Copy, int] = field(default_factory=dict, compare=False)
    """Of each of ``sources``."""

    @property
    def lineages(self) -> dict[int, set[Branch]]:
        """By digest, what the lineage records of each tier tell."""
        by_tier: dict[int, set[Branch]] = {}
        for tier, branch in self.branches:
            by_tier.setdefault(tier, set()).add(branch)
        return {lineage_digest(branches): branches for branches in by_tier.values()}

    @property
    def taken(self) -> int:
        """The highest number that any generation here has, had, or was to have."""
        numbers = [generation for _, generation in self.recorded | self.generations]
        return max(numbers + [claim.generation for claim in self.claims], default=0)

    def joined(self, other: Survey) -> Survey:
        """Both: ``other`` has looked later, into the tiers that were away."""
        return Survey(
            self.sources | other.sources,
            self.others | other.others,
            self.branches | other.branches,
            self.recorded | other.recorded,
            self.claims | other.claims,
            self.generations | other.generations,
            self.set_aside | other.set_aside,
            other.away,
            self.commits | other.commits,
            self.stores | other.stores,
            {**self.nbytes, **other.nbytes},
        )


def lineage_digest(branches: Iterable[Branch]) -> int:
    """A number that stands for these branches; 0 if there are none."""
    known = sorted(branches, key=attrgetter("generation", "token"))
    return xxhash.xxh3_64_intdigest(schema.pack(known)) or 1 if known else 0


async def survey(
    tiers: Sequence[OpenTier], rank: int, *, retry_s: float, answer_s: float, insist: bool = True
) -> Survey:
    """Look into all of the tiers at once. One that fails is tried again for ``retry_s`` (unless ``insist``, only if
    something listens); one that says nothing for ``answer_s`` counts as away."""
    looks = await asyncio.gather(
        *(patiently(partial(look_into, tier, rank), tier, retry_s, answer_s, insist) for tier in tiers)
    )
    found = [(tier, look) for tier, look in zip(tiers, looks, strict=True) if isinstance(look, Looked)]
    return Survey(
        sources=frozenset(Copy(tier.index, key) for tier, look in found for key in look.own),
        others=frozenset(Copy(tier.index, key) for tier, look in found for key in look.others),
        branches=frozenset((tier.index, branch) for tier, look in found for branch in look.branches),
        recorded=frozenset((tier.index, generation) for tier, look in found for generation in look.recorded),
        claims=frozenset(claim for _, look in found for claim in look.claims),
        generations=frozenset((tier.index, generation) for tier, look in found for generation in look.generations),
        set_aside=frozenset(each for _, look in found for each in look.set_aside),
        away=tuple(
            (tier.index, str(look)) for tier, look in zip(tiers, looks, strict=True) if isinstance(look, TierError)
        ),
        commits=frozenset(commit for _, look in found for commit in look.commits),
        stores=frozenset(url for _, look in found for url in look.stores),
        nbytes={Copy(tier.index, key): nbytes for tier, look in found for key, nbytes in look.own.items()},
    )


async def look_into(tier: OpenTier, rank: int) -> Looked:
    """What lies in the tier. Errors: ``TierError`` if it cannot be listed, or a record cannot be asked for."""
    looked = Looked()
    records: dict[LineageKey, int] = {}
    others: dict[int, ShardKey] = {}
    prefixes = (LINEAGE, rank_prefix(rank)) if tier.seen_by_all else ("",)
    if looks_at_commits := tier.seen_by_all and rank == 0:
        prefixes = (COMMITS, *prefixes)
    async for info in tier.listed(prefixes):
        key = keys.parse(info.key)
        if isinstance(key, ShardKey):
            if key.stream is not Stream.CONSTANT:  # newer generations refer to them, and nothing leads there
                looked.generations.add(key.generation)
            if key.rank == rank:
                looked.own[key] = info.nbytes
            else:
                newest = others.get(key.rank, key)
                others[key.rank] = max(key, newest, key=lambda each: (each.generation, each.last))
        elif isinstance(key, ClaimKey):
            looked.claims.add(key)
        elif isinstance(key, CommitKey):
            if looks_at_commits:
                looked.commits.add(key)
        elif isinstance(key, LineageKey):
            records[key] = info.nbytes
    looked.others = set(others.values())
    told, looked.set_aside = await read_records(tier, records)
    looked.branches, looked.stores = branches_of(told), told[0].stores if told else ()
    looked.recorded = {key.generation for key in records} | {branch.generation for branch in looked.branches}
    return looked
