"""One rank's state at any version, rebuilt without the model and the job that wrote it.

The copies are read and verified as in a recovery (:mod:`tiercheck.recovery.reader`), and replayed on tensors that the
base itself brings (:mod:`tiercheck.streams.tensors.stored`). What comes out has the bits that the job would have
recovered; where this machine rounds otherwise than the one that took the steps, the fidelity and the notes say so.

Memory: the rank's state once, the base's shard once more if its tier does not map files, and two batches of
differentials.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck import schema
from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.archive.shards import read_header, read_object
from tiercheck.errors import RecoveryError, TierError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Plan
from tiercheck.recovery.reader import ANSWER_S, Lost, Reader, VerifiedPart
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.tensors.provider import Identity
from tiercheck.streams.tensors.stored import StoredReader, StoredState, optimizer_class
from tiercheck.types import Fidelity

__all__ = ["RankState", "rebuild"]

UNFIT = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What torch and its optimizers raise where a state is none of theirs."""
OPTIONS_HELD = ("options", "hyperparameters")
"""Where integrations keep the options of the parameter groups in the host state."""


@dataclass(frozen=True)
class RankState:
    """One rank's state, in memory of its own."""

    rank: int
    point: RecoveryPoint
    identity: Identity
    """What the base says: framework, world size, model, optimizer."""
    state: StoredState
    """Its ``masters()``, ``optimizer_state()``, ``buffers()`` (frozen parameters among them) and ``group_of()``."""
    host_state: Mapping[str, Any]
    residuals: Mapping[str, Any]
    fidelity: Fidelity
    notes: tuple[str, ...]
    """Why the fidelity is less than exact, and what else there is to know."""

    @property
    def version(self) -> int:
        return self.point.last

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        """Per parameter group, its options as the host state has them: at the end of the version; if a version is
        published before the scheduler steps (DeepSpeed), as the last step had them."""
        groups = self.state.hyperparameters()
        for name in OPTIONS_HELD:
            held = self.host_state.get(name)
            if isinstance(held, list) and len(held) == len(groups) and all(isinstance(each, dict) for each in held):
                return held
        return groups


async def rebuild(
    hierarchy: OpenHierarchy,
    inventory: Inventory,
    chosen: Recoverable,
    rank: int,
    scheduler: Scheduler,
    *,
    deadline_s: float,
    threads: int | None = None,
) -> RankState:
    """The rank's state at the chosen version. ``deadline_s`` bounds the waiting for tiers, twice.

    Errors: ``RecoveryError`` if a copy is damaged and there is no other; ``ConfigurationError`` if steps must be
    replayed of an optimizer that is not known here; ``TierError``.
    """
    state = StoredReader(threads=threads)
    reader = Reader(hierarchy, rank, deadline_s, state, inventory.lineage(chosen.points[rank].generation))
    point, own = chosen.points[rank], inventory.copies[rank]

    async def verified() -> VerifiedPart | None:
        if point.replayed:
            await check_optimizer(hierarchy, inventory, chosen.plans[rank])
        return await reader.verify(point, own)

    part = await scheduler.call(verified(), what=f"reading rank {rank}", deadline_s=2 * deadline_s + ANSWER_S)
    if part is None:
        raise RecoveryError(
            f"version {point.last} cannot be rebuilt: rank {rank} has no good copy left of something that leads to it "
            f"({'; '.join(reader.copies.told()[:3])}); 'tiercheck verify' says which versions can"
        )

    def make(threads: int) -> AsyncGenerator[Any, None]:
        return reader.runs(part, own, threads=threads)

    try:
        rebuilt = await state.rebuild(part.base, part.start, make, scheduler)
    except Lost as error:
        raise RecoveryError(f"version {point.last} cannot be rebuilt: {error}") from error
    except UNFIT as error:
        raise RecoveryError(
            f"{part.plan.anchor.key} and what follows it cannot be rebuilt: {type(error).__name__}: {error}"
        ) from error
    fidelity, notes = state.reached(part.base, rebuilt)
    if point.by_snapshot:
        fidelity = Fidelity.APPROXIMATE
        notes += (f"version {point.last} is base {point.anchor} and a snapshot of what had changed since",)
    return RankState(
        rank, point, part.base.identity, state.state, rebuilt.host_state, rebuilt.residuals, fidelity, notes
    )


async def check_optimizer(hierarchy: OpenHierarchy, inventory: Inventory, chosen: Plan) -> None:
    """Before anything large is read: whether the steps can be replayed here. Errors: ``ConfigurationError``."""
    tier, key = hierarchy.tiers[chosen.anchor.tier], chosen.anchor.key
    try:
        header = await read_header(tier, key, inventory.nbytes(chosen.anchor))
        identity = schema.read(Identity, await read_object(tier, key, header, "identity"))
    except (TierError, ValueError):
        return  # the reader says what is wrong with it, and takes another copy
    optimizer_class(identity.optimizer.kind)
