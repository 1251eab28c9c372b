"""Recovery: from what the tiers hold to the state of every rank, as of one version.

The life of a recovery: each rank surveys its tiers and tells the others; the policies name the recovery point
and, per rank, the copies to read; each rank reads and verifies all of them before anything is changed. A copy
that fails is quarantined, and the ranks decide again without it, so that the point may move back but never
splits. Then the base is loaded, the differentials are replayed, and the host state of the last one put back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tiercheck import container, keys, objects
from tiercheck.background import BackgroundLoop
from tiercheck.errors import (
    Corruption,
    Mismatch,
    RecoveryError,
    TierCheckError,
    TierError,
)
from tiercheck.group import Group
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import ClaimKey, LineageKey, ShardKey
from tiercheck.policy.consensus import Readable, RecoveryPoint, decide
from tiercheck.policy.lineage import Branch, Lineage
from tiercheck.policy.recovery import Availability, Plan, Source, Unreachable, availability, plan
from tiercheck.streams.base import BaseState, read_base
from tiercheck.streams.differential import Differential, read_differentials
from tiercheck.streams.providers import Identity, StateProvider
from tiercheck.streams.replay import replay
from tiercheck.types import Fidelity

__all__ = ["Recovery", "Restorer", "gather"]

log = logging.getLogger(__name__)

ROUNDS_MAX = 64
"""Times the ranks decide again before they give up: each round some copy was found damaged."""


@dataclass(frozen=True)
class Recovery:
    """What a recovery did, as one rank reports it."""

    point: RecoveryPoint
    """The anchor, and the last differential, of the generation that was recovered."""
    sources: tuple[tuple[str, str], ...]
    """This rank's reads in order: (object, tier)."""
    quarantined: tuple[tuple[str, str, str], ...]
    """Copies of this rank's objects that failed verification: (object, tier, reason)."""
    matrix: tuple[Availability, ...]
    """What each tier could give each rank before anything was read."""
    fidelity: Fidelity
    """The worst of what was replayed."""
    notes: tuple[str, ...]
    """Why the fidelity is less than exact, where it is."""
    seconds: float
    """From the survey to the restored state, on this rank."""
    read_bytes: int

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


@dataclass(frozen=True)
class _Read:
    """What one rank read and verified."""

    base: BaseState
    differentials: tuple[Differential, ...]
    nbytes: int


@dataclass
class Restorer:
    """Restores one rank, together with all the others. Make one, :meth:`survey`, then :meth:`restore`."""

    hierarchy: OpenHierarchy
    provider: StateProvider
    group: Group
    loop: BackgroundLoop
    deadline_s: float
    lineage: Lineage = field(default_factory=lambda: Lineage(()))
    branches: tuple[Branch, ...] = ()
    claims: frozenset[ClaimKey] = frozenset()
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
        for _ in range(ROUNDS_MAX):
            point = decide([Readable.of(s.key for s in survey.sources) for survey in self._surveys], self.lineage)
            if point is None:
                self._refuse_to_lose()
                return None
            matrix = availability(
                point, [tier.name for tier in self.hierarchy.tiers], [survey.sources for survey in self._surveys]
            )
            chosen, read = self._read(point)
            if read is not None:
                return self._load(point, chosen, read, matrix, began)
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
                        branches.add(Branch.from_object(objects.unpack(await tier.driver.get(info.key))))
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

    def _read(self, point: RecoveryPoint) -> tuple[Plan | None, _Read | None]:
        """Read and verify this rank's part. Where some rank cannot, forget the damaged copies everywhere."""
        chosen: Plan | None = None
        read: _Read | None = None

        def attempt() -> dict[str, Any]:
            nonlocal chosen, read
            chosen, read = self.loop.call(
                self._read_verified(point), what="reading the checkpoint", deadline_s=self.deadline_s
            )
            damaged = [(source.tier, str(source.key)) for source in sorted(self._quarantined)]
            return {"whole": read is not None, "damaged": damaged}

        answers = gather(self.group, "reading the checkpoint", attempt, deadline_s=self.deadline_s)
        if all(answer["whole"] for answer in answers):
            self._check_identity(read)
            return chosen, read
        for rank, answer in enumerate(answers):
            damaged = {
                Source(tier, key) for tier, text in answer["damaged"] if isinstance(key := keys.parse(text), ShardKey)
            }
            survey = self._surveys[rank]
            self._surveys[rank] = replace(survey, sources=survey.sources - damaged)
        return None, None

    def _check_identity(self, read: _Read | None) -> None:
        """Errors on every rank where one of them trains another model than the one that was saved."""

        def compare() -> bool:
            if read is not None:
                check_identity(read.base, self.provider, self._places())
            return True

        gather(self.group, "comparing the model", compare, deadline_s=self.deadline_s)

    async def _read_verified(self, point: RecoveryPoint) -> tuple[Plan | None, _Read | None]:
        """Follow the plan; where a copy is damaged or gone, quarantine it and plan again."""
        verified: dict[Source, container.Shard] = {}
        own = self._surveys[self.group.rank].sources
        while True:
            chosen = plan(point, self.group.rank, own - set(self._quarantined))
            if isinstance(chosen, Unreachable):
                log.warning("rank %d has no good copy of %s %d", self.group.rank, chosen.stream, chosen.version)
                return None, None
            missing = [source for source in chosen.sources if source not in verified]
            if not missing:
                return chosen, self._decode(point, chosen, verified)
            for source in missing:
                try:
                    verified[source] = await self._fetch(source)
                except TierError as error:
                    tier = self.hierarchy.tiers[source.tier].name
                    log.warning("%s is not used from tier %s: %s", source.key, tier, error)
                    self._quarantined[source] = str(error)
                    break

    async def _fetch(self, source: Source) -> container.Shard:
        tier = self.hierarchy.tiers[source.tier]
        content = await tier.driver.get(str(source.key))
        shard = container.parse(content, key=str(source.key), tier=tier.name)
        await asyncio.to_thread(shard.verify)
        return shard

    def _decode(self, point: RecoveryPoint, chosen: Plan, shards: Mapping[Source, container.Shard]) -> _Read:
        tiers = self.hierarchy.tiers
        base = read_base(shards[chosen.anchor], tier=tiers[chosen.anchor.tier].name)
        differentials: dict[int, Differential] = {}
        for source in chosen.batches:
            for each in read_differentials(shards[source], tier=tiers[source.tier].name):
                if point.anchor < each.version <= point.last:
                    differentials.setdefault(each.version, each)
        ordered = tuple(differentials[version] for version in range(point.anchor + 1, point.last + 1))
        return _Read(base, ordered, sum(shards[source].nbytes for source in chosen.sources))

    def _load(
        self, point: RecoveryPoint, chosen: Plan | None, read: _Read, matrix: tuple[Availability, ...], began: float
    ) -> Recovery:
        if chosen is None:
            raise AssertionError("something was read without a plan")
        base = read.base

        def rebuild() -> None:
            self.provider.load(
                masters=base.masters,
                optimizer_state=base.optimizer_state,
                extras=base.extras,
                hyperparameters=base.hyperparameters,
            )
            replay(self.provider, read.differentials)

        def settle() -> None:
            self.provider.refresh()
            last = read.differentials[-1] if read.differentials else None
            self.provider.restore_host_state(last.host_state if last else base.host_state)

        # A rank that fails says so, so that no other one trains on alone, or waits for it in the refresh.
        gather(self.group, "the replay", rebuild, deadline_s=self.deadline_s)
        gather(self.group, "the end of the recovery", settle, deadline_s=self.deadline_s)
        fidelity, notes = reached(base.identity, self.provider.identity(), read.differentials)
        names = [tier.name for tier in self.hierarchy.tiers]
        return Recovery(
            point=point,
            sources=tuple((str(source.key), names[source.tier]) for source in chosen.sources),
            quarantined=tuple((str(s.key), names[s.tier], why) for s, why in sorted(self._quarantined.items())),
            matrix=matrix,
            fidelity=fidelity,
            notes=notes,
            seconds=time.perf_counter() - began,
            read_bytes=read.nbytes,
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


def reached(
    saved: Identity, here: Identity, differentials: tuple[Differential, ...]
) -> tuple[Fidelity, tuple[str, ...]]:
    """The fidelity of a recovery, and why it is less than exact where it is."""
    notes: list[str] = []
    fidelity = Fidelity.worst(*(each.fidelity for each in differentials))
    if fidelity is not Fidelity.EXACT:
        codecs = ", ".join(sorted({codec for each in differentials for codec in each.codecs}))
        notes.append(f"the differentials were encoded by {codecs}, which is {fidelity}")
    before, now = saved.optimizer, here.optimizer
    if differentials and before != now:
        changed = ", ".join(
            f"{name} {getattr(before, name)} -> {getattr(now, name)}"
            for name in ("implementation", "torch_version", "instruction_set", "device")
            if getattr(before, name) != getattr(now, name)
        )
        fidelity = Fidelity.APPROXIMATE
        notes.append(f"the steps were taken by another implementation than the one that replayed them: {changed}")
    return fidelity, tuple(notes)
