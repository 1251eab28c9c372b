"""What each tier behind the first one holds of one rank: worked out before the first step.

A neighbour's memory gets the bases that are due, and each differential. It lets them go by the rules of the first tier
(:mod:`tiercheck.policy.watermark`), but gets none of the bases that are folded in between. So it usually holds two
bases, the differentials of one interval, and a few more. It holds a third base after a restart, or while a base takes
long to reach the durable tier. If the durable tier lags, training waits before a third base would drain: until then
there may be three bases, and the differentials of three intervals.

In bytes a trained parameter, with Adam in fp32 (12 a base), a base each 50 versions, in batches of 5::

    2 bases x 12 + (50 + 3) differentials x 2 (bf16) or 4 (fp32) = 130 or 236, while the durable tier keeps up
    3 bases x 12 + (50 + 3) differentials x 2 (bf16) or 4 (fp32) = 142 or 248, the least room that is enough
    3 bases x 12 + (150 + 5) differentials x 2 (bf16) or 4 (fp32) = 346 or 656, while it lags as far as it may

A shared tier holds what retention keeps, and the next base while that is being copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck.keys import Stream
from tiercheck.policy.compose.placement import Candidate, PlacementPolicy
from tiercheck.policy.compose.retention import AnyKeep, KeepLast, RetentionPolicy
from tiercheck.policy.first_tier import BASES_USUAL, CONSTANTS_MAX, RECORDS_BESIDE, Sizes, holding
from tiercheck.policy.guard import ask_placement
from tiercheck.policy.observation import Role

__all__ = ["ObjectCounts", "TierNeed", "tier_need"]


@dataclass(frozen=True)
class ObjectCounts:
    """What a tier holds of one rank, counted in objects."""

    bases: int
    records: int
    """Differentials or snapshots."""

    def nbytes(self, sizes: Sizes) -> int:
        """What they take, with the constants that the bases refer to."""
        constants = CONSTANTS_MAX * sizes.constants_nbytes
        return self.bases * sizes.base_nbytes + constants + self.records * sizes.record_nbytes


@dataclass(frozen=True)
class TierNeed:
    """What one rank needs in a tier."""

    least: ObjectCounts
    """What a recovery needs, and what is copied next. A tier with less room is refused."""
    usual: ObjectCounts
    """What the tier holds while all tiers keep up."""


def tier_need(
    role: Role,
    sizes: Sizes,
    *,
    placing: PlacementPolicy,
    retaining: RetentionPolicy,
    interval: int,
    batch: int,
    each_commits: bool,
    agrees: bool = False,
    encodes: bool = False,
) -> TierNeed:
    """What one rank needs in a tier of this role. ``each_commits``, ``agrees``: see
    :func:`~tiercheck.policy.first_tier.holding`. ``encodes``: the tier has a codec of its own. Then the size of its
    records is not known beforehand, and the least counts bases only."""
    if role.shared:
        kept, ahead = kept_last(retaining), 2 if sizes.supersedes else RECORDS_BESIDE + batch
        spans = 0 if sizes.supersedes else interval
        least, usual = ObjectCounts(2, spans + ahead), ObjectCounts(kept + 1, kept * spans + ahead)
    else:
        held = holding(sizes, interval=interval, batch=batch, fold_every=0, each_commits=each_commits, agrees=agrees)
        least, usual = ObjectCounts(held.bases_max, held.records_usual), ObjectCounts(BASES_USUAL, held.records_usual)
    stream = Stream.SNAPSHOT if sizes.supersedes else Stream.DIFFERENTIAL
    if not ask_placement(placing, Candidate(role.name, role.survives, stream, 1, 1, 0))[0]:
        return TierNeed(ObjectCounts(least.bases, 0), ObjectCounts(usual.bases, 0))
    return TierNeed(ObjectCounts(least.bases, 0) if encodes else least, usual)


def kept_last(policy: RetentionPolicy) -> int:
    """How many of the newest bases this policy keeps at least."""
    match policy:
        case KeepLast(n):
            return n
        case AnyKeep(policies):
            return max(map(kept_last, policies))
    return 1
