"""What placement policies leave out of a tier, and what they cannot leave out."""

from __future__ import annotations

from tests.unit.policy.test_placement import base, batch, committed, seen
from tiercheck.keys import ShardKey
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import BasesOnly, EveryNth, KeepLast, PlacementPolicy
from tiercheck.policy.watermark import Retention

RACK = "nvme"


def targets(policy: PlacementPolicy, memory: list[ShardKey], durable: list[ShardKey]) -> list[ShardKey]:
    placement = Placement(5, policy, interval=10)
    return [each.target for each in placement.transfers(seen(memory, durable)) if each.target_tier == 1]


def records(first: int, last: int) -> list[ShardKey]:
    return [batch(version, version) for version in range(first, last + 1)]


def test_a_tier_for_bases_gets_no_differentials() -> None:
    memory = [base(0), *records(1, 10), base(10)]
    assert targets(BasesOnly(RACK), memory, []) == [base(0), base(10)]
    assert targets(BasesOnly("another"), memory, [])[-1] == batch(6, 10)


def test_every_nth_base_is_counted_by_intervals() -> None:
    memory = [base(20), base(30), base(40), *records(1, 40)]
    assert targets(EveryNth(RACK, 3), memory, [base(0)])[:1] == [base(30)]
    assert targets(BasesOnly(RACK) & EveryNth(RACK, 4), memory, [base(0)]) == [base(40)]
    assert len([key for key in targets(EveryNth(RACK, 3), memory, [base(0)]) if key.first != key.last]) == 8


def test_the_first_base_of_a_generation_goes_everywhere() -> None:
    assert targets(EveryNth(RACK, 3), [base(13), base(20), *records(14, 20)], [])[:2] == [base(13), base(20)]


def test_a_base_that_no_differential_leads_to_goes_where_differentials_go() -> None:
    memory = [base(10), *records(11, 16), base(18), *records(19, 20), base(20)]
    assert base(18) in targets(EveryNth(RACK, 3), memory, [base(0)])
    assert base(20) not in targets(EveryNth(RACK, 3), memory, [base(0)])
    assert base(18) not in targets(BasesOnly(RACK) & EveryNth(RACK, 3), memory, [base(0)])


def test_a_tier_gets_a_base_after_a_hundred_intervals_at_the_latest() -> None:
    class Never(PlacementPolicy):
        def wants(self, shard: object) -> bool:
            return False

    memory = [base(990), base(1000), *records(981, 1000)]
    assert targets(Never(), memory, [base(0)]) == [base(1000)]


def test_what_a_tier_is_not_to_have_is_not_waited_for_in_memory() -> None:
    """Memory keeps two bases and what follows the older one, as when the tier holds everything."""
    policy = BasesOnly(RACK) & EveryNth(RACK, 5)
    placement = Placement(5, policy, interval=10)
    retention = Retention(KeepLast(2), placement)
    memory = [base(10), *records(11, 20), base(20), *records(21, 30), base(30), *records(31, 34)]
    observation = seen(memory, committed(0))
    assert placement.undrained(observation) == 0
    assert set(retention.reclaimable(observation)[0]) == {base(10), *records(11, 20)}
    assert retention.has_room(observation)
