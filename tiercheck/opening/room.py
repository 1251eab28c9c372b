"""What every tier will hold: logged before the first step. A tier that is too small for the least is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, TierCheckError
from tiercheck.hierarchy import OpenHierarchy, OpenTier
from tiercheck.opening.admission import Demand
from tiercheck.opening.policies import JobPolicies
from tiercheck.policy.first_tier import Holding, Sizes
from tiercheck.policy.observation import Role
from tiercheck.policy.other_tiers import TierNeed, tier_need
from tiercheck.recovery.ranks import Ranks
from tiercheck.types import Usage, bytes_text

__all__ = [
    "TierRoom",
    "check_rooms",
    "first_room",
    "room_behind",
    "rooms_text",
    "tell_rooms",
    "tier_rooms",
    "too_little_room",
]

log = logging.getLogger(__name__)

USAGE_S_MAX = 5.0
"""The longest wait for what a tier holds. A store that must list everything may take longer: then its room counts as
not known."""


@dataclass(frozen=True)
class TierRoom:
    """What a tier will hold, of all ranks that store objects there, and what it has room for."""

    name: str
    url: str
    ranks: int
    """How many store objects there."""
    parameters: int
    """How many parameters one rank trains; 0: not known."""
    least_nbytes: int
    """Bytes of all those ranks. With less room the job does not fit."""
    usual_nbytes: int
    """Bytes of all those ranks while the tiers keep up."""
    need: TierNeed | None = None
    """What one rank needs there. ``None``: this is the first tier, which :class:`Demand` checks."""
    shared: bool = False
    limit_bytes: int | None = None
    """What the tier may hold; ``None``: not known."""

    @property
    def holds_least(self) -> bool:
        """Whether there is room for the least; also if the limit is not known."""
        return self.limit_bytes is None or self.least_nbytes <= self.limit_bytes

    def a_parameter(self, nbytes: int) -> str:
        """Bytes a trained parameter, in words."""
        return f"{nbytes / self.ranks / self.parameters:.0f}" if self.parameters else "?"


async def tier_rooms(
    ranks: Ranks,
    tiers: OpenHierarchy,
    demand: Demand,
    policies: JobPolicies,
    sizes: Sequence[Sizes],
    first_limit: int | None,
    *,
    agrees: bool,
) -> list[TierRoom]:
    """The first tier and those behind it, in order. ``sizes``: of every rank of the job. ``agrees``: as of
    :func:`~tiercheck.policy.first_tier.holding`. If all ranks share a tier,
    rank 0 alone asks what it has room for."""
    first, sizes_here = tiers.first, [demand.holding.sizes] * demand.ranks
    found = [first_room(first.role, first.driver.url, demand.holding, demand.ranks, demand.parameters, first_limit)]
    for tier in tiers.tiers[1:]:
        need = tier_need(
            tier.role,
            demand.holding.sizes,
            placing=policies.placing,
            retaining=policies.retaining,
            interval=policies.cadence.interval,
            batch=policies.batch,
            each_commits=policies.each_commits(tiers),
            agrees=agrees,
            encodes=bool(tier.codec),
        )
        shared = tier.role.shared
        usage = await usage_of(ranks, tier) if ranks.rank == 0 or not shared else None
        limit = None if usage is None else usage.limit_bytes
        bringing = sizes if shared else sizes_here
        found.append(room_behind(tier.role, tier.driver.url, need, bringing, demand.parameters, limit))
    return found


def first_room(role: Role, url: str, held: Holding, ranks: int, parameters: int, limit_bytes: int | None) -> TierRoom:
    """Of the first tier, in which each of the ranks holds ``held``."""
    least, usual = ranks * held.nbytes_least, ranks * held.nbytes_usual
    return TierRoom(role.name, url, ranks, parameters, least, usual, limit_bytes=limit_bytes)


def room_behind(
    role: Role, url: str, need: TierNeed, sizes: Sequence[Sizes], parameters: int, limit_bytes: int | None
) -> TierRoom:
    """Of a tier behind the first one. ``sizes``: of each rank that stores objects there."""
    least, usual = sum(map(need.least.nbytes, sizes)), sum(map(need.usual.nbytes, sizes))
    return TierRoom(role.name, url, len(sizes), parameters, least, usual, need, role.shared, limit_bytes)


async def usage_of(ranks: Ranks, tier: OpenTier) -> Usage | None:
    """What the tier holds and may hold; ``None`` if it fails, or does not answer within :data:`USAGE_S_MAX`."""
    try:
        asking = tier.driver.usage()
        return await ranks.scheduler.call(asking, what=f"the usage of {tier.name}", deadline_s=USAGE_S_MAX)
    except TierCheckError as error:
        log.debug("%s", error)
        return None


def check_rooms(rooms: Sequence[TierRoom], config: CheckpointConfig) -> None:
    """Refuse, for a job that begins, a tier behind the first one without room for the least. Errors:
    ``CapacityExceeded``."""
    for room in rooms:
        if room.need is None or room.limit_bytes is None or room.holds_least:
            continue
        least = room.need.least
        each = f" of each of {room.ranks} ranks" if room.ranks > 1 else ""
        a_parameter = f" ({room.a_parameter(room.least_nbytes)} bytes a trained parameter)" if room.parameters else ""
        records = f" and {least.records} differentials or snapshots" if least.records else ""
        raise CapacityExceeded(
            f"{room.name} must hold at least {least.bases} bases{records}{each}, "
            f"{bytes_text(room.least_nbytes)} in all{a_parameter}, but has room for {bytes_text(room.limit_bytes)}: "
            f"{' or '.join(ways_out(room, config))}",
            tier=room.url,
        )


def ways_out(room: TierRoom, config: CheckpointConfig) -> list[str]:
    """What the user may do so that the least fits."""
    ways = ["give it more room (free space, size=, or the neighbour's 'tiercheck agent --memory')"]
    if room.need is not None and room.need.least.records:
        ways.append(f"lower base_every (now {config.base_every})")
        if room.shared:
            ways.append(f'send it bases only (placement="bases_only?tier={room.name}")')
    return ways


def too_little_room(rooms: Sequence[TierRoom], config: CheckpointConfig) -> str | None:
    """A warning that names the tiers without room for what they usually hold, or not even for the least; ``None`` if
    there are none."""
    found: list[str] = []
    for room in rooms:
        if room.need is None or room.limit_bytes is None or room.usual_nbytes <= room.limit_bytes:
            continue
        has = f"{room.name} has room for {bytes_text(room.limit_bytes)}, but"
        if room.holds_least:
            lower = f", or lower keep_last (now {config.keep_last})" if room.shared else ""
            found.append(f"{has} usually holds {bytes_text(room.usual_nbytes)}: give it more room{lower}")
        else:
            least = f"must hold at least {bytes_text(room.least_nbytes)}, so that training will wait for it"
            found.append(f"{has} {least}: {' or '.join(ways_out(room, config))}")
    return "; ".join(found) or None


def tell_rooms(rooms: Sequence[TierRoom]) -> None:
    """Log what each tier will hold."""
    log.info("%s", rooms_text(rooms))


def rooms_text(rooms: Sequence[TierRoom]) -> str:
    """A table with one row for each tier."""
    rows = [("tier", "ranks", "least", "usual", "bytes a parameter", "room")]
    for room in rooms:
        bytes_each = f"{room.a_parameter(room.least_nbytes)} / {room.a_parameter(room.usual_nbytes)}"
        limit = "not known" if room.limit_bytes is None else bytes_text(room.limit_bytes)
        least, usual = bytes_text(room.least_nbytes), bytes_text(room.usual_nbytes)
        rows.append((room.name, str(room.ranks), least, usual, bytes_each, limit))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n  ".join(["what each tier will hold:", *lines])
