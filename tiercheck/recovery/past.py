"""What all ranks found together: the same value on every rank, so that all of them decide alike.

Evidence of a past is never read as a new job. Where versions were saved and no rank can come to one that all reach, the
job is refused, naming what was found where; so it is where two histories were put together, where a tier cannot be
asked that may hold something newer than the others, and where copies that are whole are of another form than this job's
state.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from tiercheck.errors import Mismatch, RecoveryError
from tiercheck.keys import LineageKey, Stream
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint, decide
from tiercheck.policy.recovery.lineage import Branch, Lineage, bearing, strangers, worth_telling
from tiercheck.policy.recovery.plan import Availability, Plan, availability, plan
from tiercheck.recovery.survey import Survey

__all__ = ["Past", "Points"]

log = logging.getLogger(__name__)

NAMED_MAX = 3
"""Objects that an error names."""

Points = tuple[RecoveryPoint, ...]
"""Each rank's way to the version at which they meet."""


class Past:
    """``surveys``: of each rank, in rank order. ``tiers``: the hierarchy's roles. ``places``: where it is, in words."""

    def __init__(self, surveys: Sequence[Survey], tiers: Sequence[Role], places: str) -> None:
        self.surveys = list(surveys)
        self._damaged: list[set[Copy]] = [set() for _ in surveys]
        """By rank, copies that are none, and that all the same tell of a past."""
        self._tiers = tiers
        self._places = places
        self._unusable: dict[int, dict[Copy, str]] = {}
        """By rank, its copies that are whole, and that this job cannot use; and why."""

    # What was found

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(sorted({branch for survey in self.surveys for _, branch in survey.branches}))

    @cached_property
    def lineage(self) -> Lineage:
        # A tier that is away may hold shards of any generation.
        return Lineage.of(self.branches) if self.away else self._bearing

    @property
    def _captured(self) -> set[int]:
        """The generations of all shards that were found."""
        return {generation for survey in self.surveys for _, generation in survey.generations}

    @property
    def _bearing(self) -> Lineage:
        return Lineage.of(bearing(self.branches, self._captured))

    def worth_telling(self, parent: int) -> list[Branch]:
        """What the record of a generation with this parent tells of the past. Of a tier that is away nobody knows what
        it holds, so that all is told then."""
        if self.away:
            return list(self.branches)
        return worth_telling(self.branches, parent, self._captured)

    @property
    def taken(self) -> int:
        """The highest number that any generation has, had, or was to have."""
        return max((survey.taken for survey in self.surveys), default=0)

    @property
    def away(self) -> list[tuple[int, str, str]]:
        """Tiers that could not be asked: (rank, tier, error)."""
        return [
            (rank, self._tiers[tier].name, error)
            for rank, survey in enumerate(self.surveys)
            for tier, error in survey.away
        ]

    def joined(self, later: Sequence[Survey]) -> Past:
        """With what each rank found when it looked again into the tiers that had been away."""
        surveys = [before.joined(after) for before, after in zip(self.surveys, later, strict=True)]
        past = Past(surveys, self._tiers, self._places)
        past._unusable = self._unusable
        past._damaged = self._damaged
        return past

    def forget(self, rank: int, failed: Collection[Copy], unusable: Mapping[Copy, str]) -> None:
        """These copies of a rank's shards are none. ``unusable``: those of them that are whole, and why the job cannot
        use them."""
        survey = self.surveys[rank]
        self.surveys[rank] = replace(survey, sources=survey.sources - set(failed))
        self._unusable.setdefault(rank, {}).update(unusable)
        self._damaged[rank] |= set(failed)

    # Where the ranks can meet

    def points(self) -> Points | None:
        return self._points(self.lineage)

    def _points(self, lineage: Lineage) -> Points | None:
        return decide([Readable.of(s.key for s in survey.sources) for survey in self.surveys], lineage)

    def _is_cut_short(self, points: Points) -> bool:
        """Whether a generation of which nothing was found keeps the ranks from a newer version. What it captured may
        lie in a tier that is away; if it captured nothing, it cuts nothing off."""
        further = self._points(self._bearing) if self.away else None
        return further is not None and further[0].last > points[0].last

    def matrix(self, points: Points) -> tuple[Availability, ...]:
        return availability(points, [tier.name for tier in self._tiers], [survey.sources for survey in self.surveys])

    def in_memory(self, points: Points | None) -> bool:
        """Whether each rank has its whole way to the point in the tier that captures land in: that holds all that it
        ever captured, so that no other tier has anything newer of it."""
        if points is None or self._is_cut_short(points):
            return False
        return all(
            isinstance(plan(point, rank, [s for s in survey.sources if s.tier == 0]), Plan)
            for rank, (point, survey) in enumerate(zip(points, self.surveys, strict=True))
        )

    def covers(self, points: Points | None) -> bool:
        """Whether no tier that is away can hold a committed base that is newer than the point. A committed base was
        captured by every rank, and tiers inside a node keep the newest ones."""
        if points is None or self._is_cut_short(points):
            return False
        held = [source.key for survey in self.surveys for source in survey.sources | survey.others]
        newest = max((key.generation for key in held), default=0)
        bases = [
            key.first - (key.stream is Stream.SNAPSHOT)  # the base that it was made for
            for key in held
            if key.stream is not Stream.DIFFERENTIAL and key.generation == newest
        ]
        in_memory = any(
            source.tier == 0 and source.key.generation == newest for survey in self.surveys for source in survey.sources
        )
        generation = max(point.generation for point in points)
        return in_memory and generation == newest and points[0].last >= max(bases, default=0)

    # What is refused

    def check(self, world_size: int) -> None:
        """Errors: ``RecoveryError`` for two histories, and for versions whose lineage is lost; ``Mismatch`` for those
        of another world size."""
        self._check_numbers()
        if (newest := self.orphaned) is not None:
            raise RecoveryError(
                f"there are versions of generation {newest}, but its record {LineageKey(newest)} is missing or damaged "
                f"in every tier ({self._places}): bring back a tier that holds it, or remove the objects "
                f"{LineageKey(newest)} and r*/g{newest:06d}/* to go back to an older version"
            )
        self._check_strangers()
        self._check_places()
        last = self.lineage.branches.get(self.lineage.newest)
        if last is not None and last.world_size != world_size:
            raise Mismatch(
                f"the checkpoint in {self._places} is of {last.world_size} ranks, this job has "
                f"{world_size}: resume with {last.world_size} ranks, or use another place"
            )

    @property
    def orphaned(self) -> int | None:
        """A generation newer than any whose record can be read, of which there are shards. Its record was written
        before them and stays; without it something older would be recovered."""
        newest = max((generation for survey in self.surveys for _, generation in survey.generations), default=0)
        return newest if newest > self.lineage.newest else None

    def _check_numbers(self) -> None:
        """Two jobs have opened generations of one number."""
        found: dict[int, dict[Branch, list[str]]] = defaultdict(lambda: defaultdict(list))
        for rank, survey in enumerate(self.surveys):
            for tier, branch in sorted(survey.branches):
                found[branch.generation][branch].append(self._place(tier, rank))
        for generation, rivals in sorted(found.items()):
            if len(rivals) > 1:
                said = "; ".join(f"{branch.token} in {', '.join(places)}" for branch, places in sorted(rivals.items()))
                raise RecoveryError(
                    f"two jobs have each opened a generation {generation} here, and their versions must not be mixed "
                    f"({said}). To go on with one of them remove all objects of the other from its tiers; or give this "
                    f"job a place of its own"
                )

    def _check_strangers(self) -> None:
        """A tier that all ranks share went on under another job while this one's memory stood still, or the other way
        round."""
        for rank, survey in enumerate(self.surveys):
            for tier in {tier for tier, _ in survey.recorded if self._tiers[tier].shared}:
                recorded = {generation for where, generation in survey.recorded if where == tier}
                captured = {
                    generation for each in self.surveys for where, generation in each.generations if where == tier
                }
                if others := strangers(self.lineage, recorded, captured):
                    there, elsewhere, name = others[-1], self.lineage.newest, self._place(tier, rank)
                    raise RecoveryError(
                        f"{name} holds versions of generation {there}, and the newest generation elsewhere is "
                        f"{elsewhere}, which does not come from it: the job was started without that tier, and went on "
                        f"from an older version. To go on from generation {there} remove {LineageKey(elsewhere)} and "
                        f"r*/g{elsewhere:06d}/* from the other tiers; to go on from generation {elsewhere} remove "
                        f"{LineageKey(there)} and r*/g{there:06d}/* from {name}"
                    )

    def check_form(self, points: Points | None) -> None:
        """Errors: ``Mismatch`` if whole copies that this job cannot use lead to a newer version than ``points``."""
        if not any(self._unusable.values()):
            return
        sources = [survey.sources | self._unusable.get(rank, {}).keys() for rank, survey in enumerate(self.surveys)]
        whole = decide([Readable.of(source.key for source in each) for each in sources], self.lineage)
        if whole is None or (points is not None and points[0].last >= whole[0].last):
            return
        found: dict[str, list[str]] = defaultdict(list)
        for rank, unusable in sorted(self._unusable.items()):
            for source, why in sorted(unusable.items()):
                found[why].append(f"rank {rank}, tier {self._tiers[source.tier].name}: {source.key}")
        said = [f"{why} ({first_of(places, ', ')})" for why, places in found.items()]
        raise Mismatch(
            f"version {whole[0].last} was saved whole, and this job cannot use it: {first_of(said, '; ')}. The tiers "
            "are as they were: resume with the model, the optimizer, the stateful= and the codecs that it was saved "
            "with; use another place; or remove these objects to go back without them"
        )

    def _check_places(self) -> None:
        """Without a shared tier, ranks that come back on each other's nodes may still meet somewhere, by what their new
        neighbours kept: at something older than what lies in sight of all of them together."""
        points = self.points()
        if points is None or any(tier.shared for tier in self._tiers):
            return  # check_nothing_is_lost(); what all ranks share serves ranks on any node
        reached, newest = points[0].last, [-1] * len(self.surveys)
        for _, source in self._seen():
            key = source.key
            if key.rank < len(newest) and self.lineage.admits(key.generation, key.last):
                newest[key.rank] = max(newest[key.rank], key.last)
        own = [{source.key for source in survey.sources} for survey in self.surveys]
        apart = any(
            source.key.last > reached and source.key not in own[source.key.rank]
            for _, source in self._seen()
            if source.key.rank < len(own)
        )
        if apart and min(newest) > reached:
            raise RecoveryError(
                f"versions up to {min(newest)} of every rank were found, but where the ranks are now they can "
                f"all come to version {reached} only ({'; '.join(self._evidence())}): start the ranks on the nodes "
                f"where they were, or remove what is newer from {self._places} to go on from version {reached}"
            )

    def check_nothing_is_lost(self, *, restart: bool, failed: Sequence[str] = ()) -> None:
        """The ranks cannot meet anywhere. That is fine if nothing was trained yet; else the user must say so.
        ``failed``: this rank's copies that cannot be used, and why, for the message.

        Errors: ``RecoveryError`` naming what was found where; with ``restart`` only if it may come back.
        """
        evidence = self._evidence()
        if not evidence:
            if self.lineage.newest:
                log.warning(
                    "generation %d was opened here, and nothing that it captured is left: this job begins at version 0",
                    self.lineage.newest,
                )
            return
        newest = max((source.key.last for source in self._trained()), default=0)
        newest = max([newest, *(branch.left_at for branch in self.branches)])
        found = "; ".join(evidence)
        what = f"versions up to {newest} were saved, but there is no base that every rank can read ({found})"
        if failed:
            what += f"; {len(failed)} copies of this rank's cannot be used, the first of them {failed[0]}"
        sound = [source for survey in self.surveys for source in survey.sources | survey.others]
        whole = {source.key.rank for source in sound if source.key.last > 0} == set(range(len(self.surveys)))
        if whole and any(source.key.rank != rank for rank, source in self._seen()):
            raise RecoveryError(
                f"{what}. Every rank's versions were found, some of them on other ranks' nodes: start the ranks on the "
                f"nodes where they were, or remove what is left in {self._places} to begin at version 0"
            )
        if restart:
            log.error("%s. They are given up, and training begins anew at version 0 (on_nothing_left='restart')", what)
            return
        raise RecoveryError(
            f"{what}. Bring the missing tier back, or remove what is left in {self._places} to begin at version 0 "
            '(CheckpointConfig(on_nothing_left="restart") does so by itself)'
        )

    def _seen(self) -> list[tuple[int, Copy]]:
        """Versions after the first: (the rank that found it, the copy). Of what all ranks share only their own."""
        return [
            (rank, source)
            for rank, survey in enumerate(self.surveys)
            for source in survey.sources | {other for other in survey.others if not self._tiers[other.tier].shared}
            if source.key.last > 0
        ]

    def _trained(self) -> list[Copy]:
        found = [source for rank in range(len(self.surveys)) for source in self._told(rank)]
        return [source for source in found if source.key.last > 0]

    def _told(self, rank: int) -> Collection[Copy]:
        """Every copy that tells the rank of a past."""
        survey = self.surveys[rank]
        return survey.sources | survey.others | self._damaged[rank]

    def _evidence(self) -> list[str]:
        """What says that there were versions, for people."""
        said: list[str] = []
        for rank, survey in enumerate(self.surveys):
            held: dict[tuple[int, int], int] = {}
            for source in self._told(rank):
                if source.key.last > 0:
                    place = (source.tier, source.key.rank)
                    held[place] = max(held.get(place, 0), source.key.last)
            own = sorted({self._tiers[source.tier].name for source in survey.sources | self._damaged[rank]})
            parts = [", ".join(own)] if own else []
            parts += [
                f"rank {of}'s up to {last} in {self._tiers[tier].name}"
                for (tier, of), last in sorted(held.items())
                if of != rank
            ]
            said.append(f"rank {rank}: {', and '.join(parts) or 'nothing'}")
        left = [branch for branch in self.branches if branch.left_at > 0]
        if not self._trained():
            said = []
        if left:
            newest = left[-1]
            said.append(f"generation {newest.generation} left generation {newest.parent} at version {newest.left_at}")
        return said

    def _place(self, tier: int, rank: int) -> str:
        name = self._tiers[tier].name
        return name if self._tiers[tier].shared else f"{name} of rank {rank}"

    def cannot_ask(self, points: Points | None) -> RecoveryError:
        """The error for tiers that are away and may hold something newer."""
        said = "; ".join(f"rank {rank}, tier {tier}: {error}" for rank, tier, error in self.away)
        reached = "nothing was found" if points is None else f"version {points[0].last} is the newest that was found"
        return RecoveryError(
            f"a tier could not be asked what it holds ({said}), and in the others {reached}: it may hold something "
            "newer, so that nothing is restored. Start again when it answers; correct its address; or leave it out of "
            "the hierarchy to go on without what it holds"
        )


def first_of(said: Sequence[str], separator: str) -> str:
    return separator.join([*said[:NAMED_MAX], *(["..."] if len(said) > NAMED_MAX else [])])
