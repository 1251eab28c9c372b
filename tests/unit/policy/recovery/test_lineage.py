"""What a generation's record tells of the generations before it."""

from __future__ import annotations

import pytest

from tiercheck import schema
from tiercheck.keys import ClaimKey, CommitKey, Key, LineageKey, ShardKey
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.recovery.lineage import ANCESTORS_TOLD, Branch, Lineage, LineageRecord, worth_telling
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives


def branch(generation: int, parent: int | None = None, ranks: int = 1) -> Branch:
    return Branch(generation, generation - 1 if parent is None else parent, generation, ranks, f"{generation:016x}")


def told(branches: list[Branch], parent: int, captured: set[int]) -> list[int]:
    return [each.generation for each in worth_telling(branches, parent, captured, 1)]


def test_ancestors_of_which_nothing_is_left_leave_the_lineage() -> None:
    past = [branch(generation) for generation in range(1, 1001)]
    first = 1001 - ANCESTORS_TOLD
    assert told(past, 1000, {998, 1000}) == list(range(first, 1001)), "a tier that was left out may know one of them"
    assert told(past, 1000, set()) == list(range(first, 1001))
    assert told(past[600:], 1000, {700}) == list(range(700, 1001)), "those between link the two"
    assert told([], 0, set()) == []


def test_another_future_is_told_of_as_long_as_something_of_it_is_left() -> None:
    past = [branch(1), branch(2, 1), branch(3, 1)]
    assert told(past, 3, {1, 2, 3}) == [1, 2, 3]
    assert told(past, 3, {1, 3}) == [1, 3]
    assert told(past, 0, {2}) == [2], "the job begins anew"


def test_a_start_on_more_ranks_is_told_of_for_a_while() -> None:
    """What its other ranks have brought to a shared tier, no rank of the job sees."""
    past = [branch(1), branch(2, 1, 4)]
    assert told(past, 1, {1}) == [1, 2]
    later = [branch(each, max(1, each - 1) if each != 3 else 1) for each in range(3, 3 + ANCESTORS_TOLD)]
    assert 2 in told([*past, *later[:-1]], later[-2].generation, {later[-2].generation})
    assert 2 not in told([*past, *later], later[-1].generation, {later[-1].generation})


def test_what_is_told_leads_to_the_same_versions() -> None:
    past = [branch(1), branch(2, 1), branch(3, 1), branch(4, 3), branch(5, 4)]
    record = LineageRecord.of(branch(6), worth_telling(past, 5, {3, 5}, 1))
    assert Lineage.of([record.branch, *record.told]).chain == Lineage.of([*past, branch(6)]).chain


def test_a_record_that_tells_of_a_newer_generation_contradicts_itself() -> None:
    assert LineageRecord.of(branch(2), [branch(1), branch(2), branch(3)]).told == (branch(1),)
    with pytest.raises(ValueError, match="tells of a newer one"):
        LineageRecord(2, 1, 1, 1, "a", past=((3, 2, 1, 1, "b", "", "", ()),))


@pytest.mark.parametrize("rank", [0, 1])
def test_old_records_go_once_the_generation_has_a_committed_base(rank: int) -> None:
    base = ShardKey.base(9, 40, rank)
    records: list[Key] = [*map(LineageKey, range(1, 10)), ClaimKey(3, "a" * 16), ClaimKey(9, "a" * 16)]
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "s3", Survives.RACK))

    def gone(*more: Key) -> list[set[Key]]:
        contents = tuple(Contents.of((key, 1) for key in (*records, base, *each)) for each in ((), more))
        seen = Observation(roles, contents, rank, 2, 9, Lineage(((9, None),)))
        found = Retention().reclaimable(seen)
        return [set(found[index]) for index in (0, 1)]

    assert gone() == [set(), set()]
    old = {*map(LineageKey, range(1, 7)), ClaimKey(3, "a" * 16)}
    assert gone(CommitKey(9, 40)) == [old, old if rank == 0 else set()]


def test_a_record_retells_what_was_made_anew_and_an_older_release_reads_it_without() -> None:
    made = Branch(2, 1, 7, 3, "b", made=("stage 1 is the average of 0 and 2",))
    record = LineageRecord.of(branch(3), [branch(1), made])
    read = schema.read(LineageRecord, schema.plain(record))
    assert read.branch == branch(3)
    assert [each.made for each in read.told] == [(), made.made]
    older = {name: each for name, each in schema.plain(record).items() if name not in ("made", "past_made")}
    told = schema.read(LineageRecord, older).told
    assert told == read.told, "it is the same generation, whoever tells of it"
    assert [each.made for each in told] == [(), ()]
    assert all(len(each) == 8 for each in record.past), "an older release takes no more fields of a branch"
    own = LineageRecord.of(made)
    assert own.branch.made == own.made == made.made
