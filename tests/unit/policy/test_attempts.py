"""What starts that failed have left in a shared tier: it goes without a commit, if nobody needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives

ROLES = (Role(0, "shm", Survives.PROCESS), Role(1, "store", Survives.RACK))
FIRST = Branch(1, 0, 0, 2, "a", layout="halves")
COMMITTED = (ShardKey.base(1, 6, 0), CommitKey(1, 6))


def lives(*left_at: int, kept: Iterable[int] = (), layouts: Sequence[str] = ()) -> Lineage:
    """Generation 1, and one after it for each version at which it was left. Each comes of generation 1."""
    later = [
        Branch(number, 1, version, 2, "a", layout=(*layouts, *["halves"] * len(left_at))[number - 2], kept=tuple(kept))
        for number, version in enumerate(left_at, 2)
    ]
    return Lineage.of([FIRST, *later])


def in_a_row(*left_at: int) -> Lineage:
    """Each comes of the one before it."""
    later = [Branch(number, number - 1, version, 2, "a", layout="halves") for number, version in enumerate(left_at, 2)]
    return Lineage.of([FIRST, *later])


def going(there: Iterable[Key], lineage: Lineage) -> list[Key]:
    """From the store, by rank 0 of two; and nothing else may go."""
    contents = (Contents.of(()), Contents.of((key, 1) for key in there))
    seen = Observation(ROLES, contents, 0, 2, lineage.newest, lineage)
    wanted = Retention().reclaimable(seen)
    assert checked_deletions(seen, wanted, "retention") == (wanted, [])
    everything = {1: [key for key in contents[1] if key not in wanted[1]]}
    assert checked_deletions(seen, everything, "evil")[0][1] == []
    return wanted[1]


@pytest.mark.parametrize("lineage", [lives(9, 9, 9), in_a_row(9, 9, 9)], ids=["of the first", "of the one before"])
def test_opening_bases_of_the_same_version_go_when_the_present_one_is_there(lineage: Lineage) -> None:
    older = [ShardKey.base(2, 9, 0), ShardKey.base(3, 9, 0)]
    marker = MarkerKey.of(older[0], 1, 1, "0" * 16, "")
    others = [ShardKey.base(2, 9, 1), ShardKey.differential(1, 7, 9, 0)]
    there = [*COMMITTED, *older, marker, *others]
    assert going(there, lineage) == []
    assert going([*there, ShardKey.base(4, 9, 0)], lineage) == [marker, *older]


def test_a_base_without_what_it_refers_to_stands_for_none() -> None:
    older, present = ShardKey.base(2, 9, 0), ShardKey.base(3, 9, 0, (3, 9))
    assert going([*COMMITTED, older, present], lives(9, 9)) == []
    assert going([*COMMITTED, older, present, ShardKey.constant(3, 9, 0)], lives(9, 9)) == [older]


def test_what_leads_to_another_version_of_the_past_stays() -> None:
    """The other ranks may come to that one only."""
    assert going([*COMMITTED, ShardKey.base(2, 9, 0), ShardKey.base(3, 11, 0)], in_a_row(9, 11)) == []


def test_another_future_goes_unless_a_request_has_left_it_behind_or_it_is_committed() -> None:
    older, present = [ShardKey.base(1, 12, 0), ShardKey.base(2, 9, 0)], ShardKey.base(3, 9, 0)
    assert going([*COMMITTED, *older, present], lives(9, 9)) == older
    assert going([*COMMITTED, *older, present], lives(9, 9, kept=[1, 2])) == []
    assert going([*COMMITTED, *older, CommitKey(2, 9), present], lives(9, 9)) == older[:1]


def test_what_was_saved_under_another_layout_stands_for_other_parts() -> None:
    older = ShardKey.base(1, 9, 0)
    assert going([*COMMITTED, older, ShardKey.base(2, 9, 0)], lives(9)) == [older]
    assert going([*COMMITTED, older, ShardKey.base(2, 9, 0)], lives(9, layouts=["thirds"])) == []


def test_constants_go_when_no_base_refers_to_them_any_more() -> None:
    first, second, present = (ShardKey.base(each, 0, 0, (each, 0)) for each in (1, 2, 3))
    constants = [ShardKey.constant(each, 0, 0) for each in (1, 2, 3)]
    apart = Lineage.of([FIRST, *(Branch(number, 0, 0, 2, "a", layout="halves") for number in (2, 3))])
    assert going([first, second, *constants[:2]], apart) == []
    assert going([first, second, present, *constants], apart) == [first, second, *constants[:2]]
    refers = ShardKey.base(3, 0, 0, (2, 0))
    assert going([first, second, refers, *constants[:2]], apart) == [first, second, constants[0]]
