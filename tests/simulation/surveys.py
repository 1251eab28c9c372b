"""What ranks find when they start, and where they meet: the real rules, over the tiers of a simulated cluster."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from tests.simulation.movers import Movers
from tests.simulation.tiers import Tier
from tiercheck.errors import RecoveryError
from tiercheck.keys import ShardKey, Stream
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.plan import Plan, plan
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.finding.told import Told
from tiercheck.recovery.restorer import behind


@dataclass
class Found:
    """What the ranks know before they go on."""

    surveys: list[Survey]
    """What each rank has found, and knows alone."""
    past: Past
    damaged: list[set[Copy]] = field(default_factory=list)
    """By rank, its copies that were read and found damaged."""
    points: tuple[RecoveryPoint, ...] | None = None
    """Each rank's way to the version at which they meet."""

    def sound(self, index: int) -> frozenset[Copy]:
        return self.surveys[index].sources - self.damaged[index]


class Surveys(Movers):
    """How the ranks look around, as :class:`tiercheck.recovery.restorer.Restorer` does it."""

    def meet(self) -> Found:
        """Errors: ``RecoveryError`` where the start is refused."""
        everywhere = range(len(self.roles))
        surveys = [self.survey(index, everywhere) for index in range(self.world)]
        found = Found(surveys, Past.of(surveys, self.roles, "the tiers"), [set() for _ in range(self.world)])
        best: int | None = None
        checked = False
        while True:
            self.ask_absent(found, best)
            if not checked:
                refusals.check(found.past)
                checked = True
            version = found.past.version()
            if version is None:
                found.points = None
                refusals.check_nothing_is_lost(found.past, restart=False)
                return found
            lineage = found.past.lineage
            found.points = tuple(
                Readable.of(copy.key for copy in survey.sources).ways(lineage)[version] for survey in found.surveys
            )
            best = version if best is None else best
            read = [self.reads(found, index, point) for index, point in enumerate(found.points)]
            if all(read):
                break
            assert any(found.damaged), f"{found.points} cannot be reached, and nothing is damaged"
            for index, damaged in enumerate(found.damaged):
                found.surveys[index] = replace(found.surveys[index], sources=found.surveys[index].sources - damaged)
            found.past = found.past.after(dict(enumerate(self.told(found))))
        if found.past.away and not found.past.in_memory(version):
            raise RecoveryError("the generation cannot be recorded in every tier")
        return found

    def told(self, found: Found) -> list[Told]:
        names = [role.name for role in self.roles]
        return [Told.of(survey, names, rank, found.damaged[rank]) for rank, survey in enumerate(found.surveys)]

    def ask_absent(self, found: Found, best: int | None) -> None:
        """Tiers that are away are asked again if they are needed, and may answer."""
        past, version = found.past, found.past.version()
        if not past.away:
            return
        if not behind(version, best) and past.orphaned is None and past.in_memory(version):
            return
        if self.random.random() < 0.5:
            absent = [[tier for tier, _ in survey.away] for survey in found.surveys]
            self.away = []
            found.surveys = [
                survey.joined(self.survey(index, tiers))
                for index, (survey, tiers) in enumerate(zip(found.surveys, absent, strict=True))
            ]
            found.past = Past.of(found.surveys, self.roles, "the tiers").after(dict(enumerate(self.told(found))))
        elif behind(version, best) or not past.covers(version):
            raise refusals.cannot_ask(past, version)

    def reads(self, found: Found, index: int, point: RecoveryPoint) -> bool:
        """Whether the rank reads its way to the point, by whatever copies are whole."""
        while True:
            chosen = plan(point, index, found.sound(index))
            if not isinstance(chosen, Plan):
                return False
            tiers = self.tiers_of(index)
            damaged = {source for source in chosen.sources if source.key in tiers[source.tier].damaged}
            if not damaged:
                return True
            found.damaged[index] |= damaged

    def survey(self, index: int, tiers: Collection[int]) -> Survey:
        held = {tier: self.tiers_of(index)[tier] for tier in tiers}
        seen = {tier: each for tier, each in held.items() if not self.is_away(each)}
        return Survey(
            sources=frozenset(Copy(tier, key) for tier, each in seen.items() for key in shards(each, index)),
            others=frozenset(Copy(tier, key) for tier, each in seen.items() for key in self.others(each, index)),
            branches=frozenset((tier, branch) for tier, each in seen.items() for branch in each.branches.values()),
            recorded=frozenset((tier, generation) for tier, each in seen.items() for generation in each.recorded),
            generations=frozenset(
                (t, key.generation)
                for t, each in seen.items()
                for key in self.listed_shards(each, index)
                if key.stream is not Stream.CONSTANT
            ),
            away=tuple((tier, "it does not answer") for tier in held if tier not in seen),
        )

    def others(self, tier: Tier, index: int) -> set[ShardKey]:
        """The newest shard of each other rank, in a tier inside a node."""
        newest: dict[int, ShardKey] = {}
        for key in self.listed_shards(tier, index):
            if key.rank != index:
                newest[key.rank] = max(key, newest.get(key.rank, key), key=lambda each: (each.generation, each.last))
        return set(newest.values())

    def listed_shards(self, tier: Tier, index: int) -> list[ShardKey]:
        """A rank lists its own in a tier that all ranks share."""
        return shards(tier, index if tier is self.durable else None)


def shards(tier: Tier, rank: int | None = None) -> list[ShardKey]:
    """Of one rank, or of all."""
    return [key for key in tier if isinstance(key, ShardKey) and rank in (None, key.rank)]
