"""What the tiers behind the first one hold: never more than was worked out before the first step."""

from __future__ import annotations

import pytest

from tiercheck.keys import CommitKey, Key, ShardKey, Stream
from tiercheck.policy.first_tier import BASES_MAX, BASES_USUAL, Sizes, holding
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.other_tiers import ObjectCounts, TierNeed, tier_need
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import BasesOnly, Everywhere, KeepEvery, KeepLast, PlacementPolicy
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention
from tiercheck.types import Survives

ROLES = tuple(
    Role(index, name, survives)
    for index, (name, survives) in enumerate(
        [("shm", Survives.PROCESS), ("peer", Survives.NODE), ("nvme", Survives.RACK)]
    )
)
LINEAGE = Lineage.of([Branch(1, 0, 0, 1, "0" * 16)])
SIZES = Sizes(base_nbytes=12, record_nbytes=4, record_nbytes_max=4)


def need(role: Role, placing: PlacementPolicy | None = None, *, encodes: bool = False) -> TierNeed:
    return tier_need(
        role,
        SIZES,
        placing=placing or Everywhere(),
        retaining=KeepLast(2) | KeepEvery(1000),
        interval=50,
        batch=5,
        each_commits=True,
        encodes=encodes,
    )


def most_held(*, interval: int, batch: int, fold_every: int, lags: bool) -> tuple[int, int]:
    """The most bases and differentials that the neighbour has, if it keeps up. The durable tier commits a base two
    versions after it is due; if it ``lags``, only when training waits for that."""
    placement = Placement(batch, interval=interval, fold_every=fold_every)
    first, peer, durable = tiers = {ShardKey.base(1, 0, 0)}, set[Key](), set[Key]()
    bases = differentials = 0

    def seen() -> Observation:
        return Observation(ROLES, tuple(Contents.of((key, 1) for key in keys) for keys in tiers), 0, 1, 1, LINEAGE)

    def move(commits: bool) -> None:
        nonlocal bases, differentials
        for transfer in placement.transfers(seen()):
            base = transfer.target.stream is Stream.BASE
            if transfer.target_tier == 1 or commits or not base:
                tiers[transfer.target_tier].add(transfer.target)
                if transfer.target_tier == 2 and base:
                    durable.add(CommitKey(1, transfer.target.first))
        bases = max(bases, len(Contents.of((key, 1) for key in peer).bases(0)))
        differentials = max(differentials, len(Contents.of((key, 1) for key in peer).differentials(0)))
        for index, keys in Retention(placement=placement).reclaimable(seen()).items():
            tiers[index].difference_update(keys)

    for version in range(1, 6 * interval + 1):
        first.add(ShardKey.differential(1, version, version, 0))
        if fold_every and version % fold_every == 0 and version % interval:
            first.add(ShardKey.base(1, version, 0))
        if version % interval == 0:
            while placement.undrained(seen()) >= BASES_IN_VOLATILE_TIERS:
                move(True)
            first.add(ShardKey.base(1, version, 0))
        move(not lags and version % interval >= min(2, interval - 1))
    return bases, differentials


@pytest.mark.parametrize("fold_every", [0, 5])
@pytest.mark.parametrize(("interval", "batch"), [(20, 5), (20, 1), (7, 5)])
def test_a_neighbour_holds_what_was_worked_out(interval: int, batch: int, fold_every: int) -> None:
    """However far the durable tier lags, and whether bases are folded in between."""
    held = holding(SIZES, interval=interval, batch=batch, fold_every=0, each_commits=True)
    bases, differentials = most_held(interval=interval, batch=batch, fold_every=fold_every, lags=False)
    assert bases <= BASES_USUAL
    assert differentials <= held.records_usual
    bases, differentials = most_held(interval=interval, batch=batch, fold_every=fold_every, lags=True)
    assert bases <= BASES_MAX
    assert 2 * interval <= differentials <= held.records_lagging


def test_each_tier_needs_what_it_is_to_hold() -> None:
    _, peer, nvme = ROLES
    assert need(peer) == TierNeed(ObjectCounts(3, 53), ObjectCounts(2, 53))
    assert (need(peer).least.nbytes(SIZES), need(peer).usual.nbytes(SIZES)) == (248, 236)
    assert need(nvme) == TierNeed(ObjectCounts(2, 58), ObjectCounts(3, 108))
    assert need(nvme, BasesOnly("nvme")) == TierNeed(ObjectCounts(2, 0), ObjectCounts(3, 0))
    assert need(nvme, encodes=True) == TierNeed(ObjectCounts(2, 0), ObjectCounts(3, 108)), (
        "nobody knows how little it takes there"
    )
