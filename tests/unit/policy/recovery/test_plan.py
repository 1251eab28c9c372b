"""From which tier each object is read: the cheapest that has it. Other nodes' memory comes before remote storage."""

from __future__ import annotations

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Availability, Plan, availability_of_nodes, plan

POINT = RecoveryPoint(1, 4, 7)
BASE = ShardKey.base(1, 4, 0)
MEMORY, STORE, OTHER_NODE = 0, 1, 2
ORDER = (MEMORY, OTHER_NODE, STORE)


def steps(first: int, last: int) -> ShardKey:
    return ShardKey.differential(1, first, last, 0)


def test_other_nodes_memory_is_read_after_ones_own_and_before_what_all_share() -> None:
    copies = {
        *(Copy(STORE, key) for key in (BASE, steps(5, 7))),
        *(Copy(OTHER_NODE, key) for key in (BASE, steps(5, 5), steps(6, 6))),
        Copy(MEMORY, steps(5, 5)),
    }
    chosen = plan(POINT, 0, copies, ORDER)
    assert isinstance(chosen, Plan)
    assert [source.tier for source in chosen.sources] == [OTHER_NODE, MEMORY, OTHER_NODE, STORE]
    without = plan(POINT, 0, copies)
    assert isinstance(without, Plan)
    assert [source.tier for source in without.sources] == [STORE, MEMORY, STORE]


def test_memory_that_gives_several_ranks_the_same_has_one_row() -> None:
    whole, some = ("memory of b", True, ()), ("a", False, ((5, 6),))
    rows = availability_of_nodes([(whole,), (), (whole, some)])
    assert rows == (
        Availability(((2, 2),), "a", False, ((5, 6),)),
        Availability(((0, 0), (2, 2)), "memory of b", True, ()),
    )
