"""What several tiers hold together, as values: generations, what each has captured, and which versions can be read.

One rule says what can be read, and it is recovery's (:mod:`tiercheck.recovery.finding.past`,
:mod:`tiercheck.policy.recovery.consensus`): a version is readable if each rank of its generation has a way to it, by
copies in whatever tiers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tiercheck.archive.tiers import TierContents
from tiercheck.errors import RecoveryError, TierCheckError
from tiercheck.keys import ClaimKey, CommitKey, ShardKey, Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.recovery.plan import Plan, Unreachable, plan
from tiercheck.policy.recovery.spans import Span, spans_of, spans_text
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.stages.losses import made_before
from tiercheck.types import Survives

__all__ = ["Generation", "Held", "Inventory", "Recoverable", "Stored"]


@dataclass(frozen=True)
class Held:
    """What one tier holds of a base, a snapshot, the differentials after a base, or constants."""

    tier: str
    ranks: tuple[int, ...]
    """Who has it there: of differentials, any of them."""
    versions: tuple[Span, ...]
    """The versions that all those ranks have."""
    nbytes: int
    committed: bool
    written_s: float | None
    """When the newest part was written, in seconds since the epoch; ``None`` if the tier does not tell."""


@dataclass(frozen=True)
class Stored:
    """A base, a snapshot, the differentials from one base to the next, or what does not change."""

    stream: Stream
    first: int
    last: int
    held: tuple[Held, ...]


@dataclass(frozen=True)
class Generation:
    """One incarnation of a job."""

    number: int
    branch: Branch | None
    """Its lineage record; ``None`` if that is missing or damaged."""
    counts: bool
    """Whether it belongs to the past of the newest generation."""
    until: int | None
    """The last of its versions that counts; ``None``: all of them do."""
    kept_to: int | None
    """If it was left behind on purpose, and is kept: the newest version that can be read as of it."""
    stored: tuple[Stored, ...]


@dataclass(frozen=True)
class Recoverable:
    """How all ranks come to one version."""

    version: int
    points: tuple[RecoveryPoint, ...]
    """By rank, its way."""
    plans: tuple[Plan, ...]
    """By rank, the copies that it reads."""

    @property
    def world_size(self) -> int:
        return len(self.points)

    def check_rank(self, rank: int) -> None:
        """Errors: ``RecoveryError`` if the version has no such rank."""
        if not 0 <= rank < self.world_size:
            ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
            raise RecoveryError(f"version {self.version} is of {ranks}; there is no rank {rank}")


@dataclass(frozen=True)
class Inventory:
    """What lies in the tiers, in the order in which they were given."""

    tiers: tuple[TierContents, ...]
    without: frozenset[Copy] = field(default=frozenset(), compare=False)
    """Copies that are known to be damaged."""

    def less(self, damaged: Collection[Copy]) -> Inventory:
        """The same without these copies."""
        return replace(self, without=self.without | frozenset(damaged))

    # What was found

    @cached_property
    def copies(self) -> Mapping[int, frozenset[Copy]]:
        """By rank, the copies of its shards."""
        found: dict[int, set[Copy]] = defaultdict(set)
        for tier in self.tiers:
            for key in tier.shards:
                found[key.rank].add(Copy(tier.role.index, key))
        return {rank: frozenset(held - self.without) for rank, held in found.items()}

    def nbytes(self, copy: Copy) -> int:
        return self.tiers[copy.tier].objects[copy.key].nbytes

    @cached_property
    def branches(self) -> Mapping[int, Branch]:
        """By number, what the lineage records say; of a number that two jobs have opened, one of them."""
        return {branch.generation: branch for tier in self.tiers for branch in tier.branches}

    @cached_property
    def past(self) -> Past:
        """What recovery would know, if every rank saw all of these tiers."""
        newest = self.branches[max(self.branches)].world_size if self.branches else 0
        roles = [replace(tier.role, survives=max(tier.role.survives, Survives.RACK)) for tier in self.tiers]
        shared = Survey(
            branches=frozenset((tier.role.index, branch) for tier in self.tiers for branch in tier.branches),
            recorded=frozenset((tier.role.index, number) for tier in self.tiers for number in tier.recorded),
            claims=frozenset(key for tier in self.tiers for key in tier.objects if isinstance(key, ClaimKey)),
            generations=frozenset((tier.role.index, key.generation) for tier in self.tiers for key in tier.shards),
            set_aside=frozenset(each for tier in self.tiers for each in tier.set_aside),
            away=tuple((tier.role.index, tier.away) for tier in self.tiers if tier.away is not None),
        )
        surveys = [replace(shared, sources=self.copies.get(rank, frozenset())) for rank in range(newest)]
        return Past.of(surveys or [shared], roles, ", ".join(tier.url for tier in self.tiers))

    # What can be read

    def lineage(self, generation: int | None = None) -> Lineage:
        """The chain that ends in ``generation``; by default, in the newest one of which anything is left."""
        if generation is None:
            return self.past.lineage
        if generation not in self.branches:
            known = ", ".join(map(str, sorted(self.branches))) or "none"
            raise RecoveryError(f"there is no generation {generation} here whose record can be read: there are {known}")
        return self.past.as_of(generation)

    def made_before(self, generation: int) -> tuple[str, ...]:
        """What was made anew on the way to the generation, since no copy was left: its versions are approximate."""
        return made_before(self.past, generation)

    @cached_property
    def readable(self) -> Mapping[int, tuple[RecoveryPoint, ...]]:
        """By version of the newest generation's past, each rank's way to it."""
        return self.readable_of(self.lineage())

    def readable_of(self, lineage: Lineage) -> Mapping[int, tuple[RecoveryPoint, ...]]:
        """The same of another past."""
        found: dict[int, tuple[RecoveryPoint, ...]] = {}
        for layout, era in lineage.eras:
            ranks = range(layout.world_size)
            ways = [Readable.of(copy.key for copy in self.copies.get(rank, ())).ways(era) for rank in ranks]
            for version in frozenset.intersection(*(frozenset(each) for each in ways)):
                found.setdefault(version, tuple(each[version] for each in ways))
        return found

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The versions that can be read, oldest first."""
        return spans_of(self.readable)

    def at(self, version: int | None = None, *, generation: int | None = None) -> Recoverable:
        """How all ranks come to ``version``, by default the newest. Errors: ``RecoveryError``."""
        ways = self.readable if generation is None else self.readable_of(self.lineage(generation))
        if not ways:
            raise RecoveryError(f"no version can be read of what lies in {self._places}: {self._why()}")
        chosen = max(ways) if version is None else version
        if chosen not in ways:
            raise RecoveryError(f"version {chosen} cannot be read; there are {spans_text(spans_of(ways))}")
        points = ways[chosen]
        plans = [plan(point, rank, self.copies[rank]) for rank, point in enumerate(points)]
        for each in plans:
            if isinstance(each, Unreachable):
                raise AssertionError(f"a way leads over {each}, which no tier has")
        return Recoverable(chosen, points, tuple(each for each in plans if isinstance(each, Plan)))

    # What is shown

    @cached_property
    def generations(self) -> tuple[Generation, ...]:
        """Oldest first."""
        lineage = self.lineage()
        by_generation: dict[int, list[Copy]] = defaultdict(list)
        for copies in self.copies.values():
            for copy in copies:
                by_generation[copy.key.generation].append(copy)
        limits = dict(lineage.chain)
        return tuple(
            Generation(
                number,
                self.branches.get(number),
                number in limits,
                limits.get(number),
                max(self.readable_of(self.lineage(number)), default=None) if number in lineage.kept else None,
                self._stored(number, by_generation.get(number, [])),
            )
            for number in sorted({*by_generation, *self.branches})
        )

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """What a recovery would refuse or do without, and what cannot be known."""
        said = [f"{tier.name} ({tier.url}) is not shown: {tier.away}" for tier in self.tiers if tier.away is not None]
        for tier in self.tiers:
            said += [f"{each.key} in {tier.name} is damaged: {each.reason}" for each in tier.set_aside]
            if tier.foreign:
                named = ", ".join(tier.foreign_named) + (", ..." if tier.foreign > len(tier.foreign_named) else "")
                said.append(f"{tier.foreign} objects in {tier.name} are not TierCheck's: {named}")
        if self.branches or any(self.copies.values()):
            try:
                refusals.check(self.past)
            except TierCheckError as error:
                said.append(str(error))
        return tuple(said)

    def _stored(self, number: int, copies: Sequence[Copy]) -> tuple[Stored, ...]:
        bases = sorted({copy.key.first for copy in copies if copy.key.stream is Stream.BASE})
        groups: dict[tuple[int, Stream, int], list[Copy]] = defaultdict(list)
        for copy in copies:
            key = copy.key
            if key.stream is Stream.DIFFERENTIAL:
                before = max((base for base in bases if base < key.first), default=-1)
                groups[before + 1, key.stream, 0].append(copy)
            else:
                groups[key.first, key.stream, key.last].append(copy)
        stored = []
        for (_, stream, _), held in sorted(groups.items()):
            first, last = min(copy.key.first for copy in held), max(copy.key.last for copy in held)
            by_tier = defaultdict(list)
            for copy in held:
                by_tier[copy.tier].append(copy.key)
            stored.append(
                Stored(stream, first, last, tuple(self._held(tier, by_tier[tier]) for tier in sorted(by_tier)))
            )
        return tuple(stored)

    def _held(self, tier: int, held: Sequence[ShardKey]) -> Held:
        contents = self.tiers[tier]
        versions: dict[int, set[int]] = defaultdict(set)
        for key in held:
            versions[key.rank].update(key.versions if key.stream is Stream.DIFFERENTIAL else [key.last])
        times = [info.written_s for key in held if (info := contents.objects[key]).written_s is not None]
        return Held(
            contents.name,
            tuple(sorted(versions)),
            spans_of(set.intersection(*versions.values())),
            sum(contents.objects[key].nbytes for key in held),
            held[0].stream in (Stream.BASE, Stream.SNAPSHOT) and CommitKey.of(held[0]) in contents.commits,
            max(filter(None, times), default=None),
        )

    @property
    def _places(self) -> str:
        return ", ".join(tier.url for tier in self.tiers)

    def _why(self) -> str:
        if self.problems:
            return self.problems[0]
        if not any(self.copies.values()):
            return "there is no shard of any rank"
        return "no base is there of every rank"
