"""What is deleted when a generation opens."""

from dataclasses import replace

from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.agreement import NO_MARK
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.recovery.opening import Anew, Reach, anew, lost_versions, superseded_at_opening
from tiercheck.types import Survives

ROLES = [Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE)]
LINEAGE = Lineage.of([Branch(1, 0, 0, 2, "a" * 16), Branch(2, 1, 3, 2, "b" * 16)])


def of_rank_0(held: set[tuple[int, ShardKey]], damaged: set[tuple[int, ShardKey]], versions: list[int]) -> set[Copy]:
    """What rank 0 deletes of ``held`` and ``damaged``: pairs of a tier and a shard there."""
    sound = [Copy(*each) for each in held]
    seen = [*sound, *(Copy(*each) for each in damaged)]
    return set(superseded_at_opening(seen, 0, ROLES, LINEAGE, versions, sound, []))


def test_constants_stay_in_memory_for_bases_there_and_for_the_recovered_one() -> None:
    roles = [*ROLES, Role(2, "nvme", Survives.RACK)]
    lineage = Lineage.of([Branch(1, 0, 0, 1, "a" * 16)])
    constants = [ShardKey.constant(1, version, 0) for version in (0, 2, 4, 6)]
    bases = [ShardKey.base(1, version, 0, (1, version)) for version in (0, 2, 4, 6)]
    durable = {Copy(2, key) for key in (*bases, *constants) if key != constants[1]}  # there 2 lacks what it refers to
    sound = {*durable, Copy(1, bases[3]), *(Copy(0, key) for key in constants)}

    def gone(recovered: ShardKey | None) -> list[ShardKey]:
        found = superseded_at_opening(sound, 0, roles, lineage, (6,), sound, (), recovered)
        return [copy.key for copy in found]

    assert gone(constants[2]) == [constants[0]], "the shared tier has what its base refers to"
    assert gone(None) == [constants[0], constants[2]]


def differentials(generation: int, first: int, last: int) -> set[tuple[int, ShardKey]]:
    """One a version, in memory."""
    return {(0, ShardKey.differential(generation, each, each, 0)) for each in range(first, last + 1)}


def test_what_each_nodes_failure_would_leave_stays_within_reach() -> None:
    """No version is held twice by all. Without rank 0's node the newest is 2, without rank 1's it is 0."""
    lineage = Lineage.of([Branch(1, 0, 0, 2, "a" * 16)])
    memory = [ShardKey.base(1, base, 0) for base in (0, 2, 4)]
    held = [[Copy(0, replace(key, rank=rank)) for key in memory] for rank in (0, 1)]
    held[0].append(Copy(1, ShardKey.base(1, 2, 0)))
    held[1].append(Copy(1, ShardKey.base(1, 0, 1)))
    known = anew([Reach.of(each, ROLES, lineage) for each in held], 4)
    assert known == Anew(NO_MARK, (4, 0, 2))
    for rank, each in enumerate(held):
        gone = superseded_at_opening(each, rank, ROLES, lineage, known.versions, each, [])
        assert [(source.tier, source.key.first) for source in gone] == [(0, 2)], "two bases leave room for another one"


def test_a_version_that_a_kept_base_leads_to_needs_no_base_of_its_own() -> None:
    """Two bases leave room for another one. A snapshot of the older one leads to version 3 as well."""
    oldest, newest = (0, ShardKey.base(1, 0, 0)), (0, ShardKey.base(2, 6, 0))
    snapshot, between = (0, ShardKey.snapshot(1, 0, 3, 0)), (0, ShardKey.base(2, 3, 0))
    assert of_rank_0({oldest, snapshot, between, newest}, set(), [6, 0, 3]) == {Copy(*between)}
    assert of_rank_0({oldest, snapshot, between, newest}, set(), [6, 3]) == {Copy(*oldest), Copy(*snapshot)}


def test_a_damaged_base_takes_the_room_of_no_sound_one() -> None:
    """The neighbour's copy is the one that was read. In memory, 5 leads to version 7 as well, and 2 to version 4."""
    damaged = (0, ShardKey.base(2, 7, 0))
    sound = {(0, ShardKey.base(2, 2, 0)), (0, ShardKey.base(2, 5, 0)), (1, ShardKey.base(2, 7, 0))}
    sound |= differentials(2, 3, 7)
    assert of_rank_0(sound, {damaged}, [7, 4]) == {Copy(*damaged)}


def test_a_damaged_base_goes_though_versions_after_it_stay() -> None:
    """Version 8 was captured on this rank alone. It follows the base, which was read from the neighbour."""
    damaged = (0, ShardKey.base(2, 7, 0))
    sound = {(0, ShardKey.base(2, 2, 0)), (0, ShardKey.base(2, 5, 0)), (1, ShardKey.base(2, 7, 0))}
    sound |= differentials(2, 3, 8)
    assert of_rank_0(sound, {damaged}, [7, 4]) == {Copy(*damaged)}


def test_versions_are_named_that_only_deleted_copies_held() -> None:
    roles = [*ROLES, Role(2, "nvme", Survives.RACK)]
    base = (0, ShardKey.base(1, 0, 0))
    gone = {Copy(*each) for each in (base, *differentials(1, 1, 3), *differentials(2, 5, 5))}
    staying = {Copy(0, ShardKey.base(1, 2, 0)), Copy(2, ShardKey.differential(1, 0, 1, 0))}
    assert lost_versions(gone, gone | staying, roles, LINEAGE) == ((3, 3), (5, 5))
    assert lost_versions({Copy(0, ShardKey.differential(1, 4, 9, 0))}, set(), roles, LINEAGE) == (), "another future"
    assert lost_versions(gone, gone | staying, ROLES, LINEAGE) == (), "no tier was to keep them"
