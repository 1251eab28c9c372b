"""The recovery point, and the lineage that limits it."""

from __future__ import annotations

import pytest

from tiercheck import schema
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy
from tiercheck.policy.recovery.consensus import Readable, RecoveryPoint, decide, from_one_base
from tiercheck.policy.recovery.lineage import Branch, Lineage, bearing
from tiercheck.policy.recovery.plan import Plan, plan


def readable(*, bases: dict[int, list[int]], differentials: dict[int, list[int]]) -> Readable:
    return Readable(
        frozenset((generation, version) for generation, versions in bases.items() for version in versions),
        frozenset((generation, version) for generation, versions in differentials.items() for version in versions),
    )


def branch(generation: int, parent: int = 0, left_at: int = 0) -> Branch:
    return Branch(generation, parent, left_at, world_size=2, token=f"token-{generation}")


def test_newest_common_base_and_the_common_run_after_it() -> None:
    one = readable(bases={1: [0, 10, 20]}, differentials={1: list(range(1, 24))})
    two = readable(bases={1: [0, 10, 20]}, differentials={1: list(range(1, 23))})
    assert decide([one, two], Lineage.of([branch(1)])) == (RecoveryPoint(1, 20, 22),) * 2


def test_a_minimum_of_maxima_would_name_a_version_somebody_purged() -> None:
    # Rank 0 reaches 30 at best, rank 1 reaches 20; but rank 0 has already purged 20: only 10 is common.
    one = readable(bases={1: [10, 30]}, differentials={})
    two = readable(bases={1: [10, 20]}, differentials={})
    assert decide([one, two], Lineage.of([branch(1)])) == (RecoveryPoint(1, 10, 10),) * 2


def test_a_gap_ends_the_run() -> None:
    rank = readable(bases={1: [10]}, differentials={1: [11, 12, 14, 15]})
    assert decide([rank], Lineage.of([branch(1)])) == (RecoveryPoint(1, 10, 12),)


def test_ranks_meet_from_bases_of_their_own() -> None:
    # Rank 0 could not record version 23, and has a base there instead.
    one = readable(bases={1: [10, 20, 23]}, differentials={1: [*range(11, 23), 24, 25]})
    two = readable(bases={1: [10, 20]}, differentials={1: list(range(11, 26))})
    three = readable(bases={1: [10, 20, 24]}, differentials={1: [*range(11, 24), 25, 26]})
    assert decide([one, two, three], Lineage.of([branch(1)])) == (
        RecoveryPoint(1, 23, 25),
        RecoveryPoint(1, 20, 25),
        RecoveryPoint(1, 24, 25),
    )


def test_ranks_that_step_together_meet_from_one_base() -> None:
    lineage = Lineage.of([branch(1), branch(2, 1, 24)])
    one = readable(bases={1: [10, 20, 23], 2: [24]}, differentials={1: list(range(11, 28)), 2: [25]})
    two = readable(bases={1: [10, 20]}, differentials={1: list(range(11, 26))})
    three = readable(bases={1: [10, 20, 22]}, differentials={1: [*range(11, 22), 23, 24]})
    assert one.runs(lineage) == {(1, 10): 24, (1, 20): 24, (1, 23): 24, (2, 24): 25}, "as far as the past goes"
    assert three.runs(lineage) == {(1, 10): 21, (1, 20): 21, (1, 22): 24}, "a newer base fills no gap"
    assert from_one_base([one.runs(lineage), two.runs(lineage)]) == RecoveryPoint(1, 20, 24)
    assert from_one_base([each.runs(lineage) for each in (one, two, three)]) == RecoveryPoint(1, 20, 21)
    assert from_one_base([one.runs(lineage)]) == RecoveryPoint(2, 24, 25)
    assert from_one_base([one.runs(lineage), {}]) is None


def test_a_version_that_one_rank_lacks_is_passed_over() -> None:
    one = readable(bases={1: [20, 24]}, differentials={1: [21, 22]})
    two = readable(bases={1: [20, 23]}, differentials={1: [21, 22, 24]})
    assert decide([one, two], Lineage.of([branch(1)])) == (RecoveryPoint(1, 24, 24), RecoveryPoint(1, 23, 24))


def test_nothing_in_common_is_no_point() -> None:
    one = readable(bases={1: [10]}, differentials={})
    two = readable(bases={1: [20]}, differentials={})
    assert decide([one, two], Lineage.of([branch(1)])) is None
    assert decide([one, one], Lineage.of([])) is None


def test_a_new_generation_wins_over_what_its_parent_wrote_later() -> None:
    # Generation 1 went on to 30 on paper, but generation 2 left it at 15.
    rank = readable(bases={1: [10, 30], 2: [15]}, differentials={1: list(range(11, 31)), 2: [16, 17]})
    lineage = Lineage.of([branch(1), branch(2, parent=1, left_at=15)])
    assert decide([rank], lineage) == (RecoveryPoint(2, 15, 17),)


def test_the_parent_counts_up_to_where_it_was_left() -> None:
    rank = readable(bases={1: [10, 30]}, differentials={1: list(range(11, 31))})
    lineage = Lineage.of([branch(1), branch(2, parent=1, left_at=15)])
    assert decide([rank], lineage) == (RecoveryPoint(1, 10, 15),)


def test_an_abandoned_sibling_does_not_count() -> None:
    # Generation 3 went back to generation 1: what generation 2 wrote is another future.
    rank = readable(bases={1: [10], 2: [15, 20]}, differentials={2: [16, 17]})
    lineage = Lineage.of([branch(1), branch(2, 1, 15), branch(3, 1, 10)])
    assert decide([rank], lineage) == (RecoveryPoint(1, 10, 10),)
    assert not lineage.admits(2, 15)
    assert lineage.admits(1, 10)
    assert not lineage.admits(1, 11)


def test_limits_fall_across_several_restarts() -> None:
    lineage = Lineage.of([branch(1), branch(2, 1, 30), branch(3, 2, 20)])
    assert lineage.chain == ((3, None), (2, 20), (1, 20))


def test_a_lost_lineage_record_ends_the_chain() -> None:
    assert Lineage.of([branch(3, 2, 20), branch(1)]).chain == ((3, None),)


def test_a_generation_that_captured_nothing_cuts_nothing_off() -> None:
    branches = [branch(1), branch(2, 1, 10), branch(3, 1, 10)]
    assert Lineage.of(bearing(branches, {1})).chain == ((1, None),)
    assert Lineage.of(bearing(branches, {1, 2})).chain == ((2, None), (1, 10))
    # What generation 2 captured is deleted by now; generation 3 stands on where it left its parent all the same.
    assert Lineage.of(bearing([branch(1), branch(2, 1, 10), branch(3, 2, 20)], {1, 3})).chain == (
        (3, None),
        (2, 20),
        (1, 10),
    )


def test_batches_count_as_their_versions() -> None:
    held = Readable.of([ShardKey.base(1, 10, 0), ShardKey.differential(1, 11, 13, 0)])
    assert held.bases == {(1, 10)}
    assert held.differentials == {(1, 11), (1, 12), (1, 13)}


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"generation": 1, "parent": 1, "left_at": 0, "world_size": 1, "token": "t"},
        {"generation": 2, "parent": 1, "left_at": -1, "world_size": 1, "token": "t"},
        {"generation": 2, "parent": 1, "left_at": 0, "world_size": 0, "token": "t"},
        {"generation": "2", "parent": 1, "left_at": 0, "world_size": 1, "token": "t"},
        {"generation": True, "parent": 0, "left_at": 0, "world_size": 1, "token": "t"},
        {"generation": 2, "parent": 1, "left_at": 0, "world_size": 1},
    ],
)
def test_a_malformed_lineage_record_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="invalid Branch"):
        schema.read(Branch, value)


class TestSnapshots:
    """A rank whose base or snapshot failed has made a base of its own since; that must not part it from the others."""

    def held(self, rank: int, bases: list[int], snapshots: list[tuple[int, int]]) -> list[ShardKey]:
        return [ShardKey.base(1, version, rank) for version in bases] + [
            ShardKey.snapshot(1, base, version, rank) for base, version in snapshots
        ]

    def decided(self, *ranks: list[ShardKey]) -> list[tuple[int, int, bool]]:
        """Per rank anchor, version and whether a snapshot leads there."""
        points = decide([Readable.of(each) for each in ranks], Lineage.of([branch(1)])) or ()
        for rank, (point, held) in enumerate(zip(points, ranks, strict=True)):
            found = plan(point, rank, [Copy(0, key) for key in held])
            assert isinstance(found, Plan)
            assert (found.batches[-1] if found.batches else found.anchor).key.last == point.last
        return [(point.anchor, point.last, point.by_snapshot) for point in points]

    def test_ranks_meet_from_bases_of_their_own(self) -> None:
        one = self.held(0, [0, 24], [(0, 20), (24, 37), (24, 38)])
        two = self.held(1, [0, 20], [(0, 20), (20, 37), (20, 38)])
        assert self.decided(one, two) == [(24, 38, True), (20, 38, True)]

    def test_a_base_is_as_good_as_a_snapshot_of_its_version(self) -> None:
        one = self.held(0, [0, 24], [(0, 20)])
        two = self.held(1, [0, 20], [(0, 20), (20, 24)])
        assert self.decided(one, two) == [(24, 24, False), (20, 24, True)]

    def test_a_snapshot_without_its_base_leads_nowhere(self) -> None:
        one = self.held(0, [0], [(0, 20), (24, 38)])
        two = self.held(1, [0, 20], [(0, 20), (20, 38)])
        assert self.decided(one, two) == [(0, 20, True), (20, 20, False)]

    def test_no_base_in_common_is_needed(self) -> None:
        one, two = self.held(0, [24], [(24, 38)]), self.held(1, [20], [(20, 38)])
        assert self.decided(one, two) == [(24, 38, True), (20, 38, True)]
        assert decide([Readable.of(one), Readable.of(two)], Lineage(((1, 30),))) is None

    def test_of_several_bases_the_newest_is_taken(self) -> None:
        assert self.decided(self.held(0, [0, 20], [(0, 21), (20, 21)])) == [(20, 21, True)]

    def test_a_base_that_all_have_is_not_a_snapshot(self) -> None:
        assert self.decided(self.held(0, [0, 20], [(0, 20)])) == [(20, 20, False)]

    def test_of_two_ways_differentials_are_taken(self) -> None:
        held = [*self.held(0, [20], [(20, 22)]), ShardKey.differential(1, 21, 22, 0)]
        assert self.decided(held) == [(20, 22, False)]
