"""Recovery: from what the tiers hold to the state of every rank, as of one version.

The life of a recovery: each rank surveys its tiers and tells the others; the policies name the recovery point
and, per rank, the copies to read; each rank reads and verifies all of them (:mod:`tiercheck.reader`) before anything
is changed. A copy that fails is quarantined, and the ranks decide again without it, so that the point may move back
but never splits. Then the base is loaded, the differentials are read again and replayed, a run at a time, and the host
state of the last one is put back. Where the last copy of a version goes bad between the two reads, the ranks decide
again as well, and load the base again: each of them holds it until all have replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tiercheck import keys, objects
from tiercheck.background import BackgroundLoop
from tiercheck.errors import (
    Corruption,
    Mismatch,
    RecoveryError,
    TierCheckError,
)
from tiercheck.group import Group
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import ClaimKey, LineageKey, ShardKey
from tiercheck.policy.consensus import Readable, RecoveryPoint, decide
from tiercheck.policy.lineage import Branch, Lineage
from tiercheck.policy.recovery import Availability, Source, availability
from tiercheck.reader import Lost, Part, Reader
from tiercheck.records import read_record
from tiercheck.streams.base import BaseState
from tiercheck.streams.fidelity import reached
from tiercheck.streams.providers import StateProvider
from tiercheck.streams.replay import Replayed, replay_runs, threads_granted
from tiercheck.streams.runs import Run
from tiercheck.streams.trained_on import forget_sent
from tiercheck.types import Fidelity

__all__ = ["Recovery", "Restorer", "gather"]

log = logging.getLogger(__name__)

ROUNDS_MAX = 64
"""Times the ranks decide again before they give up: each round some copy was found damaged."""


@dataclass(frozen=True)
class Recovery:
    """What a recovery did, as one rank reports it."""

    point: RecoveryPoint
    """The version at which the ranks met, and this rank's way to it."""
    sources: tuple[tuple[str, str], ...]
    """What this rank loaded and replayed, in order: (object, tier)."""
    quarantined: tuple[tuple[str, str, str], ...]
    """Copies of this rank's objects that failed verification: (object, tier, reason)."""
    matrix: tuple[Availability, ...]
    """What each tier could give each rank before anything was read."""
    fidelity: Fidelity
    """The worst of what was replayed, on any rank."""
    notes: tuple[str, ...]
    """Why the fidelity is less than exact, where it is; and what else there is to know of what was replayed."""
    seconds: float
    """From the survey to the restored state, on this rank."""
    read_bytes: int
    """Taken from the tiers by this rank. Objects that a tier does not map are read once to be verified and, but for the
    first ones of the chain, once more to be replayed."""

    @property
    def version(self) -> int:
        """The version the job resumes after."""
        return self.point.last

    @property
    def replayed(self) -> int:
        """The number of differentials replayed."""
        return self.point.replayed

    def to_object(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "generation": self.point.generation,
            "anchor": self.point.anchor,
            "version": self.version,
            "replayed": self.replayed,
            "sources": [{"object": key, "tier": tier} for key, tier in self.sources],
            "quarantined": [{"object": k, "tier": t, "reason": r} for k, t, r in self.quarantined],
            "matrix": [
                {"rank": row.rank, "tier": row.tier, "anchor": row.anchor, "differentials": list(row.differentials)}
                for row in self.matrix
            ],
            "fidelity": str(self.fidelity),
            "notes": list(self.notes),
            "seconds": self.seconds,
            "read_bytes": self.read_bytes,
        }


def gather(group: Group, what: str, produce: Callable[[], Any], *, deadline_s: float) -> list[Any]:
    """Every rank's value of ``produce()``, in rank order. A rank that fails tells the others instead of
    leaving them to wait.

    Errors: this rank's own; ``RecoveryError`` naming another rank and its error; those of the group.
    """
    failure: Exception | None = None
    try:
        message: Mapping[str, Any] = {"value": produce()}
    except Exception as error:  # noqa: BLE001  it is raised below; the others must not wait for it
        failure = error
        said = str(error) if isinstance(error, TierCheckError) else f"{type(error).__name__}: {error}"
        message = {"error": said, "mismatch": isinstance(error, Mismatch)}
    answers: list[Any] = [
        objects.unpack(each) for each in group.all_gather(objects.pack(message), what=what, deadline_s=deadline_s)
    ]
    if failure is not None:
        raise failure
    for rank, answer in enumerate(answers):
        if "error" in answer:
            kind = Mismatch if answer["mismatch"] else RecoveryError
            raise kind(f"{what}: rank {rank} reports: {answer['error']}")
    return [answer["value"] for answer in answers]


@dataclass(frozen=True)
class Survey:
    """What one rank found: copies of its own shards, and the lineage and the claims its tiers tell of."""

    sources: frozenset[Source]
    branches: frozenset[Branch]
    claims: frozenset[ClaimKey]

    def to_object(self) -> dict[str, Any]:
        return {
            "sources": [(source.tier, str(source.key)) for source in sorted(self.sources)],
            "branches": [branch.to_object() for branch in sorted(self.branches)],
            "claims": [str(claim) for claim in sorted(self.claims)],
        }

    @classmethod
    def from_object(cls, value: Any) -> Survey:
        found = frozenset(
            Source(tier, key) for tier, text in value["sources"] if isinstance(key := keys.parse(text), ShardKey)
        )
        claims = frozenset(key for text in value["claims"] if isinstance(key := keys.parse(text), ClaimKey))
        return cls(found, frozenset(Branch.from_object(each) for each in value["branches"]), claims)


@dataclass
class Restorer:
    """Restores one rank, together with all the others. Make one, :meth:`survey`, then :meth:`restore`.

    ``deadline_s`` bounds each wait for the other ranks, and each rank's waiting for tiers: once for all that it
    verifies, and once for all that it replays. ``threads`` and ``exact``: see
    :func:`~tiercheck.streams.replay.replay_runs`.
    """

    hierarchy: OpenHierarchy
    provider: StateProvider
    group: Group
    loop: BackgroundLoop
    deadline_s: float
    threads: int | None = None
    exact: bool = True
    lineage: Lineage = field(default_factory=lambda: Lineage(()))
    branches: tuple[Branch, ...] = ()
    claims: frozenset[ClaimKey] = frozenset()
    residuals: Mapping[str, Any] = field(default_factory=dict)
    """After :meth:`restore`, by master, the residuals of training on compressed gradients: what the base holds, less
    what was sent since (:mod:`tiercheck.streams.trained_on`)."""
    _surveys: list[Survey] = field(default_factory=list)
    _quarantined: dict[Source, str] = field(default_factory=dict)

    def survey(self) -> None:
        """Learn what every rank can read. Collective.

        Errors: ``Mismatch`` where the checkpoint is one of another world size; ``GroupError``; ``TierError``.
        """

        def look() -> dict[str, Any]:
            survey = self.loop.call(self._look(), what="the survey of the tiers", deadline_s=self.deadline_s)
            return survey.to_object()

        answers = gather(self.group, "the survey before recovery", look, deadline_s=self.deadline_s)
        self._surveys = [Survey.from_object(answer) for answer in answers]
        branches = {branch for survey in self._surveys for branch in survey.branches}
        self.branches = tuple(sorted(branches))
        self.claims = frozenset(claim for survey in self._surveys for claim in survey.claims)
        self.lineage = Lineage.of(self.branches)
        self._check_lineage()
        self._check_world_size()

    def restore(self) -> Recovery | None:
        """Bring every rank to the newest version all can reach; ``None``: there is nothing, begin at 0.

        Collective. Errors: ``Mismatch`` (another model) and ``RecoveryError`` (versions exist, but none that
        every rank can read) before anything was changed; ``GroupError``.
        """
        began = time.perf_counter()
        threads = threads_granted(self.threads)
        reader = Reader(self.hierarchy, self.group.rank, self.loop, self.deadline_s, threads, self.lineage)
        touched = False
        for _ in range(ROUNDS_MAX):
            points = decide([Readable.of(s.key for s in survey.sources) for survey in self._surveys], self.lineage)
            if points is None:
                self._refuse_to_lose()
                if touched:
                    raise AssertionError("the ranks hold a base, and agree on none")
                return None
            matrix = availability(
                points, [tier.name for tier in self.hierarchy.tiers], [survey.sources for survey in self._surveys]
            )
            part = self._verify(reader, points[self.group.rank])
            if part is None:
                continue
            touched = True
            replayed = self._rebuild(reader, part)
            if replayed is not None:
                return self._report(reader, part, self._settle(part, replayed), matrix, began)
        raise RecoveryError(f"{ROUNDS_MAX} times in a row some rank found another damaged copy; giving up")

    async def _look(self) -> Survey:
        sources: set[Source] = set()
        branches: set[Branch] = set()
        claims: set[ClaimKey] = set()
        for tier in self.hierarchy.tiers:
            async for info in tier.driver.list():
                key = keys.parse(info.key)
                if isinstance(key, ShardKey) and key.rank == self.group.rank:
                    sources.add(Source(tier.index, key))
                elif isinstance(key, ClaimKey):
                    claims.add(key)
                elif isinstance(key, LineageKey):
                    try:
                        branches.add(Branch.from_object(await read_record(tier.driver, key, nbytes=info.nbytes)))
                    except (Corruption, ValueError) as error:
                        log.warning("the lineage record %s in tier %s is ignored: %s", info.key, tier.name, error)
        return Survey(frozenset(sources), frozenset(branches), frozenset(claims))

    def _check_lineage(self) -> None:
        """A generation's record is written before its first shard and stays: where the newest one is gone, it is lost,
        and what it opened would be passed over for something older."""
        newest = max((source.key.generation for survey in self._surveys for source in survey.sources), default=0)
        if newest > self.lineage.newest:
            raise RecoveryError(
                f"there are versions of generation {newest}, but its record {LineageKey(newest)} is missing or damaged "
                f"in every tier ({self._places()}): bring back a tier that holds it, or remove the objects "
                f"{LineageKey(newest)} and g{newest:06d}/* to go back to an older version"
            )

    def _check_world_size(self) -> None:
        newest = next((b for b in self.branches if b.generation == self.lineage.newest), None)
        if newest is not None and newest.world_size != self.group.world_size:
            raise Mismatch(
                f"the checkpoint in {self._places()} is of {newest.world_size} ranks, this job has "
                f"{self.group.world_size}: resume with {newest.world_size} ranks, or use another place"
            )

    def _refuse_to_lose(self) -> None:
        """No common point is fine where nothing was trained yet. Otherwise the user must say so."""
        trained = [s.key for survey in self._surveys for s in survey.sources if s.key.last > 0]
        if trained:
            newest = max(trained, key=lambda key: (key.generation, key.last))
            held = "; ".join(
                f"rank {rank}: "
                + (", ".join(sorted({self.hierarchy.tiers[s.tier].name for s in survey.sources})) or "nothing")
                for rank, survey in enumerate(self._surveys)
            )
            raise RecoveryError(
                f"versions up to {newest.last} were saved, but there is no base that every rank can read "
                f"(copies found in: {held}). Bring the missing tier back, or remove what is left in "
                f"{self._places()} to begin at version 0"
            )

    def _places(self) -> str:
        return ", ".join(tier.driver.url for tier in self.hierarchy.tiers)

    @property
    def _own(self) -> frozenset[Source]:
        return self._surveys[self.group.rank].sources

    def _verify(self, reader: Reader, point: RecoveryPoint) -> Part | None:
        """Read and verify this rank's part; ``None`` where some rank cannot."""
        parts: list[Part] = []

        def attempt() -> bool:
            part = reader.verify(point, self._own)
            parts.extend([part] if part else [])
            return part is not None

        if not self._together(reader, "reading the checkpoint", attempt):
            return None
        (part,) = parts

        def compare() -> bool:
            check_identity(part.base, self.provider, self._places())
            return True

        # An error on every rank, where one of them trains another model than the one that was saved.
        gather(self.group, "comparing the model", compare, deadline_s=self.deadline_s)
        return part

    def _rebuild(self, reader: Reader, part: Part) -> Replayed | None:
        """Load the base and replay; ``None`` where some rank could not: then the state is at no version."""
        done: list[Replayed] = []

        def attempt() -> bool:
            start = part.start
            self.provider.load(
                masters=start.masters,
                optimizer_state=start.optimizer_state,
                extras=start.extras,
                hyperparameters=start.hyperparameters,
            )
            own = self._own
            self.residuals = {name: residual.clone() for name, residual in part.base.residuals.items()}
            try:
                done.append(
                    replay_runs(
                        self.provider,
                        lambda threads: reader.runs(part, own, threads=threads),
                        threads=self.threads,
                        exact=self.exact,
                        before=self._forget_sent,
                    )
                )
            except Lost as error:
                log.warning("%s; the ranks begin again with base %d", error, part.point.anchor)
            return bool(done)

        # A rank that fails says so, so that no other one trains on alone, or waits for it in the refresh.
        return done[0] if self._together(reader, "the replay", attempt) else None

    def _forget_sent(self, run: Run) -> None:
        """Take out of the residuals what a run has sent."""
        for step in run.steps:
            forget_sent(self.residuals, step.gradients)

    def _together(self, reader: Reader, what: str, attempt: Callable[[], bool]) -> bool:
        """Whether every rank succeeded. Where one did not, damaged copies are forgotten everywhere."""

        def produce() -> dict[str, Any]:
            succeeded = attempt()
            damaged = [(source.tier, str(source.key)) for source in sorted(reader.quarantined)]
            return {"succeeded": succeeded, "damaged": damaged}

        answers = gather(self.group, what, produce, deadline_s=self.deadline_s)
        if all(answer["succeeded"] for answer in answers):
            return True
        for rank, answer in enumerate(answers):
            damaged = {
                Source(tier, key) for tier, text in answer["damaged"] if isinstance(key := keys.parse(text), ShardKey)
            }
            survey = self._surveys[rank]
            self._surveys[rank] = replace(survey, sources=survey.sources - damaged)
        return False

    def _settle(self, part: Part, replayed: Replayed) -> tuple[Fidelity, tuple[str, ...]]:
        """What follows from the masters, and the host state of the last version. Returns how true the recovered state
        is, which is what the worst rank reached, and why."""
        fidelity, notes = self._reached(part, replayed)

        def settle() -> str:
            self.provider.refresh()
            state = replayed.host_state
            self.provider.restore_host_state(part.start.host_state if state is None else state)
            return str(fidelity)

        answers = gather(self.group, "the end of the recovery", settle, deadline_s=self.deadline_s)
        everywhere = [Fidelity(answer) for answer in answers]
        worst = Fidelity.worst(*everywhere)
        if worst is not fidelity:
            notes += (f"rank {everywhere.index(worst)} reached {worst}; this rank alone would be {fidelity}",)
        return worst, notes

    def _reached(self, part: Part, replayed: Replayed) -> tuple[Fidelity, tuple[str, ...]]:
        """How true this rank's state is, and why."""
        fidelity, notes = reached(part.base.identity, self.provider.identity(), replayed.tally)
        if part.point.by_snapshot:
            fidelity = Fidelity.APPROXIMATE
            last, anchor = part.point.last, part.point.anchor
            notes += (f"version {last} is base {anchor} and a snapshot of what had changed since",)
        if self.residuals and part.point.last > part.point.anchor:
            notes += (
                f"error feedback has forgotten what it had left for later since version {part.point.anchor}: the "
                "restored state is not affected, but what is trained from here on differs from an uninterrupted run",
            )
        return fidelity, notes

    def _report(
        self,
        reader: Reader,
        part: Part,
        fidelity_and_notes: tuple[Fidelity, tuple[str, ...]],
        matrix: tuple[Availability, ...],
        began: float,
    ) -> Recovery:
        fidelity, notes = fidelity_and_notes
        names = [tier.name for tier in self.hierarchy.tiers]
        return Recovery(
            point=part.point,
            sources=tuple((str(source.key), names[source.tier]) for source in reader.used),
            quarantined=tuple((str(s.key), names[s.tier], why) for s, why in sorted(reader.quarantined.items())),
            matrix=matrix,
            fidelity=fidelity,
            notes=notes,
            seconds=time.perf_counter() - began,
            read_bytes=reader.read_bytes,
        )


def check_identity(base: BaseState, provider: StateProvider, places: str) -> None:
    """Errors: ``Mismatch`` naming both set-ups, optimizers, or the first tensor in which the models differ."""
    saved, here = base.identity, provider.identity()
    for what, before, now in (
        ("a training set-up", saved.framework, here.framework),
        ("an optimizer", saved.optimizer.kind, here.optimizer.kind),
    ):
        if before != now:
            raise Mismatch(
                f"the checkpoint in {places} is of {what} {before}, this job has {now}: "
                "resume with the same one, or use another place"
            )
    if saved.model != here.model:
        raise Mismatch(
            f"the checkpoint in {places} is of another model: {first_difference(base, provider)} "
            f"({saved.model_summary} against {here.model_summary}); resume with the same one, or use another place"
        )


def first_difference(base: BaseState, provider: StateProvider) -> str:
    """The first tensor that the saved model and this one do not share, in words."""
    before = {name: tuple(tensor.shape) for name, tensor in {**base.masters, **base.extras}.items()}
    now = {name: tuple(tensor.shape) for name, tensor in {**provider.masters(), **provider.extras()}.items()}
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name} was {before.get(name, 'not there')}, and is {now.get(name, 'not there')} here"
    return "the names or dtypes of its parameters differ"
