"""The kit for policies: a policy that passes it may be named in a job, in the trainer and in the agent.

::

    class TestKeepImproved(PolicyTests):
        def make_policy(self) -> Policy:
            return KeepImproved("eval_loss", by=0.01)

It asks the policy about random observations, and lets it decide in random tiers, by the very code of the mover.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey, Stream
from tiercheck.policy.commit import to_commit, to_mark
from tiercheck.policy.compose.placement import INTERVALS_MAX
from tiercheck.policy.guard import (
    Refusal,
    ask_cadence,
    ask_pacing,
    ask_placement,
    ask_retention,
    checked_deletions,
    refuse_no_versions,
    refuse_uncovered,
)
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import (
    KINDS,
    CadencePolicy,
    Candidate,
    Committed,
    Copying,
    KeepLast,
    Metric,
    PacingPolicy,
    PlacementPolicy,
    Policy,
    Progress,
    RetentionPolicy,
)
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.replication.named_policies import combined, policy_texts
from tiercheck.types import Survives

__all__ = ["PolicyTests"]

T = TypeVar("T")

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, database=None)
IMPURE = frozenset(
    {"asyncio", "concurrent", "datetime", "fcntl", "io", "logging", "mmap", "multiprocessing", "os", "pathlib"}
    | {"secrets", "selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch"}
    | {"random", "uuid"}
)
"""What a module of policies has no business with: time and randomness enter as arguments."""
TIERS = ("peer", "s3")
ROUNDS_MAX = 40
BASE_EVERY = 4


class PolicyTests:
    """The kit. A subclass makes the policy; nothing else is needed."""

    metrics: tuple[str, ...] = ("eval_loss",)
    """The names of the metrics that the policy asks for."""
    tiers: tuple[str, ...] = TIERS
    """The names of the tiers that the policy knows."""

    def make_policy(self) -> Policy:
        """A policy, the same each time."""
        raise NotImplementedError("a subclass makes the policy")

    def test_it_is_a_frozen_value(self) -> None:
        """Two that are made alike are equal, and none can be changed."""
        policy = self.make_policy()
        assert dataclasses.is_dataclass(policy), "make it a dataclass"
        assert type(policy).__dataclass_params__.frozen, "make it frozen: @dataclass(frozen=True)"
        assert policy == self.make_policy(), "two that are made alike differ"
        assert hash(policy) == hash(self.make_policy()), "two that are equal have two hashes"

    def test_its_text_names_it(self) -> None:
        """An agent makes the same policy from the replication job."""
        policy = self.make_policy()
        (kind,) = (kind for kind, base in KINDS.items() if isinstance(policy, base))
        assert combined(kind, policy_texts(policy)) == policy

    def test_its_module_does_no_io(self) -> None:
        """A policy is handed all it may know."""
        module = sys.modules[type(self.make_policy()).__module__]
        tree = ast.parse(inspect.getsource(module))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        impure = {name for name in imported if name.partition(".")[0] in IMPURE}
        assert not impure, f"{module.__name__} imports {', '.join(sorted(impure))}: a policy takes observations instead"

    def test_its_decisions_are_taken_and_the_same_each_time(self) -> None:
        """It never raises, and answers one observation with one decision, which no guard refuses."""
        policy = self.make_policy()
        if isinstance(policy, RetentionPolicy):
            self._decides(lambda seen: ask_retention(policy, seen), self._pasts(), policy.keep)
        elif isinstance(policy, PlacementPolicy):
            self._decides(lambda seen: ask_placement(policy, seen), self._candidates(), policy.wants)
        elif isinstance(policy, CadencePolicy):
            refuse_no_versions(policy)
            self._decides(lambda seen: ask_cadence(policy, seen), self._progress(), policy.due)
        else:
            assert isinstance(policy, PacingPolicy)
            self._decides(lambda seen: ask_pacing(policy, seen), self._copies(), policy.bytes_per_s)

    def test_ranks_that_see_different_clocks_agree_on_bases(self) -> None:
        """A cadence that is ``alike`` does not look at the clock."""
        policy = self.make_policy()
        if not (isinstance(policy, CadencePolicy) and policy.alike):
            return

        @EXAMPLES
        @given(self._progress(), st.floats(0, 1e6))
        def agree(seen: Progress, seconds: float) -> None:
            elsewhere = dataclasses.replace(seen, seconds=seconds)
            assert policy.due(seen) == policy.due(elsewhere), "it is alike, and looks at the clock"

        agree()

    def test_a_promised_failure_stays_covered(self) -> None:
        """A placement sends bases to some tier behind each failure."""
        policy = self.make_policy()
        if not isinstance(policy, PlacementPolicy):
            return
        refuse_uncovered(policy, self._roles(), Survives.RACK, INTERVALS_MAX)

    def test_random_tiers_come_to_rest_and_nothing_needed_is_deleted(self) -> None:
        """The mover's own decisions, with this policy: they end, and the watermark stays recoverable."""
        policy = self.make_policy()
        keep = policy if isinstance(policy, RetentionPolicy) else KeepLast(2)
        placement = Placement(2, interval=BASE_EVERY)
        if isinstance(policy, PlacementPolicy):
            placement = Placement(2, policy, BASE_EVERY)
        retention = Retention(keep, placement)

        @EXAMPLES
        @given(self._observations(), st.booleans())
        def comes_to_rest(seen: Observation, closing: bool) -> None:
            for _ in range(ROUNDS_MAX):
                assert not retention.refusals(seen)
                transfers = retention.wanted(seen, placement.transfers(seen, closing=closing))
                puts: list[tuple[int, Key]] = [(each.target_tier, each.target) for each in transfers]
                puts += [(role.index, marker_of(shard)) for role in seen.roles for shard in to_mark(seen, role.index)]
                puts += [(role.index, key) for role in seen.roles for key in to_commit(seen, role.index)]
                seen = seen.after(puts)
                gone = retention.reclaimable(seen)
                _, refusals = checked_deletions(seen, gone, repr(policy))
                assert not refusals, refusals
                seen = seen.without(gone)
                if not puts and not any(gone.values()):
                    return
            raise AssertionError("copying and deleting never come to rest: the policy undoes what it asked for")

        comes_to_rest()

    # What the policy is asked about

    def _decides(
        self,
        ask: Callable[[T], tuple[Any, Refusal | None]],
        observations: st.SearchStrategy[T],
        directly: Callable[[T], Any],
    ) -> None:
        @EXAMPLES
        @given(observations)
        def decide(seen: T) -> None:
            _, refusal = ask(seen)
            assert refusal is None, str(refusal)
            assert directly(seen) == directly(seen), "it answers the same question in two ways"

        decide()

    def _roles(self) -> tuple[Role, ...]:
        behind = [name for name in self.tiers if name != "shm"]
        survives = [Survives.NODE] * (len(behind) - 1) + [Survives.RACK]
        return (
            Role(0, "shm", Survives.PROCESS),
            *(Role(1 + i, name, each) for i, (name, each) in enumerate(zip(behind, survives, strict=True))),
        )

    @staticmethod
    def _progress() -> st.SearchStrategy[Progress]:
        return st.builds(
            lambda last, more, seconds: Progress(last + more, last, seconds),
            st.integers(0, 10_000),
            st.integers(1, 500),
            st.floats(0, 1e6),
        )

    def _candidates(self) -> st.SearchStrategy[Candidate]:
        def candidate(tier: str, survives: Survives, stream: Stream, first: int, more: int) -> Candidate:
            last = first if stream is Stream.BASE else first + more
            return Candidate(tier, survives, stream, first, last, first // BASE_EVERY)

        return st.builds(
            candidate,
            st.sampled_from([*self.tiers, "another"]),
            st.sampled_from(Survives),
            st.sampled_from(Stream),
            st.integers(0, 10_000),
            st.integers(0, 9),
        )

    def _copies(self) -> st.SearchStrategy[Copying]:
        return st.builds(
            Copying,
            st.sampled_from([*self.tiers, "another"]),
            st.sampled_from(Survives),
            st.sampled_from(Stream),
            st.integers(0, 1 << 50),
            st.integers(0, 2),
            st.integers(0, 1 << 50) | st.none(),
            st.integers(1, 1000),
            st.integers(-1000, 1000),
            st.floats(0, 1e6) | st.none(),
            st.booleans(),
        )

    def _pasts(self) -> st.SearchStrategy[Committed]:
        bases = st.sets(st.integers(0, 2000), min_size=1, max_size=12).map(lambda versions: tuple(sorted(versions)))
        return st.builds(Committed, st.sampled_from(self.tiers), bases, self._reported())

    def _reported(self) -> st.SearchStrategy[tuple[Metric, ...]]:
        values = st.dictionaries(
            st.tuples(st.integers(0, 2000), st.sampled_from([*self.metrics, "another"])),
            st.floats(allow_nan=False, allow_infinity=False),
            max_size=12,
        )
        return values.map(lambda found: tuple(sorted(Metric(*key, value) for key, value in found.items())))

    def _observations(self) -> st.SearchStrategy[Observation]:
        return st.builds(
            self._observation, st.integers(0, 30), st.integers(0, 20), st.integers(0, 3), st.integers(0, 9)
        )

    def _observation(self, left_at: int, trained: int, drained: int, seldom: int) -> Observation:
        """A job in its second generation: the first one left bases and batches, the second one has trained on. The
        durable tier has some of both."""
        roles = self._roles()
        lineage = Lineage.of([Branch(1, 0, 0, 1, "a"), Branch(2, 1, left_at, 1, "b")])
        newest = left_at + trained
        old = [version for version in range(0, left_at + 1, BASE_EVERY) if version % (seldom + 1) == 0 or version == 0]
        durable: list[Key] = []
        for version in old:
            durable += _committed(1, version)
        durable += [ShardKey.differential(1, first, first + 1, 0) for first in range(1, left_at, 2)]
        bases = [left_at, *(each for each in range(left_at + 1, newest + 1) if each % BASE_EVERY == 0)]
        for version in bases[:drained]:
            durable += _committed(2, version)
        memory: list[Key] = [ShardKey.base(2, version, 0) for version in bases[-2:]]
        memory += [ShardKey.differential(2, version, version, 0) for version in range(left_at + 1, newest + 1)]
        contents = [Contents.of((key, 1) for key in memory), *(Contents() for _ in roles[1:-1])]
        contents.append(Contents.of((key, 1) for key in durable))
        return Observation(roles, tuple(contents), 0, 1, 2, lineage)


def marker_of(shard: ShardKey) -> MarkerKey:
    return MarkerKey(CommitKey.of(shard), shard.rank)


def _committed(generation: int, version: int) -> list[Key]:
    return [
        ShardKey.base(generation, version, 0),
        MarkerKey(CommitKey(generation, version), 0),
        CommitKey(generation, version),
    ]
