"""What the first tier holds of one rank: worked out before the first step, within the room that there is.

A base stays until the next one is whole and no rank needs the one before (:mod:`tiercheck.policy.watermark`). So there
are two while one is being made, and a third one when a restart adds its opening base, or while a base takes longer on
its way to the durable tier than the next ones take to come. If no tier that all ranks share commits bases, three are
usual: two are kept here. If several ranks agree on a mark instead, there may be four: the one that leads to the mark
stays too, and a rank that needs bases before the next one is due cannot move it. Differentials stay until a base after
them is there, and every other tier that is to hold them has them.

In bytes a trained parameter, with Adam in fp32 (12 a base), folded every 5 versions, in batches of 5::

    2 bases x 12 + (5 + 3) differentials x 2 (bf16) or 4 (fp32) = 40 or 56, while the tiers keep up
    3 bases x 12 + (5 + 3) differentials x 2 (bf16) or 4 (fp32) = 52 or 68, the least room that is enough

With more room, more differentials may wait for a tier that lags. When the room is used up, training waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiercheck.policy.commit import lagging
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Placement, own_bases
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, SNAPSHOTS_IN_VOLATILE_TIERS

__all__ = [
    "BASES_MAX",
    "BASES_USUAL",
    "CONSTANTS_MAX",
    "FOLD_EVERY_MIN",
    "RECORDS_BESIDE",
    "Holding",
    "Sizes",
    "awaits_base",
    "held_up_by",
    "holding",
]

BASES_USUAL = 2
"""The newest one, and the next one while it is being made."""
BASES_MAX = BASES_IN_VOLATILE_TIERS + 1
CONSTANTS_MAX = 2
"""They are there once, and once more while others take their place."""
RECORDS_BESIDE = 3
"""Beside those that a base or a batch is made of: one is being captured, one comes while the base is made, and one
while the tiers are told."""
UNFOLDED_NBYTES = 64 << 20
"""Of differentials: so many bytes may wait until what folds is ready, also if that is more than the usual number."""
FOLD_EVERY_MIN = 2
"""Of two versions in a row, one is never that of a folded base: a base that is captured there goes to all tiers."""


@dataclass(frozen=True)
class Sizes:
    """Of what one rank brings into the first tier."""

    base_nbytes: int
    record_nbytes: int
    """What a published record keeps."""
    record_nbytes_max: int
    """What is reserved for one."""
    constants_nbytes: int = 0
    """What bases refer to."""
    supersedes: bool = False
    """Records are snapshots: each one supersedes those before it."""
    on_their_way: int = 0
    """Records that may still be copied from a GPU when the next one is begun."""


@dataclass(frozen=True)
class Holding:
    """What one rank may hold in the first tier."""

    sizes: Sizes
    fold_every: int
    """Versions between the bases that are folded for this tier alone; 0: none are."""
    records_usual: int
    """While the other tiers keep up."""
    records_lagging: int
    """While they lag as far as bases may."""
    records_max: int | None = None
    """Before there are more, training waits; ``None``: they are not counted."""
    bases_usual: int = BASES_USUAL
    """While the other tiers keep up."""
    bases_max: int = BASES_MAX

    @property
    def records_unfolded(self) -> int:
        """So many there may be while what folds is being prepared. Up to ``UNFOLDED_NBYTES`` is worth no wait."""
        return max(self.records_usual, self._records_little)

    @property
    def records_stood_in(self) -> int:
        """After so many a base is captured while what folds is being prepared. Up to ``UNFOLDED_NBYTES`` is worth
        no base."""
        return max(self.fold_every, self._records_little)

    @property
    def _records_little(self) -> int:
        return UNFOLDED_NBYTES // max(1, self.sizes.record_nbytes)

    @property
    def nbytes_usual(self) -> int:
        return self.nbytes(self.bases_usual, self.records_usual)

    @property
    def nbytes_least(self) -> int:
        """The least room that is enough."""
        return self.nbytes(self.bases_max, self.records_usual)

    @property
    def nbytes_max(self) -> int:
        return self.nbytes(self.bases_max, self.records_lagging)

    def nbytes(self, bases: int, records: int) -> int:
        sizes = self.sizes
        # Of the one that is being captured, and of those that are not there yet.
        ahead = (1 + sizes.on_their_way) * max(0, sizes.record_nbytes_max - sizes.record_nbytes)
        constants = CONSTANTS_MAX * sizes.constants_nbytes
        return bases * sizes.base_nbytes + constants + records * sizes.record_nbytes + ahead


def holding(
    sizes: Sizes,
    *,
    interval: int,
    batch: int,
    fold_every: int,
    each_commits: bool,
    agrees: bool = False,
    room_nbytes: int | None = None,
) -> Holding:
    """What a rank holds if its share of the tier is ``room_nbytes``; ``None``: nobody knows.

    ``each_commits``: each base that is due is to be committed in a tier that all ranks share. Else a base does not make
    the one before superfluous. ``agrees``: there is no such tier, and the ranks agree on a mark instead. If even the
    least does not fit, :attr:`Holding.nbytes_least` is more than the room.
    """
    records_lagging = BASES_MAX * interval + max(2, batch)
    if sizes.supersedes:
        records = 2 * SNAPSHOTS_IN_VOLATILE_TIERS + 1
        return Holding(sizes, 0, records, records)
    if not (fold_every or each_commits):
        return Holding(sizes, 0, records_lagging, records_lagging, bases_usual=BASES_MAX, bases_max=BASES_MAX + agrees)
    every = fold_every
    while True:
        apart = every or interval
        # A batch that a base lies in the middle of goes to the other tiers when its last version is there.
        least = max(apart, batch) + RECORDS_BESIDE + sizes.on_their_way + (batch - 1 if apart % batch else 0)
        found = Holding(sizes, every, least, max(least, records_lagging))
        if room_nbytes is None:
            return found
        if found.nbytes_least <= room_nbytes or every <= max(FOLD_EVERY_MIN, batch):
            more = max(0, room_nbytes - found.nbytes_least) // max(1, sizes.record_nbytes)
            most = least + more
            return replace(found, records_lagging=min(found.records_lagging, most), records_max=most)
        every -= 1


def held_up_by(seen: Observation, placement: Placement) -> str:
    """What the oldest differential in the first tier waits for, in words; empty if there is none."""
    held = seen.contents[0].differentials(seen.rank)
    if not held:
        return ""
    oldest = held[0]
    if oldest.generation == seen.generation:
        if lacking := [role.name for role in seen.roles[1:] if placement.lacking(seen, oldest, role)]:
            return f"version {oldest.first} has not reached {' and '.join(lacking)}"
        if placement.fold_every and awaits_base(seen, placement):
            return f"no base after version {oldest.first} is folded yet"
    return lagging(seen)


def awaits_base(seen: Observation, placement: Placement) -> bool:
    """Whether the oldest differential in the first tier waits for a base after it, and for no other tier."""
    held = seen.contents[0].differentials(seen.rank)
    if not held or held[0].generation != seen.generation:
        return False
    newest = max((base.last for base in own_bases(seen, seen.contents[0])), default=-1)
    return newest < held[0].last and not any(placement.lacking(seen, held[0], role) for role in seen.roles[1:])
