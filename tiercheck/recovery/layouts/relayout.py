"""Recovery under another layout: what N ranks saved is brought to M ranks, or to as many that hold other pieces.

Those that saved are the *old* ranks, those that resume the *new* ones. Each new rank knows which old ranks hold what it
wants (:mod:`tiercheck.recovery.layouts.holders`), and which versions it can come to. The newest one that every new
rank can come to is the recovery point. If several old ranks hold the same pieces, one of them is enough.

Then each new rank rebuilds the old ranks that it needs, one after the other, as their own recovery would
(:mod:`tiercheck.recovery.reading.reader`), and takes its pieces. The live state changes when every rank has all of its
pieces. If a copy fails, the ranks decide again without it.

Nothing is deleted here: what was saved under the old layout stays until the new generation has a committed base.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tiercheck.errors import Mismatch, RecoveryError
from tiercheck.format.index.assemble import Assembly
from tiercheck.keys import ONE_VERSION, ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.agreement import NO_MARK, agreed
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint
from tiercheck.policy.recovery.lineage import Layout, Lineage
from tiercheck.policy.recovery.plan import Availability, held
from tiercheck.policy.recovery.relayout import reachable, readers
from tiercheck.policy.recovery.spans import Span, spans_of
from tiercheck.recovery.finding.node_memory import NodeMemories
from tiercheck.recovery.layouts.fetching import Fetching
from tiercheck.recovery.layouts.holders import Holders, lacking
from tiercheck.recovery.layouts.matching import match
from tiercheck.recovery.layouts.old_ranks import OldRanks, first_of
from tiercheck.recovery.ranks import TOLD_S, Ranks
from tiercheck.recovery.reading.copies import ROUNDS_MAX, TOO_MANY_DAMAGED
from tiercheck.recovery.reading.patience import time_to_read
from tiercheck.recovery.reading.reader import Reader
from tiercheck.recovery.reading.rebuilding import fitting, rebuilt
from tiercheck.recovery.report import Fit, Recovery
from tiercheck.streams.state import Conversion, Rebuilt, TrainingState
from tiercheck.types import Fidelity

__all__ = ["Converted", "Relayout"]

log = logging.getLogger(__name__)

COPIES_FACTOR = 8
"""So many times as many copies are looked for, each time that those which were found do not do."""


@dataclass(frozen=True)
class Converted:
    """What one rank has of the recovery."""

    recovery: Recovery
    """Its point is that of one of the old ranks that were read, and its matrix tells of all of those."""
    parent: int
    """The newest generation of any shard that was read, on any rank."""
    residuals: Mapping[str, Any]


@dataclass
class _Round:
    """What has come of the old ranks that were rebuilt."""

    fidelity: Fidelity = Fidelity.EXACT
    notes: dict[str, None] = field(default_factory=dict)
    used: list[Copy] = field(default_factory=list)
    read_bytes: int = 0


class Relayout:
    """Brings what was saved under one ``layout`` into the live state: call :meth:`restore`, once. Collective.

    ``lineage``: of the job's past, an era under that layout. ``only``: no other version will do. ``changed``: the job
    has another layout now; else a rank takes what another one holds alike. Each rank waits for
    tiers until the deadline, once for each step.
    """

    def __init__(
        self,
        memories: NodeMemories,
        state: TrainingState,
        ranks: Ranks,
        lineage: Lineage,
        layout: Layout,
        only: int | None = None,
        *,
        changed: bool,
    ) -> None:
        self._hierarchy = memories.reading
        self._state = state
        self._ranks = ranks
        self._lineage = lineage
        self._layout = layout
        self._only = only
        self._changed = changed
        self._conversion: Conversion = state.conversion()
        self._old = OldRanks(memories, ranks, lineage, layout, self._conversion.read_identity)
        self._fetching = Fetching(memories.reading, ranks, memories.place)
        self._fit: Fit | None = None
        self._replays = True
        self._copies = 1
        """Of each piece, how many old ranks that have it were looked for."""
        self.lacking = ""
        """After :meth:`restore`: that versions were saved, and what was not found of them, in words."""

    async def restore(self, began: float) -> Converted | None:
        """``began``: when the recovery did. ``None``: there is no version that all ranks can come to. The live state is
        as it was then.

        Errors: ``Mismatch`` for another model or optimizer, and for shards that this job cannot use; ``RecoveryError``
        for a tier that cannot be asked; ``GroupError``.
        """
        try:
            return await self._restored(began)
        finally:
            await self._fetching.forget()

    async def _restored(self, began: float) -> Converted | None:
        await self._old.look()
        await self._old.learn()
        self.lacking = self._old.lacking
        if not self._old.outlines:
            return None
        self._holders = await self._check_model()
        await self._look_for_the_needed()
        least = 0
        for _ in range(ROUNDS_MAX):
            version = await self._version()
            while (version is None or version < least) and await self._look_further():
                version = await self._version()
            if version is None:
                await self._name_what_lacks()
                return None
            done = await self._read(version)
            if done is not None:
                return await self._settle(version, done, began)
            least = version
        raise RecoveryError(TOO_MANY_DAMAGED)

    # What there is

    async def _check_model(self) -> Holders:
        """Errors: as :func:`match`, and ``Mismatch`` for another optimizer."""
        conversion, places = self._conversion, ", ".join(tier.driver.url for tier in self._hierarchy.tiers)
        first = self._old.identity
        doing = "comparing the optimizer with what was saved"
        await self._ranks.gather(doing, lambda: conversion.refuse(first, places))
        matched = await match(
            self._ranks,
            conversion.wanted,
            self._old,
            conversion.loading,
            lambda differing, advice: conversion.other_model(differing, first, places, advice),
        )
        conversion.keep(matched.kept)
        self._fit = matched.fit
        self._replays = conversion.begin(first)
        return matched.holders

    async def _look_for_the_needed(self) -> None:
        """What the shared tiers hold of the old ranks that this one needs, beside those that were dealt to it."""
        visible = self._old.visible

        async def look() -> None:
            await self._holders.learn({copy.key.rank for copy in self._old.sound} & visible.keys())
            needed = {self._ranks.rank} & visible.keys()
            for version in sorted(set(visible.values()), reverse=True):
                plan = await self._holders.cover({old for old, reached in visible.items() if reached >= version})
                if not lacking(plan):
                    needed |= {*plan.ranks}
                    break
            await self._old.find_shared(needed)

        await self._ranks.gather("looking for what this rank needs", look, more_s=TOLD_S)

    async def _look_further(self) -> bool:
        """What the shared tiers hold of more old ranks that have what this one needs: another copy of what has failed
        may be there. Collective. Returns whether any rank had not looked for one."""
        self._copies *= COPIES_FACTOR

        async def look() -> bool:
            return await self._holders.look_for(self._old.visible, self._copies)

        return any(await self._ranks.gather("looking for other copies", look, more_s=TOLD_S))

    async def _name_what_lacks(self) -> None:
        """Say of what nobody has been found. An old rank that was not found need not be why: the model may have
        parameters that were never saved."""

        async def lacks() -> list[str]:
            plan = await self._holders.cover(self._old.visible)
            found = (each for each in lacking(plan) if not self._holders.may_have(each))
            return list(dict.fromkeys(each.piece.tensor for each in found))

        if self._old.whole:
            return
        answers = await self._ranks.gather("what was not found", lacks, more_s=TOLD_S)
        if names := dict.fromkeys(name for names in answers for name in names):
            self.lacking += f", and the ranks that were found have not all of {first_of(names)}"

    # Where to meet

    def _ways(self) -> dict[int, dict[int, RecoveryPoint]]:
        """By old rank, the ways that can be read here."""
        held: dict[int, list[ShardKey]] = {}
        for copy in self._old.sound:
            if copy.key.rank in self._old.outlines and (self._replays or copy.key.stream in ONE_VERSION):
                held.setdefault(copy.key.rank, []).append(copy.key)
        return {old: Readable.of(found).ways(self._lineage) for old, found in held.items()}

    async def _version(self) -> int | None:
        """The newest version that every rank can come to."""

        def reach() -> tuple[Span, ...]:
            found = reachable(self._ways(), lambda olds: not lacking(self._holders.plan(olds)))
            return spans_of(found if self._only is None else found & {self._only})

        version = agreed(await self._ranks.gather("where to meet", reach, kind=tuple[Span, ...]))
        return None if version == NO_MARK else version

    # Reading

    async def _read(self, version: int) -> tuple[dict[int, RecoveryPoint], _Round] | None:
        """Rebuild the old ranks that are needed and take their pieces; ``None`` if some rank could not."""
        points = {old: ways[version] for old, ways in self._ways().items() if version in ways}
        plan = self._holders.plan(points)
        own, tells = {self._ranks.rank} & points.keys(), await self._telling(points)
        needed = {old: points[old] for old in sorted({*plan.ranks, *own, *tells} or {min(points)})}
        came = _Round()

        async def read() -> bool:
            self._conversion.begin(self._old.identity)
            for old, point in needed.items():
                if not await self._rebuilt(old, point, plan, came, tells=old in tells):
                    return False
            return True

        most, fetched = await self._fetching.fetch(needed, self._old.sound)
        await self._old.find_in_first(fetched)
        long = sum(nbytes for copy, nbytes in self._old.nbytes.items() if copy.key.rank in needed)
        more_s = 2 * self._ranks.deadline_s * most + time_to_read(long)
        answers = await self._ranks.gather(f"reading version {version}", read, more_s=more_s)
        return (needed, came) if all(answers) else None

    @property
    def _carries(self) -> bool:
        """Whether the user says what batches are drawn from."""
        asked = self._conversion.loading.carry_over is not None
        return asked and self._layout.world_size != self._ranks.world_size

    async def _telling(self, points: Collection[int]) -> frozenset[int]:
        """The old ranks of which this one tells the others what they had of their own."""
        if not self._carries:
            return frozenset()
        found = await self._ranks.gather("who reads what each rank had of its own", lambda: sorted(points))
        return frozenset(old for old, rank in readers(found).items() if rank == self._ranks.rank)

    async def _rebuilt(
        self, old: int, point: RecoveryPoint, plan: Assembly, came: _Round, *, tells: bool = False
    ) -> bool:
        """Whether the old rank's state could be read. Errors: ``Mismatch``; ``RecoveryError``."""
        scheduler, deadline_s = self._ranks.scheduler, self._ranks.deadline_s
        state = self._conversion.reader()
        reader = Reader(self._hierarchy, old, deadline_s, state, self._lineage, self._old.nbytes)
        own = {copy for copy in self._old.sound if copy.key.rank == old}
        found = await rebuilt(reader, point, own, scheduler)
        self._old.failed |= reader.quarantined
        if found is None:
            if reader.copies.unusable:
                source, why = min(reader.copies.unusable.items())
                raise Mismatch(f"{source.key} was saved whole, and this job cannot use it: {why}")
            return False
        part, outcome = found
        with fitting(f"what {part.plan.anchor.key} leads to cannot be taken apart"):
            pieces = [each for each in plan.transfers if each.rank == old]
            self._conversion.take(pieces, outcome, own=old == self._ranks.rank, tells=old if tells else None)
        fidelity, notes = reader.reached(part, outcome)
        came.fidelity = Fidelity.worst(came.fidelity, fidelity)
        came.notes |= dict.fromkeys(notes)
        came.used += reader.used
        came.read_bytes += reader.read_bytes
        return True

    # The end

    async def _settle(self, version: int, done: tuple[dict[int, RecoveryPoint], _Round], began: float) -> Converted:
        """Load what was taken. All ranks have all of their pieces."""
        needed, came = done
        rank = self._ranks.rank
        if rank < self._layout.world_size and rank not in needed:
            came.fidelity = Fidelity.APPROXIMATE
            came.notes[
                f"what rank {rank} alone had at version {version} (random generators, its place in the data) is lost"
            ] = None
        generation = max(point.generation for point in needed.values())
        taken = await self._ranks.gather("what was taken", lambda: [generation, self._conversion.told()])
        if self._carries:
            sizes = {"rank": rank, "world_size": self._ranks.world_size, "saved_by": self._layout.world_size}
            asking = partial(self._conversion.carry_over, [told for _, told in taken], **sizes)
            await self._ranks.gather("asking what batches are drawn from", asking)
        ends: list[Rebuilt] = []
        gone = range(self._ranks.world_size, self._layout.world_size) if rank == 0 else range(0)
        fit = self._fit
        unfit = (
            f"version {version}, which {self._layout.world_size} ranks saved, cannot be loaded into what was attached"
        )

        def load() -> None:
            with fitting(unfit):
                ends.append(self._conversion.finish([told for _, told in taken], version, gone=gone))

        def settle() -> str:
            self._state.refresh()
            with fitting(unfit):
                self._state.restore_host_state(ends[0].host_state)
            exact = self._conversion.exact and (not fit or fit.exact) and not self._old.apart
            return str(Fidelity.worst(came.fidelity, Fidelity.EXACT if exact else Fidelity.APPROXIMATE))

        # A rank that fails says so, so that no other one waits for it in the refresh.
        await self._ranks.gather("loading what was taken", load)
        answers = [Fidelity(each) for each in await self._ranks.gather("the end of the recovery", settle)]
        fidelity = Fidelity.worst(*answers)
        fetched = self._fetching.notes
        notes = (self._said(needed), *(fit.notes if fit else ()), *fetched, *came.notes, *self._conversion.notes)
        if self._old.apart:
            notes += (f"the ranks that saved held different values of {first_of(self._old.apart)}: one's were taken",)
        if fidelity is not answers[self._ranks.rank]:
            notes += (f"rank {answers.index(fidelity)} reached {fidelity}; this rank alone would be better",)
        names = [tier.name for tier in self._hierarchy.tiers]
        sound = self._old.sound
        rows = [
            Availability(((old, old),), name, *what)
            for old, point in needed.items()
            for name, what in zip(names, held(point, old, len(names), sound), strict=True)
        ]
        recovery = Recovery(
            point=needed.get(self._ranks.rank, next(iter(needed.values()))),
            sources=tuple((str(source.key), names[source.tier]) for source in came.used),
            quarantined=tuple((str(s.key), names[s.tier], why) for s, why in sorted(self._old.failed.items())),
            matrix=tuple(rows),
            fidelity=fidelity,
            notes=notes,
            seconds=self._ranks.scheduler.time() - began,
            read_bytes=came.read_bytes,
            fit=fit,
        )
        return Converted(recovery, max(each for each, _ in taken), ends[0].residuals)

    def _said(self, needed: Collection[int]) -> str:
        size = self._layout.world_size
        saved = f"saved by {size} ranks under another layout" if self._changed else "not each rank could read its own"
        said = f"{saved}; this rank took its part from {first_of(needed)}"
        if not self._replays:
            said += (
                "; its optimizer is not one whose steps can be replayed apart from the job (torch's, or registered in "
                "the entry-point group tiercheck.optimizers; under FSDP2 registered ones alone), so that no steps were "
                "replayed, and the version is that of a base"
            )
        return said
