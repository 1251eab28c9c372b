"""Who looks for what, and which versions a rank can come to."""

from __future__ import annotations

import pytest

from tiercheck.keys import MARKERS, CommitKey, ShardKey, own_prefixes
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.recovery.lineage import Branch, Layout, Lineage
from tiercheck.policy.recovery.relayout import dealt, left_to, reachable, readers
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives

LINEAGE = Lineage.of([Branch(1, 0, 0, 5, "a", "old"), Branch(2, 1, 7, 2, "b", "new")])


def test_each_old_rank_is_dealt_to_one() -> None:
    assert sorted(old for rank in range(3) for old in dealt(rank, 3, 8)) == list(range(8))
    assert [*dealt(4, 5, 3)] == []


def test_who_tells_of_an_old_rank_has_found_it() -> None:
    assert readers([[0, 2], [0, 1, 2, 3], [3]]) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert readers([[], [0]]) == {0: 1}


def test_a_version_is_reached_by_any_ranks_that_hold_enough() -> None:
    halves = {0: "left", 1: "left", 2: "right"}
    ways = {0: range(4, 9), 1: range(8), 2: range(6, 10)}
    assert reachable(ways, lambda olds: {halves[old] for old in olds} == {"left", "right"}) == {6, 7, 8}
    assert reachable({}, lambda olds: True) == set()


def test_a_rank_reads_as_its_own_what_was_saved_under_its_layout() -> None:
    later = Lineage.of([*LINEAGE.branches.values(), Branch(3, 2, 9, 5, "c", "old")])
    assert later.readable.chain == ((3, None),), "what it had saved before is older than what was saved in between"
    assert [(layout.digest, era.chain) for layout, era in later.eras] == [
        ("old", ((3, None),)),
        ("new", ((2, 9),)),
        ("old", ((1, 7),)),
    ]
    assert later.under(Layout(2, "new")).chain == ((2, 9),)
    assert not Layout(5, "old").is_like(Layout(5, "other"))
    assert Layout(5).is_like(Layout(5, "other")), "what was not told may be"


CUT_SHORT = Lineage.of([Branch(1, 0, 0, 2, "a", "new"), Branch(2, 1, 7, 5, "b", "old"), Branch(3, 1, 7, 2, "c", "new")])
"""A start on five ranks came to nothing, so that the next one begins where it began."""


@pytest.mark.parametrize(("lineage", "left"), [(LINEAGE, 1), (CUT_SHORT, 2)])
def test_what_ranks_left_that_the_job_has_no_more_goes_once_there_is_a_committed_base(
    lineage: Lineage, left: int
) -> None:
    """``left``: the generation of those ranks, an ancestor or not."""
    assert [left_to(rank, 2, lineage) for rank in range(2)] == [[2, 4], [3]]
    assert [left_to(rank, 2, lineage.until(3)) for rank in range(2)] == [[2, 4], [3]]
    assert own_prefixes(1, coordinator=False, departed=[3])[:2] == (f"{MARKERS}r00001/", f"{MARKERS}r00003/")
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "s3", Survives.RACK))
    old = [ShardKey.base(left, 4, 3), ShardKey.differential(left, 5, 8, 3)]
    now = lineage.newest

    def gone(*own: ShardKey | CommitKey) -> list[object]:
        contents = Contents.of((key, 1) for key in (*old, *own))
        seen = Observation(roles, (Contents(), contents), 1, 2, now, lineage, None)
        wanted = Retention().reclaimable(seen)
        allowed, refusals = checked_deletions(seen, wanted, "retention")
        assert refusals == []
        assert checked_deletions(seen, {1: [old[0]]}, "somebody")[0][1] == ([old[0]] if wanted[1] else [])
        return [key for key in allowed[1] if key in old]

    first, second = (ShardKey.base(now, version, 1) for version in (7, 11))
    assert gone() == []
    assert gone(first) == [], "not committed yet"
    assert set(gone(first, CommitKey(now, 7))) == set(old)
    assert set(gone(first, CommitKey(now, 7), second, CommitKey(now, 11))) == set(old)
