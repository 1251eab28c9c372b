"""Admission: before the first step, whether the first tier can hold what it will have to; and memory made ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, ConfigurationError, TierCheckError, TierError
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, SNAPSHOTS_IN_VOLATILE_TIERS
from tiercheck.recovery.ranks import Ranks
from tiercheck.streams.state import StateStream
from tiercheck.types import Usage, bytes_text

__all__ = [
    "Demand",
    "bases_at_most",
    "differentials_at_most",
    "prepare_memory",
    "refuse_gaps",
    "room_at_the_end",
]

log = logging.getLogger(__name__)

CONSTANTS_AT_MOST = 2
USAGE_S_MAX = 5.0
"""A store that must be listed to tell what it holds may take longer: then it is not asked."""


def bases_at_most() -> int:
    """Bases of one rank in a volatile tier: the newest two, and the one that is being captured."""
    return BASES_IN_VOLATILE_TIERS + 1


def differentials_at_most(config: CheckpointConfig) -> int:
    """Differentials of one rank in a volatile tier.

    They stay until a base after them is committed in the durable tier. A base is captured only when fewer than two
    still drain: when the third one after a commit is due, there are three intervals of differentials. Ranks that
    train in lock step may be a version apart, and memory for the next one is reserved ahead; a batch covers both.
    """
    return (BASES_IN_VOLATILE_TIERS + 1) * config.base_every + max(2, config.batch)


@dataclass(frozen=True)
class Demand:
    """What one rank brings into the first tier at most: so many objects, of so many bytes."""

    bases: int
    base_nbytes: int
    records: int
    record_nbytes: int
    """What a published record keeps."""
    record_nbytes_max: int
    """What is reserved for one."""
    kind: str
    """What records are called."""
    constants_nbytes: int = 0
    """What bases refer to: it is there once, and once more while others take its place."""

    @classmethod
    def of(cls, stream: StateStream, config: CheckpointConfig) -> Self:
        return cls(
            bases=bases_at_most(),
            base_nbytes=stream.base_nbytes,
            constants_nbytes=stream.constants_nbytes,
            records=2 * SNAPSHOTS_IN_VOLATILE_TIERS + 1 if stream.supersedes else differentials_at_most(config),
            record_nbytes=stream.nbytes_expected,
            record_nbytes_max=stream.nbytes_max,
            kind="snapshots" if stream.supersedes else "differentials",
        )

    @property
    def nbytes(self) -> int:
        records = self.records * self.record_nbytes + self.record_nbytes_max
        return self.bases * self.base_nbytes + CONSTANTS_AT_MOST * self.constants_nbytes + records

    def check(self, limit_bytes: int, config: CheckpointConfig, *, tier: str) -> None:
        """Errors: ``CapacityExceeded`` if a tier of ``limit_bytes`` cannot hold this."""
        if self.nbytes > limit_bytes:
            constants = bytes_text(self.constants_nbytes)
            once = f", what does not change ({constants}, at times twice)" if self.constants_nbytes else ""
            raise CapacityExceeded(
                f"the first tier must hold {self.bases} bases of {bytes_text(self.base_nbytes)}{once} and "
                f"{self.records} {self.kind} of {bytes_text(self.record_nbytes)}, {bytes_text(self.nbytes)} in all, "
                f"but has room for {bytes_text(limit_bytes)}: give it more, or lower base_every (now "
                f"{config.base_every})",
                tier=tier,
            )

    def reservations(self, room: int, base_every: int) -> list[tuple[int, int]]:
        """(bytes, count) of the reservations to come, in the order of need, beside the opening base and its constants.
        If not all fit into ``room``, bases come first: what one costs that is not ready is felt most."""
        bases = min(self.bases - 1, room // self.base_nbytes)
        records = min(self.records, (room - bases * self.base_nbytes) // self.record_nbytes_max)
        soon = min(records, base_every)
        return [(self.record_nbytes_max, soon), (self.base_nbytes, bases), (self.record_nbytes_max, records - soon)]


def refuse_gaps(config: CheckpointConfig, world_size: int, *, shared: bool) -> None:
    """Errors: ``ConfigurationError`` if ranks may go on after failed saves, and nothing tells one rank which bases
    the others still have: it would delete the last one that all of them share."""
    if config.on_save_error == "warn" and world_size > 1 and not shared:
        raise ConfigurationError(
            f'on_save_error="warn" with {world_size} ranks needs a tier that all of them share, such as '
            'nvme:///shared/path?survives=rack; add one, or use on_save_error="fail"'
        )


async def prepare_memory(tier: OpenTier, demand: Demand, base_every: int) -> None:
    """Have the first tier's memory touched and mapped, as far as there is room, or the tier keeps ready. That takes as
    long as the memory is large, so it is done beside training, after the opening base has got its own. What is not
    ready yet costs its first use more."""
    driver = tier.driver
    try:
        usage = await driver.usage()
        if usage.free_bytes is None or usage.limit_bytes is None:
            return
        try:
            await driver.prepare_reservations(demand.reservations(usage.free_bytes, base_every))
        except CapacityExceeded:  # it keeps less than that beside its objects
            room = min(usage.free_bytes, usage.limit_bytes // 2)
            await driver.prepare_reservations(demand.reservations(room, base_every))
    except TierError as error:
        log.warning("not all memory is prepared, so that some captures take longer: %s", error)


async def room_at_the_end(ranks: Ranks, tiers: OpenHierarchy) -> Usage | None:
    """What the last tier holds and may hold, where all ranks share it and it says so soon."""
    last = tiers.tiers[-1]
    if not last.role.shared:
        return None
    try:
        asking = last.driver.usage()
        return await ranks.scheduler.call(asking, what=f"the usage of {last.name}", deadline_s=USAGE_S_MAX)
    except TierCheckError as error:
        log.debug("%s", error)
        return None
