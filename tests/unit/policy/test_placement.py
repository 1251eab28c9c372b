"""What is copied, committed and reclaimed, decision by decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from tiercheck import keys
from tiercheck.keys import CommitKey, Key, LineageKey, MarkerKey, MetricKey, ShardKey
from tiercheck.policy.commit import superseded, to_commit, to_mark
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.observation import Contents, Copy, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import BasesOnly, KeepEvery, KeepLast
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.recovery.plan import Plan, Unreachable, availability, held, plan
from tiercheck.policy.watermark import Retention, watermark
from tiercheck.types import Survives

FIRST = Lineage(((1, None),))
SECOND = Lineage(((2, None), (1, 25)))
MEMORY = Role(0, "shm", Survives.PROCESS)
DURABLE = Role(1, "nvme", Survives.RACK)


def seen(memory: Iterable[Key], durable: Iterable[Key] = (), *, rank: int = 0, world: int = 1) -> Observation:
    contents = tuple(Contents.of((key, 100) for key in keys) for keys in (memory, durable))
    return Observation((MEMORY, DURABLE), contents, rank, world, generation=1, lineage=FIRST)


def base(version: int, rank: int = 0, generation: int = 1) -> ShardKey:
    return ShardKey.base(generation, version, rank)


def single(version: int, rank: int = 0) -> ShardKey:
    return ShardKey.differential(1, version, version, rank)


def batch(first: int, last: int) -> ShardKey:
    return ShardKey.differential(1, first, last, 0)


def committed(version: int, generation: int = 1) -> list[Key]:
    return [base(version, 0, generation), CommitKey(generation, version)]


def test_a_base_is_copied_once_and_an_older_one_not_at_all() -> None:
    placement = Placement(5)
    (transfer,) = placement.transfers(seen([base(0)]))
    assert (transfer.source_tier, transfer.target_tier, transfer.target) == (0, 1, base(0))
    assert placement.transfers(seen([base(0)], [base(0)])) == []
    assert [each.target for each in placement.transfers(seen([base(0), base(10)], [base(5)]))] == [base(10)]


def test_a_batch_goes_when_its_last_version_is_there() -> None:
    placement = Placement(5)
    memory = [base(0), *(single(version) for version in range(1, 5))]
    assert [each.target for each in placement.transfers(seen(memory, [base(0)]))] == []
    memory.append(single(5))
    (transfer,) = placement.transfers(seen(memory, [base(0)]))
    assert transfer.target == batch(1, 5)
    assert transfer.sources == tuple(single(version) for version in range(1, 6))


def test_an_incomplete_batch_goes_at_the_end() -> None:
    memory = [base(0), *(single(version) for version in range(1, 8))]
    targets = [each.target for each in Placement(5).transfers(seen(memory, [base(0)]), closing=True)]
    assert targets == [batch(1, 5), batch(6, 7)]


def test_a_batch_that_begins_after_a_restart_is_short() -> None:
    memory = [base(13), *(single(version) for version in range(14, 17))]
    assert [each.target for each in Placement(5).transfers(seen(memory, [base(13)]))] == [batch(14, 15)]


def test_the_mover_is_told_of_what_completes_an_object_for_any_tier_but_the_first() -> None:
    """Of others it learns when it looks by itself, which is later."""
    peer, durable = Role(1, "peer", Survives.NODE), Role(2, "nvme", Survives.RACK)

    def told(placement: Placement, *roles: Role) -> list[int]:
        return [version for version in range(1, 12) if placement.completes(version, roles)]

    assert told(Placement(4), MEMORY) == []
    assert told(Placement(4), MEMORY, DURABLE) == [4, 8]
    assert told(Placement(4), MEMORY, peer, durable) == [*range(1, 12)], "a peer takes one at a time"
    folds = Placement(4, interval=10, fold_every=5)
    assert told(folds, MEMORY, DURABLE) == [1, 4, 5, 6, 8, 10, 11], "a base that is folded, and the one after"


def test_a_gap_ends_a_batch_and_what_follows_it_waits_for_a_base() -> None:
    memory = [base(0), single(1), single(2), single(4), single(5)]
    assert [each.target for each in Placement(5).transfers(seen(memory, [base(0)]))] == [batch(1, 2)]
    targets = [each.target for each in Placement(5).transfers(seen([*memory, base(4)], [base(0)]))]
    assert targets == [base(4), batch(1, 2), batch(5, 5)]


def test_what_precedes_a_gap_goes_even_when_all_after_it_is_covered() -> None:
    memory = [base(0), single(1), single(3), single(4)]
    targets = [each.target for each in Placement(2).transfers(seen(memory, [base(0), batch(3, 4)]))]
    assert targets == [batch(1, 1)]


def test_what_is_covered_is_not_sent_again() -> None:
    memory = [base(0), *(single(version) for version in range(1, 6))]
    assert Placement(5).transfers(seen(memory, [base(0), batch(1, 5)])) == []
    (rest,) = Placement(5).transfers(seen(memory, [base(0), batch(1, 3)]))
    assert rest.target == batch(4, 5)


def test_differentials_before_the_target_s_oldest_base_are_not_sent() -> None:
    memory = [base(10), *(single(version) for version in range(1, 11))]
    assert [each.target for each in Placement(5).transfers(seen(memory, [base(10)]))] == []


def test_only_the_own_rank_and_generation_are_moved() -> None:
    assert Placement(5).transfers(seen([base(0, rank=1), base(7, generation=2)])) == []


def test_the_coordinator_commits_when_every_rank_has_marked() -> None:
    shards: list[Key] = [base(10, 0), base(10, 1)]
    assert to_mark(seen([], shards, world=2), 1) == [base(10, 0)]
    one_marked = [*shards, MarkerKey(CommitKey(1, 10), 0)]
    assert to_commit(seen([], one_marked, world=2), 1) == []
    all_marked = [*one_marked, MarkerKey(CommitKey(1, 10), 1)]
    assert to_commit(seen([], all_marked, world=2), 1) == [CommitKey(1, 10)]
    assert to_commit(seen([], all_marked, world=2, rank=1), 1) == []
    assert to_commit(seen([], [*all_marked, CommitKey(1, 10)], world=2), 1) == []


def test_nothing_is_marked_in_a_tier_inside_the_node() -> None:
    assert to_mark(seen([base(10)]), 0) == []
    assert to_commit(seen([base(10), MarkerKey(CommitKey(1, 10), 0)]), 0) == []


def test_a_newer_generation_supersedes() -> None:
    assert superseded(seen([LineageKey(1)])) is None
    assert superseded(seen([LineageKey(1)], [LineageKey(2)])) == 2


def test_a_second_statement_about_a_shard_stands_beside_the_first() -> None:
    """The coordinator finds which one is true of the shard."""
    said = [MarkerKey(CommitKey(1, 10), 0, nbytes, 8, "f" * 16, "ab" * 8) for nbytes in (300, 400)]
    held = [base(10, 0), *said]
    contents = seen([], held).contents[1]
    assert contents.marked(CommitKey(1, 10)) == {0: tuple(said)}
    assert to_mark(seen([], held), 1) == []
    assert set(said) <= set(Retention().reclaimable(seen([], [*held, CommitKey(1, 10)]))[1])


@pytest.mark.parametrize(
    "said",
    [
        "",
        "/",
        "/300-8-0123456789abcdef",
        "/300-8-0123456789abcdef-xyz",
        "/0300-8-0123456789abcdef-",
        "/300-8-0123-",
        "/9999999999999999-8-0123456789abcdef-",
    ],
)
def test_a_malformed_marker_is_none(said: str) -> None:
    assert keys.parse(f"done/r00001/g000002/000000000040{said}") is None
    whole = "done/r00001/g000002/000000000040/300-8-0123456789abcdef-"
    assert str(keys.parse(whole)) == whole


def test_memory_keeps_two_bases_and_what_follows_the_older() -> None:
    memory = [base(0), base(10), base(20), *(single(version) for version in range(1, 24))]
    gone = Retention().reclaimable(seen(memory, committed(10)))
    assert gone[0] == [base(0), *(single(version) for version in range(1, 11))]


def test_memory_keeps_what_the_durable_tier_still_lacks() -> None:
    memory = [base(0), base(10), base(20), *(single(version) for version in range(1, 24))]
    assert Retention().reclaimable(seen(memory, []))[0] == []
    assert Retention().reclaimable(seen(memory, [base(10)]))[0] == [], "copied is not committed"


def test_what_would_be_deleted_at_once_is_not_copied() -> None:
    """Such as when the newest base was lost from memory, and what leads there is still there."""
    placement = Placement(5)
    memory = [base(10), *(single(version) for version in range(11, 21))]
    durable = [*committed(0), *committed(20), batch(1, 5), batch(6, 10)]
    retention = Retention(KeepLast(1) | KeepEvery(50), placement)
    transfers = placement.transfers(seen(memory, durable))
    assert transfers
    assert retention.wanted(seen(memory, durable), transfers) == []


def test_memory_keeps_one_base_when_it_is_committed() -> None:
    memory = [base(10), base(20), *(single(version) for version in range(11, 24))]
    durable = [*committed(10), *committed(20), batch(11, 15)]
    lagging = Retention().reclaimable(seen(memory, durable))[0]
    assert lagging == [], "the durable tier has not got all versions yet to which a user may go back"
    gone = Retention().reclaimable(seen(memory, [*durable, batch(16, 20)]))[0]
    assert gone == [base(10), *(single(version) for version in range(11, 21))]


def folding(batch_size: int = 5) -> Retention:
    return Retention(placement=Placement(batch_size, interval=20, fold_every=5))


def test_of_folded_bases_memory_keeps_one_when_every_rank_has_passed_it() -> None:
    durable = [*committed(0), batch(1, 5), batch(6, 10)]
    memory = [base(5), base(10), *(single(version) for version in range(6, 11))]
    assert folding().reclaimable(seen(memory, durable))[0] == [], "another rank may be at version 9"
    passed = [base(5), *(single(version) for version in range(6, 11))]
    assert folding().reclaimable(seen([*memory, single(11)], durable))[0] == passed
    lagging = folding().reclaimable(seen([*memory, single(11)], durable[:-1]))[0]
    assert lagging == [base(5)], "what the durable tier lacks stays"


def test_differentials_stay_until_the_neighbour_has_them() -> None:
    roles = (MEMORY, Role(1, "peer", Survives.NODE), Role(2, "nvme", Survives.RACK))
    durable = [*committed(0), batch(1, 5), batch(6, 10)]
    memory = [base(10), *(single(version) for version in range(6, 12))]
    for kept, stays in ((8, [9, 10]), (10, [])):
        neighbour = [base(0), *(single(version) for version in range(1, kept + 1))]
        contents = tuple(Contents.of((key, 1) for key in held) for held in (memory, neighbour, durable))
        gone = folding().reclaimable(Observation(roles, contents, 0, 1, 1, FIRST))[0]
        assert gone == [single(version) for version in range(6, 11) if version not in stays]


def test_the_newest_base_that_is_due_stays_until_the_neighbour_has_it() -> None:
    """And no older one: it takes their place there. So a neighbour that stays away costs the room of one base."""
    roles = (MEMORY, Role(1, "peer", Survives.NODE), Role(2, "nvme", Survives.RACK))
    durable = [*committed(0), *committed(20), *committed(40), *(batch(each, each + 4) for each in range(1, 46, 5))]

    def gone(*bases: int, neighbour: Iterable[int]) -> list[Key]:
        memory = [*map(base, bases), single(bases[-1] + 1)]
        there = [*map(base, neighbour), *(single(version) for version in range(1, bases[-1] + 2))]
        contents = tuple(Contents.of((key, 1) for key in held) for held in (memory, there, durable))
        return folding().reclaimable(Observation(roles, contents, 0, 1, 1, FIRST))[0]

    assert gone(20, 25, 30, neighbour=[0]) == [base(25)], "the neighbour is still to get base 20"
    assert gone(20, 25, 30, neighbour=[20]) == [base(20), base(25)]
    assert gone(20, 35, 40, neighbour=[0]) == [base(20), base(35)]
    assert gone(40, 45, neighbour=[0]) == []


def test_how_far_each_tier_has_come() -> None:
    roles = (MEMORY, Role(1, "peer", Survives.NODE), Role(2, "nvme", Survives.RACK))
    memory = [base(0), base(20), *(single(version) for version in range(1, 24))]
    peer = [base(0), *(single(version) for version in range(1, 18))]

    def reached(placement: Placement, *durable: Key) -> list[int]:
        contents = tuple(Contents.of((key, 1) for key in held) for held in (memory, peer, durable))
        found = placement.reached(Observation(roles, contents, 0, 1, 1, FIRST))
        assert list(found) == ["shm", "peer", "nvme"]
        return list(found.values())

    assert reached(Placement(5), base(0), batch(1, 5), batch(11, 15)) == [23, 17, 5]
    assert reached(Placement(5), base(20)) == [23, 17, 20], "a base stands for what comes before it"
    assert reached(Placement(5), base(20), batch(21, 23)) == [23, 17, 23]
    assert reached(Placement(5, BasesOnly("nvme"), 20), base(0)) == [23, 17, 19]
    assert reached(Placement(5, BasesOnly("nvme"), 20), base(20)) == [23, 17, 23], "it lacks nothing that it is to hold"


def test_bases_between_the_intervals_stay_in_the_first_tier() -> None:
    placement = folding().placement
    memory = [base(0), base(5), *(single(version) for version in range(1, 8))]
    assert [each.target for each in placement.transfers(seen(memory, []))] == [base(0), batch(1, 5)]
    replacing = [base(0), base(10), *(single(version) for version in range(1, 10))]
    targets = [each.target for each in placement.transfers(seen(replacing, committed(0)))]
    assert base(10) in targets, "no differential leads there"
    due = [base(15), base(20), *(single(version) for version in range(1, 21))]
    assert base(20) in [each.target for each in placement.transfers(seen(due, committed(0)))]
    opening = [base(5), *(single(version) for version in range(6, 8))]
    assert base(5) in [each.target for each in placement.transfers(seen(opening, []))], "it is the first one"


def test_a_base_that_is_captured_since_a_fold_differed_goes_to_every_tier() -> None:
    placement = folding().placement
    view = seen([base(5), base(10), *(single(version) for version in range(1, 11))], committed(0))
    durable = view.durable
    assert [placement.wants(view, base(version), durable) for version in (5, 10)] == [False, False]
    differing = replace(view, differing=8)
    assert [placement.wants(differing, base(version), durable) for version in (5, 10)] == [False, True]


def test_memory_alone_keeps_two_bases() -> None:
    observation = Observation((MEMORY,), (Contents.of((base(v), 1) for v in (0, 10, 20)),), 0, 1, 1, FIRST)
    assert Retention().reclaimable(observation)[0] == [base(0)]
    assert watermark(observation) is None


def test_an_older_generation_stays_until_the_present_one_has_two_feet() -> None:
    memory = [base(10), base(20), base(25, generation=2)]
    contents = (Contents.of((key, 1) for key in memory), Contents.of((key, 1) for key in committed(20)))
    observation = Observation((MEMORY, DURABLE), contents, 0, 1, generation=2, lineage=SECOND)
    gone = Retention().reclaimable(observation)
    assert gone == {0: [base(10)], 1: []}


def test_the_durable_tier_keeps_the_last_committed_bases_and_their_differentials() -> None:
    durable = [*committed(0), *committed(10), *committed(20), batch(1, 5), batch(6, 10), batch(11, 15)]
    gone = Retention(KeepLast(2)).reclaimable(seen([], durable))
    assert gone[1] == [CommitKey(1, 0), base(0), batch(1, 5), batch(6, 10)]


def test_commits_of_an_abandoned_future_do_not_count_as_kept_ones() -> None:
    # Generation 2 went back to version 13 of generation 1, whose base 20 is another future now.
    durable = [*committed(10), *committed(20), *committed(13, generation=2)]
    contents = (Contents(), Contents.of((key, 1) for key in durable))
    lineage = Lineage(((2, None), (1, 13)))
    observation = Observation((MEMORY, DURABLE), contents, 0, 1, generation=2, lineage=lineage)
    gone = Retention(KeepLast(2)).reclaimable(observation)[1]
    assert gone == [CommitKey(1, 20), base(20)]


@pytest.mark.parametrize("lineage", [Lineage(()), Lineage(((1, 5),))])
def test_nothing_goes_from_the_durable_tier_while_the_lineage_has_no_commit(lineage: Lineage) -> None:
    durable = [*committed(10), *committed(20), *committed(30)]
    contents = (Contents(), Contents.of((key, 1) for key in durable))
    observation = Observation((MEMORY, DURABLE), contents, 0, 1, generation=1, lineage=lineage)
    assert Retention(KeepLast(1)).reclaimable(observation)[1] == []


def test_restarts_from_one_version_do_not_use_up_what_is_kept() -> None:
    durable = [*committed(10), *committed(20), *committed(20, generation=2), *committed(20, generation=3)]
    contents = (Contents(), Contents.of((key, 1) for key in durable))
    lineage = Lineage(((3, None), (2, 20), (1, 20)))
    observation = Observation((MEMORY, DURABLE), contents, 0, 1, generation=3, lineage=lineage)
    gone = Retention(KeepLast(2)).reclaimable(observation)[1]
    assert [key for key in gone if isinstance(key, ShardKey)] == [base(20), base(20, generation=2)]


def test_keep_every_keeps_bases_without_differentials() -> None:
    durable = [key for version in (0, 10, 20, 30) for key in committed(version)]
    gone = Retention(KeepLast(1) | KeepEvery(20)).reclaimable(seen([], durable))
    assert [key for key in gone[1] if isinstance(key, ShardKey)] == [base(10)]


def test_uncommitted_bases_go_only_when_a_newer_one_is_committed() -> None:
    assert Retention().reclaimable(seen([], [base(0), base(10)]))[1] == []
    assert Retention().reclaimable(seen([], [base(0), base(5), *committed(10), base(20)]))[1] == [base(0), base(5)]


def test_the_watermark_is_the_newest_commit() -> None:
    assert watermark(seen([], [])) is None
    assert watermark(seen([], [*committed(0), *committed(10), base(20)])) == CommitKey(1, 10)


def test_the_cheapest_copies_are_read_and_gaps_filled_from_further_away() -> None:
    point = RecoveryPoint(1, 10, 17)
    sources = [
        Copy(0, base(10)),
        Copy(1, base(10)),
        *(Copy(0, single(version)) for version in (11, 12, 16, 17)),
        Copy(1, batch(11, 15)),
    ]
    chosen = plan(point, 0, sources)
    assert isinstance(chosen, Plan)
    assert chosen.anchor == Copy(0, base(10))
    assert chosen.batches == (
        Copy(0, single(11)),
        Copy(0, single(12)),
        Copy(1, batch(11, 15)),
        Copy(0, single(16)),
        Copy(0, single(17)),
    )


def test_a_version_nobody_has_is_named() -> None:
    point = RecoveryPoint(1, 10, 12)
    assert plan(point, 0, []) == Unreachable(base(10).stream, 10)
    assert plan(point, 0, [Copy(0, base(10)), Copy(0, single(12))]) == Unreachable(single(11).stream, 11)
    assert plan(point, 0, [Copy(0, base(10, rank=1))]) == Unreachable(base(10).stream, 10)


def test_ranks_of_which_a_tier_holds_the_same_have_a_row_of_the_matrix_together() -> None:
    point = RecoveryPoint(1, 10, 12)
    copies = [[Copy(0, base(10, rank)), Copy(1, ShardKey.differential(1, 11, 15, rank))] for rank in range(5)]
    copies[2] = []
    ranks = [held(point, rank, 2, each) for rank, each in enumerate(copies)]
    rows = availability(["shm", "nvme"], ranks)
    assert [(row.ranks, row.tier, row.anchor, row.differentials) for row in rows] == [
        (((0, 1), (3, 4)), "shm", True, ()),
        (((2, 2),), "shm", False, ()),
        (((0, 1), (3, 4)), "nvme", False, ((11, 12),)),
        (((2, 2),), "nvme", False, ()),
    ]
    assert [row.count for row in rows] == [4, 1, 4, 1]


def snapshot(base_version: int, version: int, rank: int = 0) -> ShardKey:
    return ShardKey.snapshot(1, base_version, version, rank)


def test_a_neighbour_gets_each_snapshot_while_it_keeps_up_and_else_those_that_the_ranks_can_meet_at() -> None:
    placement = Placement(5)
    roles = (MEMORY, Role(1, "peer", Survives.NODE))

    def copied(own: list[int], there: list[int], *, closing: bool = False) -> list[int]:
        contents = tuple(
            Contents.of((key, 100) for key in [base(0), *(snapshot(0, version) for version in versions)])
            for versions in (own, there)
        )
        seen = Observation(roles, contents, 0, 2, generation=1, lineage=FIRST)
        return [each.target.last for each in placement.transfers(seen, closing=closing)]

    assert copied([1], []) == [1]
    assert copied([5, 10, 11, 12], [10, 11]) == [12]
    assert copied([5, 10, 12, 13], [5, 11]) == [12], "one of the newest two will do"
    assert copied([5, 10, 13, 14], [5, 8]) == [10], "what it holds of versions in between, others do not"
    assert copied([5, 10, 13, 14], [10]) == []
    assert copied([5, 10, 14, 15], [10]) == [15]
    assert copied([5, 10, 13, 14], [10], closing=True) == [14]


def test_snapshots_are_committed_if_every_rank_has_one() -> None:
    to_25 = CommitKey(1, 25, 20)
    held = [*committed(0), *committed(20), snapshot(0, 15), snapshot(20, 25)]
    assert to_mark(seen([], held, world=2), 1) == [snapshot(20, 25)], "base 20 supersedes what leads to 15"
    assert to_commit(seen([], [*held, MarkerKey(to_25, 0)], world=2), 1) == []
    assert to_commit(seen([], [*held, MarkerKey(to_25, 0), MarkerKey(to_25, 1)], world=2), 1) == [to_25]
    done = seen([], [*held, to_25, MarkerKey(to_25, 0)])
    assert to_mark(done, 1) == to_commit(done, 1) == []
    assert MarkerKey(to_25, 0) in Retention().reclaimable(done)[1], "what is committed needs no marker"


def test_a_durable_snapshot_is_superseded_by_a_committed_one_that_it_can_use() -> None:
    retention = Retention(placement=Placement(5))
    durable = [*committed(0), snapshot(0, 20), snapshot(20, 25), CommitKey(1, 20, 0)]

    def gone(*more: Key) -> list[Key]:
        return retention.reclaimable(seen([base(0), base(20)], [*durable, *more], world=2))[1]

    assert gone() == []
    assert gone(CommitKey(1, 25, 20)) == [], "nobody can use a snapshot without its base"
    assert gone(CommitKey(1, 25, 20), base(20)) == [CommitKey(1, 20, 0), snapshot(0, 20)]


def test_the_watermark_counts_commits_of_the_jobs_own_past_only() -> None:
    """A process of generation 1 that was still alive committed base 60 after generation 2 had left it at 50."""
    lineage = Lineage.of([Branch(1, 0, 0, 1, "a"), Branch(2, 1, 50, 1, "b")])
    held = [base(40), base(50), base(60)]
    durable = Contents.of((key, 1) for key in (base(40), base(60), CommitKey(1, 40), CommitKey(1, 60)))
    memory = Contents.of((key, 1) for key in (*held, ShardKey.base(2, 50, 0), ShardKey.base(2, 55, 0)))
    observation = Observation((MEMORY, DURABLE), (memory, durable), 0, 1, 2, lineage)
    assert watermark(observation) == CommitKey(1, 40)
    assert base(50) not in Retention().reclaimable(observation)[0], "it has not been committed"


def test_what_other_ranks_left_stays_until_a_base_of_this_generation_is_committed() -> None:
    """Rank 1 ran on this node in generation 1. Its recovery may still need what it left here."""
    lineage = Lineage.of([Branch(1, 0, 0, 2, "a"), Branch(2, 1, 50, 2, "b")])
    left = [base(50, 1), single(51, 1)]
    memory = Contents.of((key, 1) for key in (*left, base(50, generation=2)))
    durable: list[Key] = [*committed(50), base(50, generation=2)]

    def gone(*more: Key) -> list[Key]:
        there = Contents.of((key, 1) for key in (*durable, *more))
        return Retention().reclaimable(Observation((MEMORY, DURABLE), (memory, there), 0, 2, 2, lineage))[0]

    assert not set(left) & set(gone()), "only generation 1 has a committed base"
    assert set(left) <= set(gone(CommitKey(2, 50)))


def test_what_other_ranks_left_stays_while_they_may_need_it() -> None:
    """Two ranks of one node, whose neighbour keeps the objects of both. The generation has just opened, and only one
    of them has its opening base at the neighbour."""
    roles = (MEMORY, Role(1, "peer", Survives.NODE))
    before: list[Key] = [base(20, 1), *(single(version, 1) for version in range(21, 26))]
    memory = [*before, *(base(25, rank, generation=2) for rank in (0, 1))]

    def left_behind(*newer: Key, mark: int) -> set[Key]:
        tiers = ([*memory, *newer], [*before, base(25, 0, generation=2), *newer])
        contents = tuple(Contents.of((key, 100) for key in keys) for keys in tiers)
        return set(Retention().reclaimable(Observation(roles, contents, 0, 2, 2, SECOND, mark))[1])

    assert left_behind(mark=25) == set(), "the neighbour's only copies of the other rank"
    newer = [ShardKey.differential(2, 26, 26, rank) for rank in (0, 1)]
    assert left_behind(*newer, mark=26) == set(before), "every rank comes to 26 by what this generation captured"


def test_what_a_request_left_behind_stays_in_a_shared_tier_and_takes_no_room_in_memory() -> None:
    """Generation 2 went back from 45 to 22 on purpose. Without that, nothing of generation 1 would stay."""
    left: list[Key] = [*committed(20), *committed(40), batch(21, 25), batch(41, 45), MetricKey(1, 40, "loss", 0.5)]
    own: list[Key] = [base(each, generation=2) for each in (22, 40, 60)]
    commits: list[Key] = [CommitKey(2, 22), CommitKey(2, 40), CommitKey(2, 60)]

    def gone(kept: tuple[int, ...]) -> list[Key]:
        lineage = Lineage.of([Branch(1, 0, 0, 1, "a"), Branch(2, 1, 22, 1, "b", asked="version=22", kept=kept)])
        contents = (Contents.of((key, 1) for key in own), Contents.of((key, 1) for key in [*left, *own, *commits]))
        observation = Observation((MEMORY, DURABLE), contents, 0, 1, 2, lineage)
        deleted = Retention().reclaimable(observation)
        _, refusals = checked_deletions(observation, {1: list(left)}, "Evil()")
        assert any("left behind on purpose" in str(each) for each in refusals) is bool(kept)
        one = Contents.of((key, 1) for key in [*left, *own, *commits])
        alone = Observation((Role(0, "nvme", Survives.RACK),), (one,), 0, 1, 2, lineage)
        assert Retention().has_room(alone), "what is kept takes none of the room for bases"
        return deleted[1]

    assert set(left) <= set(gone(()))
    assert set(gone((1,))) == {CommitKey(2, 22), base(22, generation=2)}
