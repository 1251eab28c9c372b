"""Recovery: from what the tiers hold to the state of every rank, as of one version.

The life of a recovery: each rank surveys its tiers and tells the others; the policies name the recovery point and, per
rank, the copies to read; each rank reads and verifies all of them (:mod:`tiercheck.recovery.reading.reader`) before
anything is changed. A copy that fails is quarantined, and the ranks decide again without it, so that the point may move
back but never splits. It does not move back for copies that are whole, and that this job cannot use. Then the base is
loaded, the differentials are read again and replayed, a run at a time, and the host state of the last one is put back.
Where the last copy of a version goes bad between the two reads, the ranks decide again as well, and load the base
again: each of them holds it until all have replayed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tiercheck.errors import RecoveryError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.lineage import Layout, Lineage
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.plan import (
    Availability,
    Held,
    HeldByNodes,
    availability,
    availability_of_nodes,
    held,
    plan,
)
from tiercheck.policy.recovery.request import Request, Turn
from tiercheck.recovery.attempts import Attempt, Nothing, Part, behind
from tiercheck.recovery.duration import say_expected
from tiercheck.recovery.finding import refusals
from tiercheck.recovery.finding.emptied import refuse_emptied
from tiercheck.recovery.finding.node_memory import NodeMemories
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey, survey
from tiercheck.recovery.finding.telling import tell
from tiercheck.recovery.finding.told import Told
from tiercheck.recovery.layouts.relayout import Relayout
from tiercheck.recovery.one_base import point_from_one_base
from tiercheck.recovery.ranks import TOLD_S, Ranks
from tiercheck.recovery.reading.copies import ROUNDS_MAX, TOO_MANY_DAMAGED
from tiercheck.recovery.reading.reader import ANSWER_S, Lost, Reader
from tiercheck.recovery.reading.rebuilding import fitting
from tiercheck.recovery.report import Recovery
from tiercheck.recovery.restored import Restored
from tiercheck.recovery.stages.losses import OPTION, lost_in, newest_of
from tiercheck.recovery.stages.making import StageMaking
from tiercheck.recovery.stages.places import stage_state
from tiercheck.recovery.turning import is_to_turn, turn, unreachable
from tiercheck.streams.state import Rebuilt, TrainingState
from tiercheck.types import Fidelity

__all__ = ["Restorer"]

log = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""How long a tier that fails is asked again before the ranks see whether they need it."""
UNFIT = (ValueError, TypeError, LookupError, AttributeError)
"""What the user's objects and optimizers raise where a state is none of theirs."""


@dataclass
class Restorer:
    """Restores one rank, together with all the others: make one and call :meth:`restore`, once.

    The deadline of ``ranks`` bounds each wait for the other ranks, and each rank's waiting for tiers: once for all that
    it verifies, and once for all that it replays.
    """

    hierarchy: OpenHierarchy
    state: TrainingState
    ranks: Ranks
    layout: Layout | None = None
    """Of this job; by default that of the newest generation."""
    restart: bool = False
    """Begin anew where versions were saved and none is left that all ranks can come to."""
    request: Request = field(default_factory=Request)
    """The same on every rank."""
    keeps: bool = True
    """What requests leave behind stays in the tiers that all ranks share."""
    memories: NodeMemories = None  # type: ignore[assignment]  # made below, of the hierarchy
    """The other nodes' memory; by default it cannot be asked."""
    on_lost_stage: LostStage | None = None
    """The stages of which no copy is left are made anew; by default the start is refused. The same on every rank."""
    _making: StageMaking | None = None
    """What is made anew in this recovery."""
    _past: Past | None = None
    _survey: Survey = field(default_factory=Survey)
    """What this rank has found, without the copies that failed."""
    _failed: set[Copy] = field(default_factory=set)
    """Copies that failed, and that the others have been told of."""
    _unusable: dict[Copy, str] = field(default_factory=dict)
    """Those of them that are whole, and why this job cannot use them."""
    _unused: list[str] = field(default_factory=list)
    """This rank's copies that could not be used, and why."""
    _lacking: str = ""
    """What tells of versions under another layout that cannot be come to."""
    _asked: bool = False
    """Tiers that are away were asked until the deadline."""
    _turn: Turn | None = None
    _from_one_base: RecoveryPoint | None = None
    """The way of all ranks, if their steps take all of them."""

    def __post_init__(self) -> None:
        self.memories = self.memories or NodeMemories(self.hierarchy, self.ranks)

    async def restore(self) -> Restored:
        """Bring every rank to the newest version that all can reach. Collective.

        A tier that cannot be listed is done without where every rank has its way to the newest version in its memory;
        else it is asked until the deadline. What was saved under another layout is converted
        (:mod:`tiercheck.recovery.layouts.relayout`). Errors, before anything was changed: ``Mismatch`` for another
        model, or another form of its state; ``RecoveryError`` for two histories, for versions of which none can be read
        by every rank, and for a tier that stays away and may hold something newer; with a ``request`` also for a
        version that not every rank can come to, and for any tier that stays away. ``GroupError``.
        """
        try:
            return await self._restored()
        finally:
            await self.memories.close()

    async def _restored(self) -> Restored:
        await self._look_around()
        if self._turn is not None and self.request.fresh:
            return Restored(None, self._found, turn=self._turn)
        began = self.ranks.scheduler.time()
        if (made := await self._restored_without_lost(began)) is not None:
            return made
        own_tried = False
        for layout, lineage in self._found.eras or ((self._here, Lineage(())),):
            own = layout.is_like(self._here) and not own_tried
            own_tried |= own
            restored = await (self._restore_own(began) if own else self._convert(layout, lineage, began))
            if restored is not None:
                return restored
        if self._turn is not None:
            raise unreachable(self._found, self.request)
        if (made := await self._restored_without_lost(began)) is not None:  # of copies that were found damaged
            return made
        advice = OPTION if self.state.stage() is not None and lost_in(self._found) else ""
        refusals.check_nothing_is_lost(
            self._found, restart=self.restart, failed=self._unused, lacking=self._lacking, advice=advice
        )
        return Restored(None, self._found)

    async def _restored_without_lost(self, began: float) -> Restored | None:
        """What the ranks come to that are not lost, with the lost stages made anew; ``None`` if no stage is lost, or it
        is not to be made. Errors: ``RecoveryError`` if it cannot be made, and there is no other way."""
        option, lost = self.on_lost_stage, frozenset[int]()
        while option is not None and self._turn is None:
            self._past = self._found.without(frozenset())
            found = lost_in(self._found, option.threshold)
            if not found or found == lost:
                break
            state, lost = stage_state(self.state.stage()), found
            making = StageMaking(state, self.ranks, option, lost, partial(newest_of, self._found))
            await making.look()
            if making.has_copies and (copied := await self._convert_own(began)) is not None:
                return copied
            try:
                await making.plan()
            except RecoveryError as error:
                if self._found.version() is None:
                    raise
                log.warning("all ranks go back: %s", error)
                break
            self._making, self._past = making, self._found.without(lost)
            if (restored := await self._restore_own(began)) is not None:
                return restored
        self._making, self._past = None, self._found.without(frozenset())
        return None

    @property
    def _here(self) -> Layout:
        return self.layout or next((layout for layout, _ in self._found.eras), Layout(self.ranks.world_size))

    async def _convert(self, layout: Layout, lineage: Lineage, began: float) -> Restored | None:
        """Bring what was saved under another layout into this one, or what was saved under this one before another;
        ``None`` if there is no version of it that all ranks can come to."""
        only = None if self._turn is None else self.request.version
        changed = not layout.is_like(self._here)
        relayout = Relayout(self.memories, self.state, self.ranks, lineage, layout, only, changed=changed)
        converted = await relayout.restore(began)
        if converted is None:
            self._lacking = self._lacking or relayout.lacking
            return None
        quarantined = (*sorted(self._survey.set_aside), *converted.recovery.quarantined)
        recovery = replace(converted.recovery, quarantined=quarantined)
        parent, residuals = converted.parent, converted.residuals
        return Restored(recovery, self._found, parent, self._turn, residuals, converted=True)

    async def _convert_own(self, began: float) -> Restored | None:
        """As if another layout had saved: of several ranks that hold the same, one will do."""
        return await self._convert(self._here, self._found.own_lineage, began)

    async def _restore_own(self, began: float) -> Restored | None:
        """Of each rank, what the rank of its number saved; ``None`` if there is no version that all can come to."""
        rank, deadline_s = self.ranks.rank, self.ranks.deadline_s
        reader = Reader(
            self.memories.reading, rank, deadline_s, self.state.reader(), self._found.lineage, self._survey.nbytes
        )
        best: int | None = None
        touched = False
        for _ in range(ROUNDS_MAX):
            version = await self._version(best)
            refusals.check_form(self._found, version)
            if self._turn is not None and version != self.request.version:
                return None  # it may have been saved under another layout
            if version is None:
                if touched:
                    raise RecoveryError(
                        "a base was loaded, and then no copy of it, or of what leads on from it, was left that every "
                        f"rank can read; the state is of no version now: {'; '.join(reader.copies.told())}"
                    )
                self._unused = reader.copies.told()
                return None
            best = version if best is None else best
            if self.state.steps_together:
                lost = self._found.lost if self._making is not None else ()
                self._from_one_base = await point_from_one_base(self._own, self._found.own_lineage, self.ranks, lost)
                if (version := self._from_one_base.last) != self.request.version and self._turn is not None:
                    return None
            own = self._version_of_own(version)
            part, matrix = await self._verify(reader, self._way(version if own is None else own), nothing=own is None)
            if part is None:
                continue
            touched = True
            rebuilt = await self._rebuild(reader, part)
            if rebuilt is not None:
                made: tuple[str, ...] = ()
                if self._making is not None:
                    is_lost = self.ranks.rank in self._found.lost
                    done = await self._making.make(version, None if is_lost else rebuilt.host_state)
                    rebuilt, made = replace(rebuilt, host_state=done.host_state), done.said
                return Restored(
                    self._report(reader, version, await self._settle(reader, part, rebuilt, made), matrix, began),
                    self._found,
                    parent=self._found.generation(version),
                    turn=self._turn,
                    residuals=rebuilt.residuals,
                    sound=self._own - reader.quarantined.keys(),
                    constants=part.constants,
                    in_memory=self._turn is None and self._found.in_memory(version),
                    made=made,
                    own_version=own,
                )
        raise RecoveryError(TOO_MANY_DAMAGED)

    def _version_of_own(self, version: int) -> int | None:
        """What this rank reads: the version at which the ranks meet; an older one, or nothing, if it is lost."""
        if self._making is None or self.ranks.rank not in self._found.lost:
            return version
        return self._making.version_of(self.ranks.rank)

    def _way(self, version: int) -> RecoveryPoint:
        """This rank's way to a version. Of one that it cannot come to: as if its base of that version were lost."""
        if self._from_one_base is not None and self._from_one_base.last == version:
            return self._from_one_base
        ways = Readable.of(source.key for source in self._own).ways(self._found.own_lineage)
        return ways.get(version) or RecoveryPoint(self._found.generation(version), version, version)

    @property
    def _found(self) -> Past:
        """What all ranks have found. Not before :meth:`_look_around`."""
        if self._past is None:
            raise AssertionError("the tiers were not surveyed")
        return self._past

    async def _look_around(self) -> None:
        """Learn what every rank can come to. Collective. Errors: as :meth:`restore`."""
        soon_s = min(ASK_AGAIN_S, self.ranks.deadline_s / 4)
        everywhere = range(len(self.hierarchy.tiers))
        self._past = await self._look(everywhere, retry_s=soon_s, answer_s=self.ranks.deadline_s / 2, insist=False)
        asks = self.memories.can_be_asked and (self.memories.always or self._found.asks_other_nodes)
        if asks and await self.memories.ask():
            self._past = await self._look_at_other_nodes()
        if is_to_turn(self._found, self.request):
            await self._turn_back()
            return
        await self._version(None)
        refusals.check(self._found)

    async def _turn_back(self) -> None:
        """Have that count which was asked for. Nothing may be missed that is left behind. Collective."""
        if self._found.away:
            await self._ask_absent()
        if self._found.away:
            raise refusals.cannot_ask(self._found, self._found.version())
        roles = self.hierarchy.roles
        self._turn = await turn(self._found, self.request, self.ranks, self._own, roles, keeps=self.keeps)
        self._past = self._found.up_to(self._turn.lineage)

    async def _version(self, best: int | None) -> int | None:
        """Where the ranks can meet, once every tier has been asked that is needed to know. ``best``: where they could
        have met before copies were found damaged."""
        version = self._found.version()
        if not self._found.away:
            return version
        if not behind(version, best) and self._found.orphaned is None and self._found.in_memory(version):
            return version
        if not self._asked:
            await self._ask_absent()
            version = self._found.version()
        if self._found.away and (behind(version, best) or not self._found.covers(version)):
            raise refusals.cannot_ask(self._found, version)
        return version

    async def _ask_absent(self) -> None:
        """Look again into the tiers that are away, until the deadline; if nothing tells of a past, only those whose
        errors pass by themselves: if nothing listens, most likely the address is wrong."""
        absent = [tier for tier, _ in self._survey.away]
        for tier, error in self._survey.away:
            log.warning("tier %s cannot be asked what it holds: %s", self.hierarchy.tiers[tier].name, error)
        deadline_s = self.ranks.deadline_s
        self._past = await self._look(absent, retry_s=deadline_s, answer_s=deadline_s, insist=self._found.begun)
        self._asked = bool(self._found.away)

    async def _look(self, tiers: Iterable[int], *, retry_s: float, answer_s: float, insist: bool) -> Past:
        """What every rank has found, once each has looked into these of its tiers. Collective. Options: as
        :func:`.survey`."""
        chosen = [self.hierarchy.tiers[tier] for tier in tiers]
        looking = partial(survey, chosen, self.ranks.rank, retry_s=retry_s, answer_s=answer_s, insist=insist)
        return await self._tell("the survey before recovery", looking, max(retry_s, answer_s) + TOLD_S / 2)

    async def _look_at_other_nodes(self) -> Past:
        """As :meth:`_look`, in the memory of the other nodes that this rank has shards in."""

        async def look() -> Survey:
            return replace(await self.memories.look(), away=self._survey.away)

        return await self._tell("the survey of other nodes' memory", look, self.ranks.deadline_s)

    async def _tell(self, what: str, look: Callable[[], Coroutine[Any, Any, Survey]], within_s: float) -> Past:
        """What every rank has found, once each has looked. Collective."""

        async def found() -> tuple[Told, Survey]:
            surveyed = await self.ranks.scheduler.call(look(), what=what, deadline_s=within_s)
            self._survey = self._survey.joined(surveyed)
            refuse_emptied(self._survey, self.hierarchy.tiers)
            return self._told(), self._survey

        told = await tell(what, found, self.ranks)
        return Past(told.told, told.others, told.lineages, self.hierarchy.roles, self._places(), self.layout)

    def _told(self) -> Told:
        names = [tier.name for tier in self.hierarchy.tiers]
        return Told.of(
            self._survey, names, self.ranks.rank, self._failed, self._unusable, other_nodes=self.memories.names
        )

    def _places(self) -> str:
        return ", ".join(tier.driver.url for tier in self.hierarchy.tiers)

    @property
    def _own(self) -> frozenset[Copy]:
        return self._survey.sources

    async def _verify(
        self, reader: Reader, point: RecoveryPoint, *, nothing: bool = False
    ) -> tuple[Part | None, tuple[Availability, ...]]:
        """Read and verify this rank's part; ``None`` if some rank cannot. And what every tier could give. ``nothing``:
        of this rank there is nothing to be read."""
        parts: list[Part] = []
        names, other_nodes = [tier.name for tier in self.hierarchy.tiers], self.memories.names
        everywhere = held(point, self.ranks.rank, len(names) + len(other_nodes), self._own)
        here, there = everywhere[: len(names)], zip(other_nodes, everywhere[len(names) :], strict=True)
        further = tuple((name, *what) for name, what in there if any(what))

        tiers, usable = self.memories.reading, reader.copies.usable(self._own)
        chosen = plan(point, self.ranks.rank, usable, tiers.order)
        self.memories.say_plan(chosen)
        await say_expected(chosen, self._survey.nbytes, tiers.tiers, self.state, self.ranks)
        # Which of them are read is not known yet. Other ranks have about as much, if perhaps in a slower tier.
        long_s = reader.time_to_read(self._own)

        async def attempt() -> bool:
            reader.state.expect()
            if nothing:
                parts.append(Nothing(point))
                return True
            within_s = self.ranks.deadline_s + long_s + ANSWER_S
            reading = reader.verify(point, self._own)
            part = await self.ranks.scheduler.call(reading, what="reading the checkpoint", deadline_s=within_s)
            parts.extend([part] if part else [])
            return part is not None

        answers = await self._together(reader, "reading the checkpoint", attempt, here, further, more_s=long_s)
        matrix = availability(names, [answer.held for answer in answers])
        matrix += availability_of_nodes([answer.other_nodes for answer in answers])
        return (parts[0] if all(answer.succeeded for answer in answers) else None), matrix

    async def _rebuild(self, reader: Reader, part: Part) -> Rebuilt | None:
        """Load the base and replay; ``None`` if some rank could not: then the state is at no version."""
        done: list[Rebuilt] = []

        async def attempt() -> bool:
            if isinstance(part, Nothing):
                done.append(Rebuilt({}))
                return True
            own = self._own

            def make(threads: int) -> AsyncGenerator[Any, None]:
                return reader.runs(part, own, threads=threads)

            try:
                done.append(await reader.state.rebuild(part.base, part.start, make, self.ranks.scheduler))
            except UNFIT as error:
                if not reader.doubt(part, own, error):
                    raise RecoveryError(
                        f"{part.plan.anchor.key} and what follows it cannot be loaded into what was attached: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            except Lost as error:
                log.warning("%s; the ranks begin again with base %d", error, part.point.anchor)
            return bool(done)

        # A rank that fails says so, so that no other one trains on alone, or waits for it in the refresh.
        answers = await self._together(reader, "the replay", attempt)
        return done[0] if all(answer.succeeded for answer in answers) else None

    async def _together(
        self,
        reader: Reader,
        what: str,
        attempt: Callable[[], Awaitable[bool]],
        here: Held = (),
        there: HeldByNodes = (),
        more_s: float = 0.0,
    ) -> list[Attempt]:
        """What became of it on every rank. If one did not succeed, copies that failed are none for all from here on.
        ``more_s``: how much longer than the deadline a rank may take."""

        async def produce() -> Attempt:
            succeeded = await attempt()
            told = None
            if not reader.quarantined.keys() <= self._failed:
                self._failed |= reader.quarantined.keys()
                self._survey = replace(self._survey, sources=self._survey.sources - self._failed)
                self._unusable |= reader.copies.unusable
                told = self._told()
            return Attempt(succeeded, told, here, there)

        answers: list[Attempt] = await self.ranks.gather(what, produce, more_s=more_s, kind=Attempt)
        later = {rank: answer.told for rank, answer in enumerate(answers) if answer.told is not None}
        self._past = self._found.after(later)
        return answers

    async def _settle(
        self, reader: Reader, part: Part, rebuilt: Rebuilt, made: tuple[str, ...]
    ) -> tuple[Fidelity, tuple[str, ...]]:
        """What follows from the masters, and the host state of the last version. Returns how true the recovered state
        is, which is what the worst rank reached, and why. ``made``: what was made anew."""
        found: list[tuple[Fidelity, tuple[str, ...]]] = []

        def settle() -> str:
            made_of_others = Fidelity.APPROXIMATE, ()
            found.append(made_of_others if isinstance(part, Nothing) else reader.reached(part, rebuilt))
            self.state.refresh()
            with fitting(f"the host state of version {part.point.last} cannot be put back into what was attached"):
                self.state.restore_host_state(rebuilt.host_state)
            return str(found[0][0])

        answers = await self.ranks.gather("the end of the recovery", settle)
        everywhere = [Fidelity(answer) for answer in answers]
        worst, (fidelity, notes) = Fidelity.worst(*everywhere), found[0]
        if worst is not fidelity:
            notes += (f"rank {everywhere.index(worst)} reached {worst}; this rank alone would be {fidelity}",)
        return (Fidelity.APPROXIMATE, (*made, *notes)) if made else (worst, notes)

    def _report(
        self,
        reader: Reader,
        version: int,
        fidelity_and_notes: tuple[Fidelity, tuple[str, ...]],
        matrix: tuple[Availability, ...],
        began: float,
    ) -> Recovery:
        fidelity, notes = fidelity_and_notes
        for note in self._found.done_without if self.ranks.rank == 0 else ():
            log.warning("%s", note)
        names = [tier.name for tier in self.memories.reading.tiers]
        return Recovery(
            point=self._way(version),
            sources=tuple((str(source.key), names[source.tier]) for source in reader.used),
            quarantined=(
                *sorted(self._survey.set_aside),
                *((str(s.key), names[s.tier], why) for s, why in sorted(reader.quarantined.items())),
            ),
            matrix=matrix,
            fidelity=fidelity,
            notes=notes + self._found.done_without,
            seconds=self.ranks.scheduler.time() - began,
            read_bytes=reader.read_bytes,
        )
