"""What all ranks found together: the same value on every rank, so that all of them decide alike.

It is made of what each rank tells (:mod:`tiercheck.recovery.finding.told`), and takes one look at each rank. With which
pasts no job goes on says :mod:`tiercheck.recovery.finding.refusals`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.consensus import Reachable, admitted, common, meeting
from tiercheck.policy.recovery.lineage import Branch, Layout, Lineage, bearing, worth_telling
from tiercheck.policy.recovery.spans import Span, contain, joined, numbers_in
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.finding.told import Other, OwnedCopies, Told, packed_others, unpacked_others

__all__ = ["Past"]

AWAY_NAMED_MAX = 8


class Past:
    """``told``: by each rank, in rank order; ranks that tell the same share one value. ``others``: by rank, what
    :func:`packed_others` gives. ``lineages``: the branches that each digest stands for. ``tiers``: the hierarchy's
    roles. ``places``: where it is, in words. ``layout``: of this job, by default that of the newest generation.
    ``counts``: what counts of it, if a request says so. ``lost``: ranks that the others meet without."""

    def __init__(
        self,
        told: Sequence[Told],
        others: Sequence[bytes],
        lineages: Mapping[int, Iterable[Branch]],
        tiers: Sequence[Role],
        places: str,
        layout: Layout | None = None,
        counts: Lineage | None = None,
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.told = tuple(told)
        self.different = list({id(each): each for each in told}.values())
        self._meeting = list({id(each): each for rank, each in enumerate(told) if rank not in lost}.values())
        self._packed_others = others
        self._lineages = {digest: tuple(branches) for digest, branches in lineages.items()}
        self.tiers = tiers
        self.places = places
        self.layout = layout
        self._counts, self.lost = counts, lost

    @classmethod
    def of(cls, surveys: Sequence[Survey], tiers: Sequence[Role], places: str) -> Past:
        """As if each rank had told of its survey."""
        names = [tier.name for tier in tiers]
        lineages: dict[int, set[Branch]] = {}
        for survey in surveys:
            lineages.update(survey.lineages)
        told = [Told.of(survey, names, rank) for rank, survey in enumerate(surveys)]
        return cls(told, list(map(packed_others, surveys)), lineages, tiers, places)

    def after(self, later: Mapping[int, Told]) -> Past:
        """With what some ranks tell now."""
        return self._with([later.get(rank, each) for rank, each in enumerate(self.told)], self._counts, self.lost)

    def up_to(self, counts: Lineage) -> Past:
        """With this lineage instead of the newest."""
        return self._with(self.told, counts, self.lost)

    def without(self, lost: frozenset[int]) -> Past:
        """The other ranks meet without these."""
        return self._with(self.told, self._counts, lost)

    def _with(self, told: Sequence[Told], counts: Lineage | None, lost: frozenset[int]) -> Past:
        more = self._packed_others, self._lineages, self.tiers, self.places, self.layout
        return Past(told, *more, counts, lost)

    # What was found

    @cached_property
    def others(self) -> list[list[Other]]:
        """By rank, the newest shard of each other rank that it sees."""
        return list(map(unpacked_others, self._packed_others))

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        told = (branch for branches in self._lineages.values() for branch in branches)
        # A record of an older release retells a branch without what was made anew in it.
        return tuple(sorted({branch: branch for branch in sorted(told, key=lambda each: len(each.made))}.values()))

    @cached_property
    def lineage(self) -> Lineage:
        if self._counts is not None:
            return self._counts
        # A tier that is away may hold shards of any generation.
        return Lineage.of(self.branches) if self.away else self._bearing

    @cached_property
    def captured(self) -> tuple[set[int], ...]:
        """By tier, the generations of all shards that were found."""
        return tuple(numbers_in({each.captured[tier.index] for each in self.different}) for tier in self.tiers)

    @property
    def _captured_anywhere(self) -> set[int]:
        return set().union(*self.captured, numbers_in({each.other_nodes for each in self.different}))

    @cached_property
    def _bearing(self) -> Lineage:
        return Lineage.of(bearing(self.branches, self._captured_anywhere))

    def digests(self, branch: Branch) -> set[int]:
        """Of the lineages that tell of it."""
        return {digest for digest, branches in self._lineages.items() if branch in branches}

    def as_of(self, generation: int) -> Lineage:
        """The chain that ends in the generation, whatever came later. Empty if nobody tells of it."""
        told = [branch for branch in self.branches if branch.generation <= generation]
        return Lineage.of(told if told and told[-1].generation == generation else ())

    @property
    def stores(self) -> frozenset[str]:
        """URLs of tiers that all ranks share, of which some node's memory says that the job has saved there."""
        return frozenset(url for each in self.different for url in each.stores)

    @property
    def kept(self) -> tuple[int, ...]:
        """The generations that earlier requests have left behind, as far as anything of them may be left."""
        kept = self.lineage.kept
        return tuple(sorted(kept if self.away else kept & self._captured_anywhere))

    @property
    def newest_of(self) -> dict[int, int]:
        """By generation, the newest version that some rank can come to."""
        found: dict[int, int] = {}
        for each in self.different:
            for generation, spans in each.reach:
                found[generation] = max(spans[-1][1], found.get(generation, 0))
        return found

    def versions(self, lineage: Lineage | None = None) -> tuple[Span, ...]:
        """Those that every rank can come to, oldest first."""
        counts = self._own(self.lineage if lineage is None else lineage)
        return common((each.reach for each in self._meeting), counts)

    def may_convert(self, lineage: Lineage, version: int) -> bool:
        """Whether some rank has a way to the version in what was saved under another layout. Whether all ranks can come
        to it only a conversion tells."""
        own = {generation for generation, _ in self._own(lineage).chain}
        newest = self.newest_of
        return any(
            generation not in own and lineage.admits(generation, version) and newest.get(generation, -1) >= version
            for generation, _ in lineage.chain
        )

    def left(self, ranks: Iterable[Reachable] | None = None) -> tuple[Span, ...]:
        """The versions that count, and that the ranks can come to. If they were saved under several layouts: that some
        rank has its own part of. ``ranks``: what each can reach, by default by all of its tiers."""
        reaches = [each.reach for each in self.different] if ranks is None else list(ranks)
        if len(self.eras) < 2:
            return common(reaches, self.lineage)
        return joined(span for reach in set(reaches) for span in admitted(reach, self.lineage))

    @property
    def only_begun(self) -> bool:
        """Whether the newest generation began at version 0, and nothing was trained in it."""
        newest = self.lineage.branches.get(self.lineage.newest)
        if newest is None or newest.parent or newest.left_at or newest != self.branches[-1]:
            return False
        return max(each.newest_trained for each in self.different) == (newest.generation, 0)

    def worth_telling(self, parent: int) -> list[Branch]:
        """What the record of a generation with this parent tells of the past. Of a tier that is away nobody knows what
        it holds, so that all is told then."""
        if self.away:
            return list(self.branches)
        return worth_telling(self.branches, parent, self._captured_anywhere, len(self.told))

    @cached_property
    def own_lineage(self) -> Lineage:
        """What of it each rank can read as its own."""
        return self._own(self.lineage)

    def _own(self, lineage: Lineage) -> Lineage:
        return lineage.readable if self.layout is None else lineage.under(self.layout)

    @property
    def eras(self) -> tuple[tuple[Layout, Lineage], ...]:
        """Those of the lineage, from the newest on; and this job's, if nothing was saved under its layout."""
        found, own = self.lineage.eras, self.layout
        return found if own is None or any(own.is_like(each) for each, _ in found) else (*found, (own, Lineage(())))

    @property
    def taken(self) -> int:
        """The highest number that any generation has, had, or was to have."""
        return max((each.taken for each in self.different), default=0)

    @property
    def begun(self) -> bool:
        """Whether anything tells of a past."""
        return any(any(each.captured) or any(each.recorded) or each.other_nodes for each in self.different)

    @cached_property
    def away(self) -> list[tuple[int, str, str]]:
        """Tiers that could not be asked: (rank, tier, error)."""
        if not any(each.away for each in self.different):
            return []
        found = ((rank, tier, error) for rank, each in enumerate(self.told) for tier, error in each.away)
        return [(rank, self.tiers[tier].name, error) for rank, tier, error in found]

    @property
    def unsure(self) -> set[int]:
        """The ranks that could not look into a tier inside a node."""
        inside = {tier.index for tier in self.tiers if not tier.shared}
        return {rank for rank, each in enumerate(self.told) if inside.intersection(tier for tier, _ in each.away)}

    @property
    def owned(self) -> OwnedCopies:
        return OwnedCopies(self.told)

    @property
    def is_scattered(self) -> bool:
        """Whether some rank has shards in memory that is none of its tiers: other ranks see them in theirs."""
        return any(each.other_nodes for each in self.different)

    @property
    def asks_other_nodes(self) -> bool:
        """Whether other nodes' memory may lead further, or be nearer. Not so if every rank has its way to the newest
        version in its own node's memory, and sees what others see of it, and something of the newest generation was
        found."""
        eras, own, version = self.lineage.eras, self.layout, self.version()
        changed = bool(eras) and own is not None and not own.is_like(eras[0][0])
        missing = bool(self.branches) and self.branches[-1].generation not in self._captured_anywhere
        return changed or missing or not self.in_memory(version) or self._is_newer_seen_by_others(version or 0)

    def _is_newer_seen_by_others(self, version: int) -> bool:
        """Whether some rank sees something newer of another one that has another memory now, or none."""
        if not any(each.others_last > version for each in self.different):
            return False
        return any(
            last > version and Copy(tier, ShardKey.base(generation, last, rank)) not in self.owned
            for others in self.others
            for tier, rank, generation, last in others
        )

    # Where the ranks can meet

    def version(self) -> int | None:
        """The newest version that every rank can come to; ``None`` if there is none."""
        return self._version(self.lineage)

    def _version(self, lineage: Lineage) -> int | None:
        return meeting((each.reach for each in self._meeting), self._own(lineage))

    def version_of_whole_copies(self) -> int | None:
        """The newest version that every rank could come to if this job could use all copies that are whole."""
        return meeting((each.whole or each.reach for each in self._meeting), self.own_lineage)

    def generation(self, version: int) -> int:
        """The newest generation by whose shards some rank can come to the version."""
        return max(
            (
                generation
                for reach in {each.reach for each in self.different}
                for generation, spans in reach
                if contain(spans, version) and self.own_lineage.admits(generation, version)
            ),
            default=0,
        )

    def _is_cut_short(self, version: int) -> bool:
        """Whether a generation of which nothing was found keeps the ranks from a newer version. What it captured may
        lie in a tier that is away; if it captured nothing, it cuts nothing off."""
        further = self._version(self._bearing) if self.away else None
        return further is not None and further > version

    def in_memory(self, version: int | None) -> bool:
        """Whether each rank can come to the version by the tier that captures land in: that holds all that it ever
        captured, so that no other tier has anything newer of it."""
        if version is None or self.lost or self._is_cut_short(version):
            return False
        reaches = {each.in_first for each in self.different}
        return all(contain(admitted(reach, self.own_lineage), version) for reach in reaches)

    def covers(self, version: int | None) -> bool:
        """Whether no tier that is away can hold a committed base that is newer than the version. A committed base was
        captured by every rank, and tiers inside a node keep the newest ones."""
        if version is None or self._is_cut_short(version):
            return False
        newest = max((each.newest for each in self.different), default=0)
        bases = max((each.newest_base for each in self.different if each.newest == newest), default=0)
        in_memory = any(contain(each.own[0], newest) for each in self.different)
        return in_memory and self.generation(version) == newest and version >= max(bases, 0)

    @property
    def orphaned(self) -> int | None:
        """A generation newer than any whose record can be read, of which there are shards. Its record was written
        before them and stays; without it something older would be recovered."""
        newest = max(self._captured_anywhere, default=0)
        return newest if newest > self.lineage.newest else None

    @cached_property
    def seen_by_others(self) -> set[int]:
        """Of which another rank sees something that was trained."""
        return {rank for others in self.others for _, rank, _, last in others if last > 0}

    @property
    def trained_to(self) -> int:
        """The newest version of any shard that tells of a past."""
        return max((max(each.others_last, *each.last, 0) for each in self.different), default=0)

    @property
    def committed_to(self) -> int:
        """The newest version of the job's own past that was whole in a tier that all ranks share, by a commit record;
        0 if there is none. Also of a generation of which no shard is left."""
        lineage = Lineage.of(self.branches)
        return max((spans[-1][1] for each in self.different if (spans := admitted(each.committed, lineage))), default=0)

    @property
    def done_without(self) -> tuple[str, ...]:
        """What tiers were done without."""
        away = self.away
        notes = [
            f"tier {tier} of rank {rank} could not be asked what it holds ({error}): the recovery needed nothing of "
            "it, and what is captured from here on is brought there when it answers"
            for rank, tier, error in away[:AWAY_NAMED_MAX]
        ]
        more = [f"so it is with {len(away) - len(notes)} more tiers of other ranks"] if len(away) > len(notes) else []
        return (*notes, *more)
