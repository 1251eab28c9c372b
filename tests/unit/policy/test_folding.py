"""What is folded next, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import example, given
from hypothesis import strategies as st

from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold, gap_after, lag, next_fold, waiting
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.types import Survives

LINEAGE = Lineage.of([Branch(2, 0, 0, 1, "0" * 16)])


def seen(*keys: ShardKey) -> Observation:
    return Observation((Role(0, "shm", Survives.PROCESS),), (Contents.of((key, 1) for key in keys),), 0, 1, 2, LINEAGE)


def base(version: int, generation: int = 2) -> ShardKey:
    return ShardKey.base(generation, version, 0)


def steps(versions: Iterable[int]) -> tuple[ShardKey, ...]:
    return tuple(ShardKey.differential(2, version, version, 0) for version in versions)


def test_the_newest_base_is_led_to_the_next_version_that_is_due() -> None:
    held = seen(base(0), base(10), *steps(range(8, 24)))
    assert next_fold(held, [20]) == Fold(base(10), steps(range(11, 21)), 20)
    assert next_fold(held, [23, 10, 20]) == Fold(base(10), steps(range(11, 21)), 20), "one after another"
    assert (waiting(held, [23, 10, 20]), lag(held, [23, 10, 20])) == ([20, 23], 3)
    assert next_fold(seen(base(10), *steps(range(11, 20))), [20]) is None, "version 20 is not there"
    assert (next_fold(held, []), next_fold(held, [10]), lag(held, [10])) == (None, None, 0)


def test_a_newer_base_stands_for_those_before_it() -> None:
    held = seen(base(10), base(22), *steps(range(11, 24)))
    assert (next_fold(held, [20]), waiting(held, [20]), lag(held, [20])) == (None, [], 0)


def test_in_between_a_fold_goes_as_far_as_it_can() -> None:
    """But not to a version that is due, and none of which is known that it is left to be folded."""
    held = seen(base(10), *steps(range(11, 18)))
    assert next_fold(held, [], 3, 10) == Fold(base(10), steps(range(11, 16)), 15), "15 costs as much as 12"
    assert next_fold(seen(base(15), *steps(range(16, 18))), [], 3, 10) is None
    further = seen(base(15), *steps(range(16, 24)))
    assert next_fold(further, [], 3, 10) == Fold(base(15), steps(range(16, 19)), 18)
    assert next_fold(further, [20], 3, 10) == Fold(base(15), steps(range(16, 21)), 20)
    assert next_fold(seen(base(18), *steps(range(19, 24))), [], 3, 10) is None, "version 20 gets a captured base"
    assert next_fold(seen(base(10)), [], 3, 10) is None


def test_an_older_generations_base_is_not_folded() -> None:
    assert next_fold(seen(base(0, 1), *steps(range(1, 11))), [10]) is None
    assert (waiting(seen(base(0, 1)), [10]), gap_after(seen(base(0, 1)))) == ([], None)


def test_a_gap_is_told() -> None:
    held = seen(base(10), *steps([11, 12, 14, *range(15, 31)]))
    assert next_fold(held, [20]) is None
    assert gap_after(held) == 12
    assert gap_after(seen(base(14), *steps([11, 12, 14]))) is None


@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 60), st.sets(st.integers(1, 60), max_size=2))
@example(18, 0, 18, {18})
def test_a_fold_is_whole_and_ends_where_it_is_due(due: int, at: int, newest: int, lost: set[int]) -> None:
    there = [version for version in range(1, newest + 1) if version not in lost]
    held = seen(base(at), *steps(there))
    fold = next_fold(held, [due])
    if due > at and set(range(at + 1, due + 1)) <= set(there):
        assert fold == Fold(base(at), steps(range(at + 1, due + 1)), due)
    else:
        assert fold is None
    if fold is None and max(there, default=0) >= due > at:
        assert gap_after(held) is not None, "what is due, was captured, and is not folded has a reason"
