"""The built-in policies pass the kit, and policies that are almost right do not."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import Phase, settings

from tiercheck.policy.policies import (
    BasesOnly,
    BytesPerSecond,
    Candidate,
    Committed,
    EveryNth,
    EverySeconds,
    EveryVersions,
    Everywhere,
    Keep,
    KeepBest,
    KeepEvery,
    KeepLast,
    PlacementPolicy,
    Policy,
    Progress,
    RetentionPolicy,
    Spread,
    Unpaced,
)
from tiercheck.replication.named_policies import installed_policies
from tiercheck.testing import policies as kit
from tiercheck.testing.policies import PolicyTests

BUILT_IN: dict[str, Policy] = {
    "every_versions": EveryVersions(7),
    "every_seconds": EverySeconds(60) | EveryVersions(12),
    "everywhere": Everywhere(),
    "bases_only": BasesOnly("s3"),
    "every_nth": EveryNth("s3", 3) & BasesOnly("peer"),
    "keep_last": KeepLast(3),
    "keep_every": KeepEvery(8),
    "keep_best": KeepLast(1) | KeepBest("eval_loss", 2),
    "unpaced": Unpaced(),
    "bytes_per_second": BytesPerSecond("s3", 1e6) & BytesPerSecond("peer", 2e6),
    "spread": Spread(margin=0.5, chunk=1 << 20),
}


def test_every_built_in_policy_is_certified_here() -> None:
    assert {each.name for each in installed_policies() if each.distribution == "tiercheck"} == BUILT_IN.keys()


@pytest.mark.parametrize("name", BUILT_IN)
class TestBuiltIn(PolicyTests):
    @pytest.fixture(autouse=True)
    def chosen(self, name: str) -> None:
        self.name = name

    def make_policy(self) -> Policy:
        return BUILT_IN[self.name]


@dataclass(frozen=True)
class Counting(RetentionPolicy):
    """Another answer each time."""

    counter: ClassVar[itertools.count[int]] = itertools.count()

    def keep(self, seen: Committed) -> Keep:
        return Keep(frozenset({next(self.counter)}))


@dataclass(frozen=True)
class Raising(RetentionPolicy):
    def keep(self, seen: Committed) -> Keep:
        return Keep(frozenset({seen.bases[1]}))


@dataclass(frozen=True)
class Nowhere(PlacementPolicy):
    def wants(self, shard: Candidate) -> bool:
        return False


@dataclass(frozen=True)
class Impatient(EveryVersions):
    def due(self, seen: Progress) -> bool:
        return seen.seconds > 10


class Melting(KeepLast):
    def __hash__(self) -> int:
        return time.monotonic_ns()


@pytest.mark.parametrize(
    ("policy", "test", "message"),
    [
        (Counting(), "test_its_decisions_are_taken_and_the_same_each_time", "in two ways"),
        (Raising(), "test_its_decisions_are_taken_and_the_same_each_time", "it raises IndexError"),
        (Raising(), "test_its_text_names_it", "no entry point in the group 'tiercheck.policies'"),
        (Raising(), "test_its_module_does_no_io", "imports time: a policy takes observations instead"),
        (Nowhere(), "test_a_promised_failure_stays_covered", "it sends no base to s3"),
        (Impatient(), "test_ranks_that_see_different_clocks_agree_on_bases", "it is alike, and looks at the clock"),
        (Melting(), "test_it_is_a_frozen_value", "two that are equal have two hashes"),
    ],
)
def test_what_is_almost_a_policy_fails(
    policy: Policy, test: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first example that shows it will do: it is not shrunk."""
    monkeypatch.setattr(kit, "EXAMPLES", settings(kit.EXAMPLES, phases=[Phase.generate]))

    class Kit(PolicyTests):
        def make_policy(self) -> Policy:
            return policy

    with pytest.raises(Exception, match=message):
        getattr(Kit(), test)()
