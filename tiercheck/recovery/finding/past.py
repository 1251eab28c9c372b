"""What all ranks found together: the same value on every rank, so that all of them decide alike.

It is made of what each rank tells (:mod:`tiercheck.recovery.finding.told`), and takes one look at each rank. Evidence
of a past is never read as a new job. Where versions were saved and no rank can come to one that all reach, the job is
refused, naming what was found where; so it is where two histories were put together, where a tier cannot be asked that
may hold something newer than the others, and where copies that are whole are of another form than this job's state.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from tiercheck.errors import Mismatch, RecoveryError
from tiercheck.keys import LineageKey, ShardKey
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.consensus import Reachable, admitted, common, meeting
from tiercheck.policy.recovery.lineage import Branch, Layout, Lineage, bearing, strangers, worth_telling
from tiercheck.policy.recovery.spans import Span, contain, joined, numbers_in
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.finding.told import Other, OwnedCopies, Told, packed_others, unpacked_others

__all__ = ["Past"]

log = logging.getLogger(__name__)

NAMED_MAX = 3
"""Objects that an error names."""
RANKS_NAMED_MAX = 16
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
        self._different = list({id(each): each for each in told}.values())
        self._meeting = list({id(each): each for rank, each in enumerate(told) if rank not in lost}.values())
        self._packed_others = others
        self._lineages = {digest: tuple(branches) for digest, branches in lineages.items()}
        self._tiers = tiers
        self._places = places
        self._layout = layout
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
        more = self._packed_others, self._lineages, self._tiers, self._places, self._layout
        return Past(told, *more, counts, lost)

    # What was found

    @cached_property
    def _others(self) -> list[list[Other]]:
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
    def _captured(self) -> tuple[set[int], ...]:
        """By tier, the generations of all shards that were found."""
        return tuple(numbers_in({each.captured[tier.index] for each in self._different}) for tier in self._tiers)

    @property
    def _captured_anywhere(self) -> set[int]:
        return set().union(*self._captured, numbers_in({each.other_nodes for each in self._different}))

    @cached_property
    def _bearing(self) -> Lineage:
        return Lineage.of(bearing(self.branches, self._captured_anywhere))

    def as_of(self, generation: int) -> Lineage:
        """The chain that ends in the generation, whatever came later. Empty if nobody tells of it."""
        told = [branch for branch in self.branches if branch.generation <= generation]
        return Lineage.of(told if told and told[-1].generation == generation else ())

    @property
    def stores(self) -> frozenset[str]:
        """URLs of tiers that all ranks share, of which some node's memory says that the job has saved there."""
        return frozenset(url for each in self._different for url in each.stores)

    @property
    def kept(self) -> tuple[int, ...]:
        """The generations that earlier requests have left behind, as far as anything of them may be left."""
        kept = self.lineage.kept
        return tuple(sorted(kept if self.away else kept & self._captured_anywhere))

    @property
    def newest_of(self) -> dict[int, int]:
        """By generation, the newest version that some rank can come to."""
        found: dict[int, int] = {}
        for each in self._different:
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
        reaches = [each.reach for each in self._different] if ranks is None else list(ranks)
        if len(self.eras) < 2:
            return common(reaches, self.lineage)
        return joined(span for reach in set(reaches) for span in admitted(reach, self.lineage))

    @property
    def only_begun(self) -> bool:
        """Whether the newest generation began at version 0, and nothing was trained in it."""
        newest = self.lineage.branches.get(self.lineage.newest)
        if newest is None or newest.parent or newest.left_at or newest != self.branches[-1]:
            return False
        return max(each.newest_trained for each in self._different) == (newest.generation, 0)

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
        return lineage.readable if self._layout is None else lineage.under(self._layout)

    @property
    def eras(self) -> tuple[tuple[Layout, Lineage], ...]:
        """Those of the lineage, from the newest on; and this job's, if nothing was saved under its layout."""
        found, own = self.lineage.eras, self._layout
        return found if own is None or any(own.is_like(each) for each, _ in found) else (*found, (own, Lineage(())))

    @property
    def taken(self) -> int:
        """The highest number that any generation has, had, or was to have."""
        return max((each.taken for each in self._different), default=0)

    @property
    def begun(self) -> bool:
        """Whether anything tells of a past."""
        return any(any(each.captured) or any(each.recorded) or each.other_nodes for each in self._different)

    @cached_property
    def away(self) -> list[tuple[int, str, str]]:
        """Tiers that could not be asked: (rank, tier, error)."""
        if not any(each.away for each in self._different):
            return []
        found = ((rank, tier, error) for rank, each in enumerate(self.told) for tier, error in each.away)
        return [(rank, self._tiers[tier].name, error) for rank, tier, error in found]

    @property
    def unsure(self) -> set[int]:
        """The ranks that could not look into a tier inside a node."""
        inside = {tier.index for tier in self._tiers if not tier.shared}
        return {rank for rank, each in enumerate(self.told) if inside.intersection(tier for tier, _ in each.away)}

    @property
    def owned(self) -> OwnedCopies:
        return OwnedCopies(self.told)

    @property
    def is_scattered(self) -> bool:
        """Whether some rank has shards in memory that is none of its tiers: other ranks see them in theirs."""
        return any(each.other_nodes for each in self._different)

    @property
    def asks_other_nodes(self) -> bool:
        """Whether other nodes' memory may lead further, or be nearer. Not so if every rank has its way to the newest
        version in its own node's memory, and sees what others see of it, and something of the newest generation was
        found."""
        eras, own, version = self.lineage.eras, self._layout, self.version()
        changed = bool(eras) and own is not None and not own.is_like(eras[0][0])
        missing = bool(self.branches) and self.branches[-1].generation not in self._captured_anywhere
        return changed or missing or not self.in_memory(version) or self._is_newer_seen_by_others(version or 0)

    def _is_newer_seen_by_others(self, version: int) -> bool:
        """Whether some rank sees something newer of another one that has another memory now, or none."""
        if not any(each.others_last > version for each in self._different):
            return False
        return any(
            last > version and Copy(tier, ShardKey.base(generation, last, rank)) not in self.owned
            for others in self._others
            for tier, rank, generation, last in others
        )

    # Where the ranks can meet

    def version(self) -> int | None:
        """The newest version that every rank can come to; ``None`` if there is none."""
        return self._version(self.lineage)

    def _version(self, lineage: Lineage) -> int | None:
        return meeting((each.reach for each in self._meeting), self._own(lineage))

    def generation(self, version: int) -> int:
        """The newest generation by whose shards some rank can come to the version."""
        return max(
            (
                generation
                for reach in {each.reach for each in self._different}
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
        reaches = {each.in_first for each in self._different}
        return all(contain(admitted(reach, self.own_lineage), version) for reach in reaches)

    def covers(self, version: int | None) -> bool:
        """Whether no tier that is away can hold a committed base that is newer than the version. A committed base was
        captured by every rank, and tiers inside a node keep the newest ones."""
        if version is None or self._is_cut_short(version):
            return False
        newest = max((each.newest for each in self._different), default=0)
        bases = max((each.newest_base for each in self._different if each.newest == newest), default=0)
        in_memory = any(contain(each.own[0], newest) for each in self._different)
        return in_memory and self.generation(version) == newest and version >= max(bases, 0)

    # What is refused

    def check(self) -> None:
        """Errors: ``RecoveryError`` for two histories, and for versions whose lineage is lost."""
        self._check_numbers()
        if (newest := self.orphaned) is not None:
            raise RecoveryError(
                f"there are versions of generation {newest}, but its record {LineageKey(newest)} is missing or damaged "
                f"in every tier ({self._places}): bring back a tier that holds it, or remove the objects "
                f"{LineageKey(newest)} and r*/g{newest:06d}/* to go back to an older version"
            )
        self._check_strangers()
        self._check_places()

    @property
    def orphaned(self) -> int | None:
        """A generation newer than any whose record can be read, of which there are shards. Its record was written
        before them and stays; without it something older would be recovered."""
        newest = max(self._captured_anywhere, default=0)
        return newest if newest > self.lineage.newest else None

    def _check_numbers(self) -> None:
        """Two jobs have opened generations of one number."""
        by_generation: dict[int, list[Branch]] = defaultdict(list)
        for branch in self.branches:
            by_generation[branch.generation].append(branch)
        for generation, rivals in sorted(by_generation.items()):
            if len(rivals) > 1:
                said = "; ".join(f"{branch.token} in {self._told_by(branch)}" for branch in rivals)
                raise RecoveryError(
                    f"two jobs have each opened a generation {generation} here, and their versions must not be mixed "
                    f"({said}). To go on with one of them remove all objects of the other from its tiers; or give this "
                    f"job a place of its own"
                )

    def _told_by(self, branch: Branch) -> str:
        digests = {digest for digest, branches in self._lineages.items() if branch in branches}
        places = [
            self._place(tier, rank)
            for rank, each in enumerate(self.told)
            for tier, digest in enumerate(each.lineages)
            if digest in digests
        ]
        return first_of(list(dict.fromkeys(places)), ", ")

    def _check_strangers(self) -> None:
        """A tier that all ranks share went on under another job while this one's memory stood still, or the other way
        round."""
        for tier in (tier for tier in self._tiers if tier.shared):
            for recorded in {each.recorded[tier.index] for each in self._different}:
                if others := strangers(self.lineage, numbers_in([recorded]), self._captured[tier.index]):
                    there, newest, name = others[-1], self.lineage.newest, tier.name
                    raise RecoveryError(
                        f"{name} holds versions of generation {there}, and the newest generation in the other tiers is "
                        f"{newest}, which does not come from it: the job was started without that tier, and went on "
                        f"from an older version. To go on from generation {there} remove {LineageKey(newest)} and "
                        f"r*/g{newest:06d}/* from the other tiers; to go on from generation {newest} remove "
                        f"{LineageKey(there)} and r*/g{there:06d}/* from {name}"
                    )

    def check_form(self, version: int | None) -> None:
        """Errors: ``Mismatch`` if whole copies that this job cannot use lead to a newer version than ``version``."""
        if not any(each.unusable for each in self._different):
            return
        whole = meeting((each.whole or each.reach for each in self._meeting), self.own_lineage)
        if whole is None or (version is not None and version >= whole):
            return
        found: dict[str, list[str]] = defaultdict(list)
        for each in self.told:
            for why, copy in each.unusable:
                found[why].append(copy)
        said = [f"{why} ({first_of(places, ', ')})" for why, places in found.items()]
        raise Mismatch(
            f"version {whole} was saved whole, and this job cannot use it: {first_of(said, '; ')}. The tiers "
            "are as they were: resume with the model, the optimizer, the stateful= and the codecs that it was saved "
            "with; use another place; or remove these objects to go back without them"
        )

    def _check_places(self) -> None:
        """Without a shared tier, ranks that come back on each other's nodes may still meet somewhere, by what their new
        neighbours kept: at something older than what lies in sight of all of them together."""
        reached = self.version()
        if reached is None or any(tier.shared for tier in self._tiers):
            return  # check_nothing_is_lost(); what all ranks share serves ranks on any node
        if not any(each.others_last > reached for each in self._different):
            return
        reaches = {id(each): admitted(each.reach, self.own_lineage)[-1][1] for each in self._different}
        apart, newest = False, [reaches[id(each)] for each in self.told]
        for others in self._others:
            for tier, rank, generation, last in others:
                if rank < len(newest) and last > 0:
                    # Of its own place an owner knows more than others see.
                    apart |= last > reached and not contain(self.told[rank].own[tier], generation)
                    if self.own_lineage.admits(generation, last):
                        newest[rank] = max(newest[rank], last)
        if apart and min(newest) > reached:
            raise RecoveryError(
                f"versions up to {min(newest)} of every rank were found, but where the ranks are now they can "
                f"all come to version {reached} only ({'; '.join(self._evidence())}): start the ranks on the nodes "
                f"where they were; have the agents there answer, so that it is read from them; or remove what is "
                f"newer from {self._places} to go on from version {reached}"
            )

    def check_nothing_is_lost(
        self, *, restart: bool, failed: Sequence[str] = (), lacking: str = "", advice: str = ""
    ) -> None:
        """The ranks cannot meet anywhere. That is fine if nothing was trained yet; else the user must say so.
        ``failed``: this rank's copies that cannot be used, and why, for the message; ``lacking``: what else tells of a
        past; ``advice``: what else the user may do.

        Errors: ``RecoveryError`` naming what was found where; with ``restart`` only if it may come back.
        """
        evidence = [*self._evidence(), *([lacking] if lacking else [])]
        if not evidence or (self.only_begun and not lacking):
            if self.lineage.newest:
                log.warning(
                    "generation %d was opened here, and nothing that was trained in it is left: this job begins at "
                    "version 0",
                    self.lineage.newest,
                )
            return
        newest = max([self._trained_to, *(branch.left_at for branch in self.branches)])
        found = "; ".join(evidence)
        what = f"versions up to {newest} were saved, but there is no base that every rank can read ({found})"
        if failed:
            what += f"; {len(failed)} copies of this rank's cannot be used, the first of them {failed[0]}"
        whole = self.seen_by_others | {rank for rank, each in enumerate(self.told) if each.sound > 0}
        if self.seen_by_others and whole == set(range(len(self.told))):
            raise RecoveryError(
                f"{what}. Every rank's versions were found, some of them on other ranks' nodes: start the ranks on the "
                "nodes where they were; have the agents there answer, so that it is read from them; or remove what is "
                f"left in {self._places} to begin at version 0"
            )
        if restart:
            log.error("%s. They are given up, and training begins anew at version 0 (on_nothing_left='restart')", what)
            return
        raise RecoveryError(
            f"{what}. Bring the missing tier back, or remove what is left in {self._places} to begin at version 0 "
            f'(CheckpointConfig(on_nothing_left="restart") does so by itself){advice}'
        )

    @cached_property
    def seen_by_others(self) -> set[int]:
        """Of which another rank sees something that was trained."""
        return {rank for others in self._others for _, rank, _, last in others if last > 0}

    @property
    def _trained_to(self) -> int:
        """The newest version of any shard that tells of a past."""
        return max((max(each.others_last, *each.last, 0) for each in self._different), default=0)

    def _evidence(self) -> list[str]:
        """What says that there were versions, for people."""
        said: list[str] = []
        for rank, told in enumerate(self.told if self._trained_to > 0 else ()):
            if rank == RANKS_NAMED_MAX:
                said.append("...")
                break
            own = [self._tiers[tier].name for tier, last in enumerate(told.last) if last >= 0]
            parts = [", ".join(sorted(own))] if own else []
            parts += [
                f"rank {of}'s up to {last} in {self._tiers[tier].name}"
                for tier, of, _, last in self._others[rank][:RANKS_NAMED_MAX]
                if last > 0
            ]
            said.append(f"rank {rank}: {', and '.join(parts) or 'nothing'}")
        left = [branch for branch in self.branches if branch.left_at > 0]
        if left:
            newest = left[-1]
            said.append(f"generation {newest.generation} left generation {newest.parent} at version {newest.left_at}")
        return said

    def _place(self, tier: int, rank: int) -> str:
        if tier >= len(self._tiers):
            return f"the memory of other nodes that rank {rank} has looked into"
        name = self._tiers[tier].name
        return name if self._tiers[tier].shared else f"{name} of rank {rank}"

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

    def cannot_ask(self, version: int | None) -> RecoveryError:
        """The error for tiers that are away and may hold something newer. ``version``: to which all ranks can come,
        each by its own shards."""
        said = [f"rank {rank}, tier {tier}: {error}" for rank, tier, error in self.away]
        reached = f"version {version} is the newest that was found"
        if version is None:
            reached = f"up to version {self._trained_to} was found" if self._trained_to > 0 else "nothing was found"
            if others := {
                str(each.world_size) for each, _ in self.eras if self._layout and not each.is_like(self._layout)
            }:
                reached += f", saved by {' and '.join(sorted(others))} ranks under another layout"
        return RecoveryError(
            f"a tier could not be asked what it holds ({first_of(said, '; ')}), and in the others {reached}: it may "
            "hold something newer, so that nothing is restored. Start again when it answers; correct its address; or "
            "leave it out of the hierarchy to go on without what it holds"
        )


def first_of(said: Sequence[str], separator: str) -> str:
    return separator.join([*said[:NAMED_MAX], *(["..."] if len(said) > NAMED_MAX else [])])
