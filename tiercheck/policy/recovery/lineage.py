"""The chain of generations: which of the versions found belong to the job's own past.

A restart opens a generation, which leaves its parent at the version that was recovered. What the parent wrote after
that version is another future of the same job, and never part of a chain (invariant I3).

A generation's record also tells what was known of the generations before it, as far as anything of them is left
(:func:`worth_telling`). So the newest record of a tier is all that a reader needs of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from tiercheck import schema
from tiercheck.keys import VERSION_MAX
from tiercheck.schema import Count, Generation, Text

__all__ = ["Branch", "Layout", "Lineage", "LineageRecord", "bearing", "strangers", "worth_telling"]

ANCESTORS_TOLD = 32


@schema.ready
@dataclass(frozen=True, order=True)
class Branch:
    """A generation, and the version at which it left its parent (``parent`` 0: it began at version 0)."""

    generation: Count
    parent: Count
    left_at: Count
    world_size: Annotated[int, Meta(ge=1)]
    token: str
    """A random text of the job that opened the generation. Two jobs that race for one number have different tokens."""
    layout: str = ""
    """A digest of what each rank holds of the model. Ranks read as their own only what was saved under one layout.
    Empty: not told."""
    asked: str = ""
    """What the user asked for at its start (:class:`tiercheck.policy.recovery.request.Request`)."""
    kept: tuple[Generation, ...] = ()
    """The generations that requests have left behind, and that stay all the same. Of some of them a part may count."""
    made: tuple[Text, ...] = field(default=(), compare=False)
    """What was made anew when it began, since no copy was left, in words: all that comes after is approximate. Records
    of older releases retell a branch without it."""

    def __post_init__(self) -> None:
        if not self.parent < self.generation:
            raise ValueError(f"the lineage record {self} contradicts itself")


@dataclass(frozen=True, order=True)
class Layout:
    """How many ranks save the model, and what each of them holds of it."""

    world_size: int
    digest: str = ""
    """As :attr:`Branch.layout`."""

    @classmethod
    def of(cls, branch: Branch) -> Layout:
        return cls(branch.world_size, branch.layout)

    def is_like(self, other: Layout) -> bool:
        """Whether a rank of the one finds its own in what the rank of its number saved under the other."""
        told = self.digest and other.digest
        return self.world_size == other.world_size and (not told or self.digest == other.digest)


Fields = tuple[int, int, int, int, str, str, str, tuple[int, ...]]
"""Of a branch, in their order. A reader takes no more of them than it knows, so that what comes later is told apart."""


@schema.ready
@dataclass(frozen=True)
class LineageRecord(Branch):
    """What lies under a generation's key: its branch, and those before it that were worth telling."""

    past: tuple[Fields, ...] = ()
    """The fields of each branch."""
    past_made: tuple[tuple[Generation, tuple[Text, ...]], ...] = field(default=(), compare=False)
    """The number, and :attr:`made`, of those of them that have it."""
    stores: tuple[Text, ...] = field(default=(), compare=False)
    """In a tier that not all ranks share: the URLs of the tiers that they do share, and that had this record before, or
    one of an older generation and were away when this one opened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(branch.generation >= self.generation for branch in self.told):
            raise ValueError(f"the lineage record of generation {self.generation} tells of a newer one")

    @classmethod
    def of(cls, branch: Branch, past: Iterable[Branch] = (), stores: Iterable[str] = ()) -> LineageRecord:
        """``past``: branches that are worth telling; those that are not older than ``branch`` are left out. ``stores``:
        as of the field."""
        older = [each for each in sorted(past) if each.generation < branch.generation]
        made = tuple((each.generation, each.made) for each in older if each.made)
        past_fields = tuple(map(_fields, older))
        return cls(*_fields(branch), made=branch.made, past=past_fields, past_made=made, stores=tuple(stores))

    @cached_property
    def branch(self) -> Branch:
        return Branch(*_fields(self), made=self.made)

    @cached_property
    def told(self) -> tuple[Branch, ...]:
        """Of the generations before."""
        made = dict(self.past_made)
        return tuple(Branch(*each, made=made.get(each[0], ())) for each in self.past)


def _fields(branch: Branch) -> Fields:
    each = branch
    return each.generation, each.parent, each.left_at, each.world_size, each.token, each.layout, each.asked, each.kept


@dataclass(frozen=True)
class Lineage:
    """The job's own past: pairs of a generation and the last version of it that counts, newest first. ``None``: all of
    its versions count."""

    chain: tuple[tuple[int, int | None], ...]
    branches: Mapping[int, Branch] = field(default_factory=dict, compare=False, repr=False)
    """The lineage records of the chain, and of what is kept beside it, by generation."""
    ranks_most: int = field(default=0, compare=False)
    """The most ranks of any generation that was told of: also of those that are no part of the past."""

    @classmethod
    def of(cls, branches: Iterable[Branch]) -> Lineage:
        """The chain that ends in the newest generation. A missing record ends the chain there."""
        by_generation = {branch.generation: branch for branch in branches}
        chain: list[tuple[int, int | None]] = []
        generation, limit = max(by_generation, default=0), None
        while generation in by_generation:
            chain.append((generation, limit))
            branch = by_generation[generation]
            # Across several restarts a limit can only fall: nothing after the earliest departure counts.
            limit = branch.left_at if limit is None else min(limit, branch.left_at)
            generation = branch.parent
        told = {generation for generation, _ in chain}
        if chain:
            told |= by_generation.keys() & set(by_generation[chain[0][0]].kept)
        most = max((branch.world_size for branch in by_generation.values()), default=0)
        return cls(tuple(chain), {generation: by_generation[generation] for generation in sorted(told)}, most)

    @property
    def newest(self) -> int:
        """The newest generation; 0 if there is none."""
        return self.chain[0][0] if self.chain else 0

    @cached_property
    def eras(self) -> tuple[tuple[Layout, Lineage], ...]:
        """Its generations under one layout in a row, from the newest on. A layout that comes back begins another era:
        what it had saved before is older than what was saved in between."""
        found: list[tuple[Layout, list[tuple[int, int | None]]]] = []
        for generation, last in self.chain:
            branch = self.branches.get(generation)
            if branch is not None and not (found and Layout.of(branch).is_like(found[-1][0])):
                found.append((Layout.of(branch), []))
            if found:
                found[-1][1].append((generation, last))
        return tuple((layout, self._with(chain)) for layout, chain in found)

    def under(self, layout: Layout) -> Lineage:
        """The newest of its eras under the layout; empty if there is none."""
        eras = (lineage for each, lineage in self.eras if each.is_like(layout))
        return next(eras, self._with(()))

    @cached_property
    def readable(self) -> Lineage:
        """What the ranks of the newest generation have saved under its layout since they have it."""
        return self.eras[0][1] if self.eras else self

    @cached_property
    def kept(self) -> frozenset[int]:
        """The generations that are no part of the past, or not wholly, and that stay: see :attr:`Branch.kept`."""
        newest = self.branches.get(self.newest)
        return frozenset(newest.kept) if newest else frozenset()

    def until(self, version: int) -> Lineage:
        """The past up to this version."""
        chain = ((each, version if limit is None else min(limit, version)) for each, limit in self.chain)
        return self._with(chain)

    def shared_with(self, other: Lineage) -> int:
        """The last version up to which both are the same past."""
        shared = 0
        for generation, last in reversed(self.chain):
            if generation not in other._limits:
                break
            here, there = (VERSION_MAX if each is None else each for each in (last, other._limits[generation]))
            shared = min(here, there)
            if here != there:
                break
        return shared

    def _with(self, chain: Iterable[tuple[int, int | None]]) -> Lineage:
        return replace(self, chain=tuple(chain))

    def disowns(self, generation: int, token: str) -> str | None:
        """Why a shard of that generation with that token is no part of the job's past, whatever its version.
        ``None``: it may be part of it."""
        branch = self.branches.get(generation)
        if branch is None or branch.token == token:
            return None
        return (
            f"it was written by another job: this one's generation {generation} is {branch.token}, the shard's is "
            f"{token or 'none'}"
        )

    def admits(self, generation: int, version: int) -> bool:
        """Whether ``version`` of ``generation`` is part of the job's past."""
        limit = self.limit(generation, version)
        return limit is not None and version <= limit

    def limit(self, generation: int, version: int) -> int | None:
        """The last version of the generation up to ``version`` that is part of the job's past; ``None`` if none is."""
        if generation not in self._limits:
            return None
        limit = self._limits[generation]
        return version if limit is None else min(version, limit)

    @cached_property
    def _limits(self) -> dict[int, int | None]:
        return dict(self.chain)


def bearing(branches: Iterable[Branch], captured: Collection[int]) -> list[Branch]:
    """The branches without the newest ones of which no shard was found. Nothing that was trained in those is left, so
    they must not cut off their parents. An older branch counts in any case: its shards may have been deleted since.
    ``captured``: the generations of all shards that were found, by ranks that could look into all of their tiers."""
    left = sorted(branches)
    while len(left) > 1 and left[-1].generation not in captured:
        left.pop()
    return left


def worth_telling(branches: Collection[Branch], parent: int, captured: Collection[int], ranks: int) -> list[Branch]:
    """The branches that a generation of ``ranks`` with this ``parent`` has to tell of: its ancestors, from the oldest
    one on of which some shard was found, and other futures of which one was found. ``captured``: the generations of all
    shards that were found, by ranks that could look into all of their tiers.

    The last :data:`ANCESTORS_TOLD` ancestors are told in any case: a tier that was left out of the hierarchy for a
    while may know the job by one of them. So are starts on more ranks among as many generations: what those ranks that
    the job has no more have put into shared tiers no rank sees, and it is to be deleted.
    """
    by_generation = {branch.generation: branch for branch in branches}
    ancestors: list[int] = []
    while parent in by_generation:
        ancestors.append(parent)
        parent = by_generation[parent].parent
    oldest = min(set(ancestors).intersection(captured), default=max(ancestors, default=0))
    told = {each for each in ancestors if each >= oldest} | {*ancestors[:ANCESTORS_TOLD]}
    told |= by_generation.keys() & set(captured)
    told |= {each.generation for each in sorted(branches)[-ANCESTORS_TOLD:] if each.world_size > ranks}
    return [by_generation[generation] for generation in sorted(told)]


def strangers(lineage: Lineage, recorded: Iterable[int], captured: Iterable[int]) -> list[int]:
    """The generations of another history in one tier, ascending. Such a generation is newer than every generation of
    the lineage that the tier knows, and has captured something.

    What a failed start left behind is older than a generation of the lineage, or has captured nothing. ``recorded``,
    ``captured``: the generations that have a record in the tier, and those that have shards there.
    """
    known = {generation for generation, _ in lineage.chain}
    newest = max(known & set(recorded), default=0)
    return sorted(generation for generation in set(recorded) & set(captured) - known if generation > newest)
