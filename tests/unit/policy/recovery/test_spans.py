"""Ranges of versions against sets of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck.policy.recovery.spans import both, contain, joined, spans_of

SETS = st.sets(st.integers(0, 20))


@given(SETS, SETS)
def test_they_are_what_the_sets_are(one: set[int], other: set[int]) -> None:
    def numbers(spans: tuple[tuple[int, int], ...]) -> list[int]:
        return [number for first, last in spans for number in range(first, last + 1)]

    assert numbers(spans_of(one)) == sorted(one)
    assert numbers(both(spans_of(one), spans_of(other))) == sorted(one & other)
    assert joined([*spans_of(one), *spans_of(other)]) == spans_of(one | other)
    assert [number for number in range(22) if contain(spans_of(one), number)] == sorted(one)
