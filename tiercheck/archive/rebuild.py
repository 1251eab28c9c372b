"""One rank's state at any version, rebuilt without the model and the job that wrote it.

The copies are read and verified as in a recovery (:mod:`tiercheck.recovery.reading.reader`), and replayed on tensors
that the base itself brings (:mod:`tiercheck.streams.rebuilding.stored`). What comes out has the bits that the job would
have recovered; where this machine rounds otherwise than the one that took the steps, the fidelity and the notes say so.

Memory: the rank's state once, the base's shard once more if its tier does not map files, and two batches of
differentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercheck import schema
from tiercheck.archive.inventory import Inventory, Recoverable
from tiercheck.archive.shards import read_header, read_object
from tiercheck.errors import ConfigurationError, RecoveryError, TierError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Plan
from tiercheck.recovery.reading.reader import Reader
from tiercheck.recovery.reading.rebuilding import rebuilt
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.rebuilding.carry_over import options_at_end
from tiercheck.streams.rebuilding.stored import StoredReader, StoredState, check_replayable
from tiercheck.streams.tensors.provider import Identity
from tiercheck.types import Fidelity

__all__ = ["RankState", "StoredVersion"]


@dataclass(frozen=True)
class RankState:
    """One rank's state, in memory of its own."""

    rank: int
    point: RecoveryPoint
    identity: Identity
    """What the base says: framework, model, optimizer."""
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
        return options_at_end(self.state.hyperparameters(), self.host_state)


@dataclass(frozen=True)
class StoredVersion:
    """A version as the tiers hold it, open to be read."""

    hierarchy: OpenHierarchy
    inventory: Inventory
    chosen: Recoverable
    scheduler: Scheduler
    deadline_s: float
    """Of each wait for tiers."""

    async def rebuild(self, rank: int, threads: int | None = None) -> RankState:
        """The rank's state at this version.

        Errors: ``RecoveryError`` for a rank that the version does not have, and if a copy is damaged and there is no
        other; ``ConfigurationError`` if steps must be replayed of an optimizer that is not known here; ``TierError``.
        """
        self.chosen.check_rank(rank)
        inventory, chosen = self.inventory, self.chosen
        while True:
            point = chosen.points[rank]
            state = StoredReader(threads=threads)
            own = inventory.copies[rank]
            nbytes = {copy: inventory.nbytes(copy) for copy in own}
            lineage = inventory.lineage(point.generation)
            reader = Reader(self.hierarchy, rank, self.deadline_s, state, lineage, nbytes)
            if point.replayed:
                checking = check_optimizer(self.hierarchy, inventory, chosen.plans[rank])
                what = f"reading who wrote what rank {rank} saved"
                await self.scheduler.call(checking, what=what, deadline_s=self.deadline_s)
            found = await rebuilt(reader, point, own, self.scheduler)
            if found is not None:
                break
            # Another base may lead to the version, and more differentials after it.
            failed = reader.copies.quarantined
            inventory = inventory.less(failed)
            if not failed or point.last not in inventory.readable_of(inventory.lineage(point.generation)):
                raise RecoveryError(
                    f"version {point.last} cannot be rebuilt: rank {rank} has no good copy left of something that "
                    f"leads to it ({'; '.join(reader.copies.told()[:3])}); 'tiercheck verify' says which versions can"
                )
            chosen = inventory.at(point.last, generation=point.generation)
        part, outcome = found
        fidelity, notes = reader.reached(part, outcome)
        if made := self.inventory.made_before(point.generation):
            fidelity, notes = Fidelity.APPROXIMATE, (*notes, *made)
        return RankState(
            rank, point, part.base.identity, state.state, outcome.host_state, outcome.residuals, fidelity, notes
        )


async def check_optimizer(hierarchy: OpenHierarchy, inventory: Inventory, chosen: Plan) -> None:
    """Before anything large is read: whether the steps can be replayed here. Errors: ``ConfigurationError``."""
    tier, key = hierarchy.tiers[chosen.anchor.tier], chosen.anchor.key
    try:
        header = await read_header(tier, key, inventory.nbytes(chosen.anchor))
        identity = schema.read(Identity, await read_object(tier, key, header, "identity"))
    except (TierError, ValueError):
        return  # the reader says what is wrong with it, and takes another copy
    try:
        check_replayable(identity)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}: choose version {chosen.anchor.key.first}, which is one") from None
