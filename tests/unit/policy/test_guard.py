"""Evil policies are refused by name, whatever they break; what they would have decided is decided safely."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.unit.policy.test_placement import base, batch, committed, seen, single
from tiercheck.errors import ConfigurationError
from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey, Stream
from tiercheck.policy.guard import (
    ask_cadence,
    ask_pacing,
    ask_placement,
    ask_retention,
    checked_deletions,
    refuse_uncovered,
)
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.policies import (
    BasesOnly,
    CadencePolicy,
    Candidate,
    Committed,
    Copying,
    EveryNth,
    Everywhere,
    Keep,
    KeepLast,
    PacingPolicy,
    PlacementPolicy,
    Progress,
    RetentionPolicy,
)
from tiercheck.policy.recovery.agreement import agreed, reach
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.types import Survives


@dataclass(frozen=True)
class Evil(RetentionPolicy, PlacementPolicy, PacingPolicy, CadencePolicy):
    """Answers with whatever it was made with, or raises it."""

    answer: Any

    def keep(self, seen: Committed) -> Keep:
        return self._answered()

    def wants(self, shard: Candidate) -> bool:
        return self._answered()

    def bytes_per_s(self, seen: Copying) -> float | None:
        return self._answered()

    def due(self, seen: Progress) -> bool:
        return self._answered()

    @property
    def interval(self) -> int:
        return 10

    def _answered(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


BASE = Candidate("durable", Survives.RACK, Stream.BASE, 10, 10, 1)
PAST = Committed("durable", (0, 10, 20))
COPY = Copying("durable", Survives.RACK, Stream.BASE, 100, 0)


@pytest.mark.parametrize("answer", [ZeroDivisionError("no value yet"), None, 1, "yes"])
def test_a_policy_that_raises_or_answers_nonsense_is_refused_and_the_safe_decision_is_taken(answer: object) -> None:
    for (decision, refusal), safe in (
        (ask_retention(Evil(answer), PAST), Keep(since=0)),
        (ask_placement(Evil(answer), BASE), True),
        (ask_cadence(Evil(answer), Progress(5, 0, 1.0)), True),
    ):
        assert decision == safe
        assert str(refusal).startswith("Evil(answer=")
        assert ("it raises ZeroDivisionError: no value yet" if isinstance(answer, Exception) else "which is no") in str(
            refusal
        )


@pytest.mark.parametrize("keep", [Keep(versions=[1, 2]), Keep(frozenset({"1"})), Keep(since=True)])  # type: ignore[arg-type]  # evil
def test_what_is_no_set_of_versions_is_refused_and_everything_stays(keep: Keep) -> None:
    decision, refusal = ask_retention(Evil(keep), PAST)
    assert decision == Keep(since=0)
    assert "which are no versions" in str(refusal)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), "fast", True, ZeroDivisionError("no rate")])
def test_a_pace_at_which_nothing_arrives_is_refused_and_copies_are_not_paced(rate: object) -> None:
    decision, refusal = ask_pacing(Evil(rate), COPY)
    assert decision is None
    assert "nothing would reach the tier durable" in str(refusal) or "raises ZeroDivisionError" in str(refusal)
    assert ask_pacing(Evil(100), COPY) == (100.0, None)


def test_a_cadence_that_never_has_a_base_made_is_overruled_after_its_interval() -> None:
    assert ask_cadence(Evil(False), Progress(9, 0, 1.0)) == (False, None)
    assert ask_cadence(Evil(False), Progress(10, 0, 1.0)) == (True, None)


def test_a_placement_that_leaves_a_promised_failure_uncovered_is_refused_at_attach() -> None:
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE), Role(2, "s3", Survives.RACK))
    with pytest.raises(ConfigurationError, match=r"Evil\(answer=False\) is refused: it sends no base to s3, .*rack"):
        refuse_uncovered(Evil(False), roles, Survives.RACK, 100)
    refuse_uncovered(Evil(False), roles, Survives.NOTHING, 100)
    for policy in (Everywhere(), BasesOnly("s3") & EveryNth("s3", 100), EveryNth("peer", 7)):
        refuse_uncovered(policy, roles, Survives.RACK, 100)


MEMORY = [base(20), single(21), single(22), base(22), single(23)]
DURABLE = [*committed(0), *committed(10), *committed(20), batch(1, 5), batch(16, 20), batch(21, 22), base(22)]


@pytest.mark.parametrize(
    ("tier", "key", "reason"),
    [
        (1, base(20), "a recovery to version 20 needs"),
        (1, CommitKey(1, 20), "a recovery to version 20 needs"),
        (1, batch(21, 22), "a recovery to version 22 needs"),
        (1, base(22), "a recovery to version 22 needs"),
        (1, MarkerKey(CommitKey(1, 22), 0), "version 22 cannot be committed"),
        (1, base(20, rank=1), "which is rank 1's"),
        (0, base(22), "a recovery to version 22 needs"),
        (0, single(23), "a recovery to version 23 needs"),
        (0, single(23, rank=1), "which is rank 1's"),
    ],
)
def test_a_deletion_that_a_recovery_may_need_is_refused_by_name(tier: int, key: Key, reason: str) -> None:
    harmless: Key = base(0) if tier else base(20)
    allowed, refusals = checked_deletions(seen(MEMORY, DURABLE), {tier: [harmless, key]}, "Evil()")
    assert allowed[tier] == [harmless], "the rest is deleted"
    (refusal,) = refusals
    assert str(refusal).startswith(f"Evil() is refused: it would delete {key} from the tier ")
    assert reason in str(refusal)


def test_before_a_generation_has_a_committed_base_nothing_of_its_parents_goes_from_a_shared_tier() -> None:
    def second(durable: Iterable[Key]) -> Observation:
        lineage = Lineage.of([Branch(1, 0, 0, 1, "a"), Branch(2, 1, 22, 1, "b")])
        roles = seen([]).roles
        return Observation(roles, (Contents(), Contents.of((key, 1) for key in durable)), 0, 1, 2, lineage)

    old: list[Key] = [*committed(0), *committed(20)]
    for key in (base(0), base(20), CommitKey(1, 0)):
        allowed, refusals = checked_deletions(second([*old, base(22, 0, 2)]), {1: [key]}, "Evil()")
        assert allowed[1] == []
        assert "before this generation has a committed base" in str(refusals[0])
    assert checked_deletions(second([*old, *committed(22, 2)]), {1: [base(20), base(0)]}, "Evil()")[1] == []


def test_without_a_shared_tier_the_way_to_the_mark_stays() -> None:
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "peer", Survives.NODE))
    held: list[Key] = [base(10), *(single(version) for version in range(11, 15))]
    contents = (Contents.of((key, 1) for key in [*held, base(14)]), Contents.of((key, 1) for key in held))
    observation = Observation(roles, contents, 0, 2, 1, seen([]).lineage)
    observation = Observation(roles, contents, 0, 2, 1, seen([]).lineage, mark=agreed([reach(observation)]))
    assert observation.mark == 14
    gone: dict[int, list[Key]] = {1: [single(12)], 0: [base(10)]}
    allowed, refusals = checked_deletions(observation, gone, "Evil()")
    assert allowed == {0: [base(10)], 1: []} or allowed == {0: [], 1: []}
    assert "a recovery to version" in str(refusals[0])


def test_constants_are_needed_inside_a_node_by_bases_there_and_by_those_that_lack_them_in_a_shared_tier() -> None:
    """A part of the model is rewritten between any two bases, and the shared tier keeps many."""
    constants = [ShardKey.constant(1, version, 0) for version in range(0, 50, 10)]
    bases = [ShardKey.base(1, version, 0, (1, version)) for version in range(0, 50, 10)]
    markers: list[Key] = [CommitKey(1, version) for version in range(0, 50, 10)]

    def gone(durable: Iterable[Key]) -> list[Key]:
        observation = seen([*bases[-2:], *constants], durable)
        reclaimed = Retention(KeepLast(12)).reclaimable(observation)
        assert checked_deletions(observation, reclaimed, "KeepLast(12)") == (reclaimed, [])
        allowed, refusals = checked_deletions(observation, {0: list(constants)}, "Evil()")
        assert "refers to" in str(refusals[0])
        going = [key for key in reclaimed[0] if key in constants]
        assert allowed[0] == going
        return going

    assert gone([*bases, *constants, *markers]) == constants[:3], "the fourth goes after the base that refers to it"
    assert gone([*bases, *constants[1:], *markers]) == constants[1:3], "they go there again"


@pytest.mark.parametrize("survives", [Survives.RACK, Survives.NODE])
def test_a_base_that_lacks_its_constants_makes_no_older_one_superfluous(survives: Survives) -> None:
    lacking = [ShardKey.base(2, version, 0, (2, 1)) for version in (1, 2)]
    memory: list[Key] = [base(0), *lacking]
    durable: list[Key] = [base(0), *lacking, ShardKey.constant(2, 1, 0), CommitKey(1, 0), CommitKey(2, 2)]
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "other", survives))
    lineage = Lineage.of([Branch(1, 0, 0, 1, "a"), Branch(2, 1, 0, 1, "b")])
    contents = tuple(Contents.of((key, 1) for key in held) for held in (memory, durable))
    observation = Observation(roles, contents, 0, 1, 2, lineage)
    gone = Retention(KeepLast(1)).reclaimable(observation)
    assert base(0) not in gone[0]
    assert checked_deletions(observation, gone, "KeepLast(1)") == (gone, [])


@pytest.mark.parametrize(("survives", "goes"), [(Survives.RACK, False), (Survives.NODE, True)])
def test_a_base_that_lacks_its_constants_may_go_inside_a_node(survives: Survives, goes: bool) -> None:
    """It leads nowhere there. To a shared tier its constants may still be on their way."""
    lacking = ShardKey.base(1, 20, 0, (1, 15))
    held: list[Key] = [base(10), CommitKey(1, 10), lacking, CommitKey(1, 20)]
    roles = (Role(0, "shm", Survives.PROCESS), Role(1, "other", survives))
    contents = tuple(Contents.of((key, 1) for key in held) for _ in roles)
    observation = Observation(roles, contents, 0, 1, 1, seen([]).lineage)
    allowed, refusals = checked_deletions(observation, {0: [lacking], 1: [lacking]}, "Evil()")
    assert allowed == {0: [lacking], 1: [lacking] if goes else []}
    assert all(str(refusal).endswith("which a recovery to version 20 needs") for refusal in refusals)
    refused = checked_deletions(observation, {0: [base(10)], 1: [base(10)]}, "Evil()")[0]
    assert refused == {0: [], 1: []}, "it makes no older one superfluous"


def test_shards_that_nothing_needs_are_deleted() -> None:
    gone: dict[int, list[Key]] = {0: [base(20), single(21)], 1: [CommitKey(1, 0), base(0), batch(1, 5), batch(16, 20)]}
    assert checked_deletions(seen(MEMORY, DURABLE), gone, "KeepLast(1)") == (gone, [])
    assert ShardKey.base(1, 0, 0) == base(0)
