"""The consensus against an oracle that tries everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercheck import keys
from tiercheck.policy.consensus import Readable, decide
from tiercheck.policy.lineage import Branch, Lineage

VERSIONS = st.integers(0, 8)
GENERATIONS = st.integers(1, 3)
PAIRS = st.frozensets(st.tuples(GENERATIONS, VERSIONS), max_size=20)
RANKS = st.lists(st.builds(Readable, PAIRS, PAIRS), min_size=1, max_size=3)


@st.composite
def lineages(draw: st.DrawFn) -> Lineage:
    branches = [Branch(1, 0, 0, 1, "a")]
    for generation in range(2, draw(st.integers(1, 3)) + 1):
        parent = draw(st.integers(1, generation - 1))
        branches.append(Branch(generation, parent, draw(VERSIONS), 1, "a"))
    return Lineage.of(branches)


def reaches(rank: Readable, generation: int, anchor: int, last: int) -> bool:
    return (generation, anchor) in rank.bases and all(
        (generation, version) in rank.differentials for version in range(anchor + 1, last + 1)
    )


@given(RANKS, lineages())
def test_the_point_is_reachable_and_none_of_its_generation_is_newer(ranks: list[Readable], lineage: Lineage) -> None:
    every = [
        (generation, last)
        for generation in (1, 2, 3)
        for last in range(9)
        if lineage.admits(generation, last)
        and all(any(reaches(rank, generation, anchor, last) for anchor in range(last + 1)) for rank in ranks)
    ]
    points = decide(ranks, lineage)
    if points is None:
        assert every == []
        return
    position = {generation: index for index, (generation, _) in enumerate(lineage.chain)}
    newest = min(every, key=lambda version: (position[version[0]], -version[1]))
    for rank, point in zip(ranks, points, strict=True):
        assert (point.generation, point.last) == newest
        usable = [anchor for anchor in range(point.last + 1) if reaches(rank, point.generation, anchor, point.last)]
        assert point.anchor == max(usable)


@given(st.lists(PAIRS, min_size=1, max_size=4), lineages())
def test_more_to_read_never_moves_the_point_back(bases: list[frozenset[tuple[int, int]]], lineage: Lineage) -> None:
    fewer = [Readable(each, frozenset()) for each in bases]
    more = [Readable(each | bases[0], frozenset()) for each in bases]
    order = [generation for generation, _ in lineage.chain]
    before, after = decide(fewer, lineage), decide(more, lineage)
    if before is not None:
        assert after is not None
        position, last = order.index(before[0].generation), before[0].last
        assert (-order.index(after[0].generation), after[0].last) >= (-position, last)


@given(st.text(max_size=80))
def test_parsing_a_key_never_fails_and_is_the_inverse_of_writing_it(text: str) -> None:
    key = keys.parse(text)
    assert key is None or str(key) == text


@given(st.integers(0, 999_999), st.integers(0, 10**12 - 1), st.integers(0, 1000), st.integers(0, 99_999))
def test_keys_come_back(generation: int, version: int, more: int, rank: int) -> None:
    last = min(version + more, 10**12 - 1)
    for key in (
        keys.ShardKey.base(generation, version, rank),
        keys.ShardKey.differential(generation, version, last, rank),
        keys.MarkerKey(generation, version, rank),
        keys.CommitKey(generation, version),
        keys.LineageKey(generation),
    ):
        assert keys.parse(str(key)) == key
        assert keys.validate_key(str(key)) == str(key)


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 10**6)), max_size=20))
def test_the_order_of_keys_is_the_order_of_versions(pairs: list[tuple[int, int]]) -> None:
    shards = [keys.ShardKey.base(generation, version, 0) for generation, version in pairs]
    assert [str(key) for key in sorted(shards)] == sorted(str(key) for key in shards)
