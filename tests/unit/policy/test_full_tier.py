"""What goes to a tier that has refused something for want of room, what stays there, and what nobody waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from tiercheck.keys import CommitKey, Key, ShardKey
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import Committed, EveryNth, Keep, KeepLast, RetentionPolicy
from tiercheck.policy.recovery.agreement import NO_MARK
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives

FULL = frozenset({1})
DURABLE = Role(1, "nvme", Survives.RACK)


def seen(
    memory: Iterable[Key], there: Iterable[Key], *, role: Role = DURABLE, short: frozenset[int] = FULL
) -> Observation:
    contents = tuple(Contents.of((key, 100) for key in keys) for keys in (memory, there))
    roles = (Role(0, "shm", Survives.PROCESS), role)
    return Observation(roles, contents, 0, 1, 1, Lineage(((1, None),)), short_of_room=short)


def base(version: int) -> ShardKey:
    return ShardKey.base(1, version, 0)


def batch(first: int, last: int) -> ShardKey:
    return ShardKey.differential(1, first, last, 0)


def records(first: int, last: int) -> list[ShardKey]:
    return [batch(version, version) for version in range(first, last + 1)]


def committed(*versions: int) -> list[Key]:
    return [key for version in versions for key in (base(version), CommitKey(1, version))]


def targets(placement: Placement, view: Observation) -> list[ShardKey]:
    return [each.target for each in placement.transfers(view)]


def test_while_a_base_is_to_come_nothing_takes_its_room() -> None:
    memory, there = [base(150), *records(31, 155)], [*committed(30)]
    assert targets(Placement(5, interval=10), seen(memory, there)) == [base(150)]
    assert batch(151, 155) in targets(Placement(5, interval=10), seen(memory, there, short=frozenset()))


def test_batches_go_one_after_the_other_and_no_further_than_to_the_next_base() -> None:
    placement, memory = Placement(5, interval=10), [base(150), *records(31, 165)]
    there = committed(30, 150)
    for following in ([batch(31, 35), batch(151, 155)], [batch(36, 40), batch(156, 160)], []):
        assert targets(placement, seen(memory, there)) == following
        there += following
    assert len(targets(placement, seen(memory, committed(30, 150), short=frozenset()))) == 27, "nothing is left out"


def test_so_does_a_directory_of_the_node_and_no_neighbours_memory() -> None:
    """It was filled with differentials instead, until no base had room any more."""
    placement, memory, there = Placement(5, interval=10), [base(20), *records(11, 25)], [base(0), base(10)]
    directory, neighbour = Role(1, "nvme", Survives.PROCESS), Role(1, "peer", Survives.NODE)
    assert targets(placement, seen(memory, there, role=directory)) == [base(20)]
    assert targets(placement, seen(memory, there, role=neighbour)) == [base(20), *records(11, 25)]
    there += [base(20), *records(11, 20)]
    memory += records(26, 35)
    assert targets(placement, seen(memory, there, role=directory)) == records(21, 30), (
        "no further than to the next base"
    )
    there += [*records(21, 30), base(30)]
    assert targets(placement, seen(memory, there, role=directory)) == records(31, 35)


def test_the_next_base_is_the_next_one_that_the_tier_is_to_get() -> None:
    placement = Placement(5, EveryNth("nvme", 3), interval=10)
    there = [*committed(30, 150), *(batch(each, each + 4) for each in range(31, 56, 5))]
    assert targets(placement, seen([base(150), *records(31, 100)], there)) == [batch(56, 60)]
    assert targets(placement, seen([base(150), *records(31, 100)], [*there, batch(56, 60)])) == []


def test_what_leads_nowhere_or_too_far_makes_room_for_the_next_base() -> None:
    there = [*committed(30, 150), *(batch(each, each + 4) for each in (31, 36, 41, 61, 151, 161))]

    def gone(retention: Retention, *, short: frozenset[int] = FULL) -> list[Key]:
        return retention.reclaimable(seen([base(150), *records(151, 165)], there, short=short))[1]

    placement = Placement(5, interval=10)
    assert gone(Retention(KeepLast(2), placement)) == [batch(41, 45), batch(61, 65)]
    assert gone(Retention(KeepLast(2), placement), short=frozenset()) == [], "there is room for it"

    class Keeps45(RetentionPolicy):
        def keep(self, seen: Committed) -> Keep:
            return Keep(frozenset({45}), since=30)

    assert gone(Retention(Keeps45(), placement)) == [batch(61, 65)], "a way that is to stay"


def test_what_other_tiers_have_in_between_may_still_come() -> None:
    there = [*committed(30, 50), batch(36, 40)]
    view = seen([base(50), *records(31, 35)], there)
    assert Retention(placement=Placement(5, interval=10)).reclaimable(view)[1] == []
    without = seen([base(50), *records(31, 34)], there)
    assert Retention(placement=Placement(5, interval=10)).reclaimable(without)[1] == [batch(36, 40)]


def test_memory_waits_for_no_tier_with_what_leads_nowhere_there() -> None:
    """The neighbour has base 20 and misses version 24 for ever, and its next base is a long way off."""
    neighbour = Role(1, "peer", Survives.NODE)
    memory, there = [base(25), *records(25, 27)], [base(20), *records(21, 23)]
    placement = Placement(5, interval=20, fold_every=5)
    view = seen(memory, there, role=neighbour, short=frozenset())
    assert targets(placement, view) == []
    assert not placement.lacking(view, batch(25, 25), view.roles[1])
    assert placement.reached(view)["peer"] == 24, "what is told is what is there"
    unseen = seen(memory, [], role=neighbour, short=frozenset())
    assert placement.lacking(unseen, batch(25, 25), view.roles[1]), "nobody knows what it has"


# Without a shared tier


def unshared(memory: Sequence[Key], mark: int, *, pressed: bool) -> Observation:
    contents = (Contents.of((key, 100) for key in memory),) * 2
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE))
    return Observation(roles, contents, 0, 2, 1, Lineage(((1, None),)), mark, under_pressure=pressed)


@pytest.mark.parametrize(("mark", "records_to_it"), [(NO_MARK, []), (3, records(1, 3))])
def test_bases_between_the_mark_and_the_newest_two_go_when_there_is_no_room(
    mark: int, records_to_it: list[ShardKey]
) -> None:
    """They were needed: the ranks agree on a mark when one is due."""
    retention = Retention(placement=Placement(5, interval=50))
    memory = [*map(base, (0, 10, 20, 30, 40)), *records_to_it]
    at_ease, pressed = (unshared(memory, mark, pressed=pressed) for pressed in (False, True))
    assert retention.reclaimable(at_ease) == {0: [], 1: []}
    assert retention.reclaimable(pressed) == {0: [base(10), base(20)], 1: [base(10), base(20)]}
    assert not retention.has_room(at_ease)
    assert retention.has_room(pressed), "three stay, and the next one may come"
    assert not retention.has_room(unshared([base(0), base(10), base(20)], mark, pressed=False))


def test_before_a_mover_is_told_of_a_mark_nothing_goes() -> None:
    retention = Retention(placement=Placement(5, interval=50))
    seen = replace(unshared([*map(base, (0, 10, 20, 30, 40))], NO_MARK, pressed=True), mark=None)
    assert retention.reclaimable(seen)[0] == []
