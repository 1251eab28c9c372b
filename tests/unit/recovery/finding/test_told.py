"""What a rank tells the others is small, however long its chain is, and is merged quickly."""

from __future__ import annotations

from tiercheck import schema
from tiercheck.keys import ShardKey
from tiercheck.policy.observation import Copy, Role
from tiercheck.policy.recovery.lineage import Branch
from tiercheck.recovery.finding.past import Past
from tiercheck.recovery.finding.survey import Survey
from tiercheck.recovery.finding.told import Told, packed_others, unpacked_others
from tiercheck.types import Survives

ROLES = [Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE), Role(2, "s3", Survives.RACK)]
NAMES = [role.name for role in ROLES]
A_NODE = 8


def survey_of(rank: int, last: int = 598) -> Survey:
    """Two bases and all that follows in three tiers; and what lies in the node's memory of the ranks beside."""
    bases = [ShardKey.base(3, version, rank) for version in (200, 400)]
    single = [ShardKey.differential(3, version, version, rank) for version in range(201, last + 1)]
    batches = [ShardKey.differential(3, first, first + 4, rank) for first in range(201, last - 4, 5)]
    node = rank // A_NODE * A_NODE
    beside = [(0, each) for each in range(node, node + A_NODE)] + [(1, node + A_NODE + n) for n in range(A_NODE)]
    branches = [Branch(number, number - 1, 100 * number, 4096, f"{number:016x}") for number in (1, 2, 3)]
    held = {0: [*bases, *single], 1: [*bases, *single], 2: [*bases, *batches]}
    others = [(tier, ShardKey.differential(3, last, last, each)) for tier, each in beside if each != rank]
    return Survey(
        sources=frozenset(Copy(tier, key) for tier, keys in held.items() for key in keys),
        others=frozenset(Copy(*each) for each in others),
        branches=frozenset((tier, branch) for tier in range(3) for branch in branches),
        recorded=frozenset((tier, branch.generation) for tier in range(3) for branch in branches),
        generations=frozenset((tier, 3) for tier in range(3)),
    )


def test_a_long_chain_is_told_in_less_than_a_kilobyte() -> None:
    survey = survey_of(4095)
    assert len(survey.sources) > 800
    assert len(schema.pack(Told.of(survey, NAMES, 4095))) + len(packed_others(survey)) < 512


def test_ranks_that_have_the_same_tell_the_same() -> None:
    told = [schema.pack(Told.of(survey_of(rank), NAMES, rank)) for rank in (0, 7, 4095)]
    assert len(set(told)) == 1


def test_what_is_told_of_others_comes_back() -> None:
    assert unpacked_others(packed_others(Survey())) == []
    found = unpacked_others(packed_others(survey_of(9)))
    assert (0, 8, 3, 598) in found and (1, 16, 3, 598) in found
    assert len(found) == 2 * A_NODE - 1


def test_the_ranks_meet_by_what_they_tell() -> None:
    past = Past.of([survey_of(0), survey_of(1, 597), survey_of(2, 596)], ROLES, "here")
    assert past.version() == 596
    assert past.in_memory(596) and past.covers(596)
    assert past.generation(596) == 3
    assert past.taken == 3
    assert Copy(0, ShardKey.base(3, 0, 2)) in past.owned, "its owner sees that place"
    assert Copy(0, ShardKey.base(2, 0, 2)) not in past.owned
    assert Copy(0, ShardKey.base(3, 0, 9)) not in past.owned
