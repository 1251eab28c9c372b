"""The consensus against an oracle that tries everything."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercheck import keys
from tiercheck.policy.commit import to_commit, to_mark
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import (
    BasesOnly,
    Best,
    EveryNth,
    Everywhere,
    KeepBest,
    KeepEvery,
    KeepLast,
    PlacementPolicy,
    RetentionPolicy,
)
from tiercheck.policy.recovery.agreement import agreed, needs_agreement, reach
from tiercheck.policy.recovery.consensus import Readable, decide
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention, watermark
from tiercheck.types import Survives

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
def test_the_point_is_reachable_and_none_is_newer(ranks: list[Readable], lineage: Lineage) -> None:
    def anchors(rank: Readable, generation: int, last: int) -> list[int]:
        admitted = range(last + 1) if lineage.admits(generation, last) else range(0)
        return [anchor for anchor in admitted if reaches(rank, generation, anchor, last)]

    every = [
        last
        for last in range(9)
        if all(any(anchors(rank, generation, last) for generation in (1, 2, 3)) for rank in ranks)
    ]
    points = decide(ranks, lineage)
    if points is None:
        assert every == []
        return
    for rank, point in zip(ranks, points, strict=True):
        assert point.last == max(every)
        assert point.anchor == max(anchors(rank, point.generation, point.last))


@given(st.lists(PAIRS, min_size=1, max_size=4), lineages())
def test_more_to_read_never_moves_the_point_back(bases: list[frozenset[tuple[int, int]]], lineage: Lineage) -> None:
    fewer = [Readable(each, frozenset()) for each in bases]
    more = [Readable(each | bases[0], frozenset()) for each in bases]
    before, after = decide(fewer, lineage), decide(more, lineage)
    if before is not None:
        assert after is not None
        assert after[0].last >= before[0].last


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
        keys.MarkerKey(keys.CommitKey(generation, version), rank),
        keys.ShardKey.constant(generation, version, rank),
        keys.ShardKey.base(generation, version, rank, (generation, more)),
        keys.MarkerKey.of(keys.ShardKey.base(generation, version, rank, (generation, more)), 1, 1, "0" * 16, ""),
        keys.CommitKey(generation, version),
        keys.LineageKey(generation),
    ):
        assert keys.parse(str(key)) == key
        assert keys.validate_key(str(key)) == str(key)


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 10**6)), max_size=20))
def test_the_order_of_keys_is_the_order_of_versions(pairs: list[tuple[int, int]]) -> None:
    shards = [keys.ShardKey.base(generation, version, 0) for generation, version in pairs]
    assert [str(key) for key in sorted(shards)] == sorted(str(key) for key in shards)


ROLES = st.sampled_from(
    [
        (Survives.PROCESS,),
        (Survives.PROCESS, Survives.RACK),
        (Survives.PROCESS, Survives.NODE),
        (Survives.PROCESS, Survives.NODE, Survives.RACK),
        (Survives.PROCESS, Survives.RACK, Survives.SITE),
    ]
)
ROUNDS_MAX = 40


@st.composite
def shards(draw: st.DrawFn) -> keys.ShardKey:
    generation, first, rank = draw(st.integers(1, 2)), draw(st.integers(0, 12)), draw(st.integers(0, 1))
    match draw(st.sampled_from(list(keys.Stream))):
        case keys.Stream.BASE:
            return keys.ShardKey.base(generation, first, rank)
        case keys.Stream.CONSTANT:
            return keys.ShardKey.constant(generation, first, rank)
        case keys.Stream.SNAPSHOT:
            return keys.ShardKey.snapshot(generation, first, first + draw(st.integers(1, 4)), rank)
    return keys.ShardKey.differential(generation, first + 1, first + 1 + draw(st.integers(0, 3)), rank)


def reports() -> st.SearchStrategy[keys.MetricKey]:
    return st.builds(keys.MetricKey, st.integers(1, 2), VERSIONS, st.just("loss"), st.sampled_from([0.1, 0.2, 0.3]))


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """What rank 0 of one or two sees. A base may be marked, or committed. From some version on, bases refer to
    constants: some tiers lack them, but none that has committed such a base."""
    roles = tuple(Role(index, survives.name, survives) for index, survives in enumerate(draw(ROLES)))
    world_size = draw(st.integers(1, 2))
    lineage = Lineage.of([Branch(1, 0, 0, world_size, "a"), Branch(2, 1, draw(st.integers(0, 8)), world_size, "b")])
    contents: list[Contents] = []
    made = draw(st.lists(st.tuples(GENERATIONS, VERSIONS), max_size=3))
    for role in roles:
        held: set[keys.Key] = {referring(key, made) for key in draw(st.lists(shards(), max_size=14))}
        bases = [key for key in held if isinstance(key, keys.ShardKey) and key.stream is keys.Stream.BASE]
        if role.shared and bases:
            for key in draw(st.lists(st.sampled_from(bases), max_size=3)):
                committed = [replace(key, rank=rank) for rank in range(world_size)]
                held |= {*committed, *(each.constants for each in committed if each.constants)}
                held |= {keys.MarkerKey.of(each, 0, 0, "0" * 16, "") for each in committed}
                held.add(keys.CommitKey(key.generation, key.first))
        if draw(st.booleans()):
            held |= {each.constants for each in bases if each.constants}
        held |= set(draw(st.lists(reports(), max_size=4)))
        contents.append(Contents.of((key, 1) for key in held))
    seen = Observation(roles, tuple(contents), 0, world_size, 2, lineage)
    told = draw(st.booleans()) and needs_agreement(roles, world_size)
    return Observation(*vars_of(seen), mark=agreed([reach(seen)]) if told else None)


def referring(key: keys.ShardKey, made: list[tuple[int, int]]) -> keys.ShardKey:
    """The key of a base as its recorder writes it: it refers to the newest constants that there are by then."""
    if key.stream is not keys.Stream.BASE:
        return key
    return replace(key, refers_to=max((each for each in made if each <= (key.generation, key.first)), default=()))


def vars_of(seen: Observation) -> tuple[tuple[Role, ...], tuple[Contents, ...], int, int, int, Lineage]:
    return seen.roles, seen.contents, seen.rank, seen.world_size, seen.generation, seen.lineage


def reached(seen: Observation, tiers: frozenset[int]) -> int:
    """The newest version that the rank can come to from these tiers; -1 for none."""
    held = [key for role in seen.roles if role.index in tiers for key in seen.own(role)]
    return max(Readable.of(held).ways(seen.lineage), default=-1)


@settings(max_examples=300)
@given(
    observations(),
    st.sampled_from([KeepLast(1), KeepLast(2), KeepLast(3), KeepEvery(3), KeepBest("loss", 2)]),
    st.sampled_from([None, KeepEvery(1), KeepEvery(2), KeepEvery(4), KeepBest("loss", 1, Best.MAX)]),
    st.sampled_from([Everywhere(), BasesOnly("RACK"), EveryNth("RACK", 2) & BasesOnly("SITE"), EveryNth("NODE", 3)]),
    st.integers(1, 4),
    st.sampled_from([(2, 0), (2, 0), (4, 1), (5, 2)]),
    st.booleans(),
)
def test_placement_and_retention_come_to_rest_and_delete_nothing_that_is_needed(
    seen: Observation,
    kept: RetentionPolicy,
    more: RetentionPolicy | None,
    placed: PlacementPolicy,
    batch: int,
    intervals: tuple[int, int],
    closing: bool,
) -> None:
    placement = Placement(batch, placed, *intervals)
    retention = Retention(kept if more is None else kept | more, placement)
    for _ in range(ROUNDS_MAX):
        transfers = retention.wanted(seen, placement.transfers(seen, closing=closing))
        puts: list[tuple[int, keys.Key]] = [(each.target_tier, each.target) for each in transfers]
        puts += [(role.index, key) for role in seen.roles for key in retention.reports(seen, role.index)]
        to_be_marked = [(role.index, shard) for role in seen.roles for shard in to_mark(seen, role.index)]
        puts += [(index, keys.MarkerKey.of(shard, 0, 0, "0" * 16, "")) for index, shard in to_be_marked]
        puts += [(role.index, key) for role in seen.roles for key in (*to_commit(seen, role.index),)]
        seen = seen.after(puts)
        gone = retention.reclaimable(seen)
        assert checked_deletions(seen, gone, "retention") == (gone, [])
        after = seen.without(gone)
        check_nothing_needed_is_gone(seen, after)
        check_no_base_loses_what_it_refers_to(seen, after)
        if not puts and not any(gone.values()):
            return
        seen = after
    raise AssertionError("placement and retention never come to rest")


def check_no_base_loses_what_it_refers_to(before: Observation, after: Observation) -> None:
    for role in before.roles:
        for rank in range(before.world_size):
            for base in after.contents[role.index].bases(rank):
                completed = before.contents[role.index].completes(base)
                assert after.contents[role.index].completes(base) or not completed
                committed = keys.CommitKey.of(base) in after.contents[role.index] and role.shared
                assert not committed or rank or after.contents[role.index].completes(base)


@given(observations(), st.data())
def test_whoever_asks_no_base_loses_what_it_refers_to(seen: Observation, data: st.DataObject) -> None:
    """A retention that would delete anything."""
    everything = {role.index: sorted(seen.contents[role.index], key=str) for role in seen.roles}
    wanted = {
        index: data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        for index, held in everything.items()
    }
    allowed, _ = checked_deletions(seen, wanted, "evil")
    check_no_base_loses_what_it_refers_to(seen, seen.without(allowed))


def check_nothing_needed_is_gone(before: Observation, after: Observation) -> None:
    mark = watermark(before)
    if mark is not None:
        assert watermark(after) == mark
        assert reached(after, frozenset({before.durable.index})) >= mark.version
    elif not before.durable.shared and before.mark is not None and before.mark >= 0:
        assert reached(after, frozenset(role.index for role in before.roles)) >= before.mark
    else:
        everywhere = frozenset(role.index for role in before.roles)
        if before.world_size == 1:
            assert reached(after, everywhere) >= reached(before, frozenset({before.durable.index}))
