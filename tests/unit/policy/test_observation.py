"""What a tier holds, as a value: kept by rank, and cheap to change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.keys import ClaimKey, CommitKey, JobKey, Key, LineageKey, MarkerKey, ShardKey
from tiercheck.policy.observation import Contents

SMALL = st.integers(0, 3)
COMMITS = st.builds(lambda generation, base, more: CommitKey(generation, base + more, base), SMALL, SMALL, SMALL)
KEYS: st.SearchStrategy[Key] = st.one_of(
    st.builds(ShardKey.base, SMALL, SMALL, SMALL),
    st.builds(lambda first, more, rank: ShardKey.differential(1, first, first + more, rank), SMALL, SMALL, SMALL),
    st.builds(lambda base, more, rank: ShardKey.snapshot(1, base, base + 1 + more, rank), SMALL, SMALL, SMALL),
    st.builds(MarkerKey, COMMITS, SMALL),
    COMMITS,
    st.builds(LineageKey, SMALL),
    st.builds(ClaimKey, SMALL, st.just("0" * 16)),
    st.builds(JobKey, SMALL),
)
CHANGES = st.dictionaries(KEYS, st.none() | st.integers(0, 9), max_size=12)


@given(st.lists(CHANGES, max_size=5))
def test_changes_lead_to_what_a_listing_of_the_same_objects_gives(steps: list[dict[Key, int | None]]) -> None:
    contents, objects = Contents(), dict[Key, int]()
    for changes in steps:
        contents = contents.changed(changes)
        for key, nbytes in changes.items():
            if nbytes is None:
                objects.pop(key, None)
            else:
                objects[key] = nbytes
    listed = Contents.of(objects.items())
    assert contents.nbytes == listed.nbytes == objects
    assert set(contents) == set(objects) and all(key in contents for key in objects)
    assert (contents.commits, contents.newest_generation) == (listed.commits, listed.newest_generation)
    assert contents.snapshot_commits == listed.snapshot_commits
    assert sorted(contents.ranks) == sorted(listed.ranks)
    for rank in range(4):
        for kind in (Contents.bases, Contents.differentials, Contents.snapshots):
            assert kind(contents, rank) == kind(listed, rank)
            assert set(kind(contents, rank)) <= set(objects)


def test_a_change_leaves_what_other_ranks_hold_as_it_is() -> None:
    before = Contents.of((ShardKey.base(1, version, rank), 1) for rank in range(3) for version in range(5))
    others = [before.bases(rank) for rank in (0, 2)]
    after = before.changed({ShardKey.base(1, 5, 1): 1, ShardKey.base(1, 0, 1): None})
    assert [after.bases(rank) for rank in (0, 2)] == others
    assert all(after.bases(rank) is before.bases(rank) for rank in (0, 2)), "not sorted again"
    assert [key.first for key in after.bases(1)] == [1, 2, 3, 4, 5]
    assert [key.first for key in before.bases(1)] == [0, 1, 2, 3, 4]
