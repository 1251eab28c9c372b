"""Policies by name."""

from __future__ import annotations

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.policy.policies import (
    AllWant,
    BasesOnly,
    Best,
    BytesPerSecond,
    EveryNth,
    EverySeconds,
    EveryVersions,
    KeepBest,
    KeepEvery,
    KeepLast,
    When,
)
from tiercheck.replication.named_policies import (
    combined,
    installed_policies,
    parse_policies,
    parse_policy,
    policy_texts,
)


def test_texts_name_policies_and_combine_them() -> None:
    policies = parse_policies(
        cadence="every_versions?n=100; every_seconds?seconds=600",
        placement="bases_only?tier=s3; every_nth?tier=s3&n=10",
        retention="keep_last; keep_best?metric=eval_loss&n=3&best=max",
        pacing="",
    )
    assert policies.cadence == EveryVersions(100) | EverySeconds(600)
    assert policies.placement == BasesOnly("s3") & EveryNth("s3", 10)
    assert policies.retention == KeepLast() | KeepBest("eval_loss", 3, Best.MAX)
    assert policies.pacing is None


def test_policies_say_the_texts_that_make_them() -> None:
    placement = BasesOnly("a tier; of its own") & EveryNth("s3", 2)
    assert policy_texts(placement) == ("bases_only?tier=a%20tier%3B%20of%20its%20own", "every_nth?tier=s3&n=2")
    assert combined("placement", policy_texts(placement)) == placement
    assert isinstance(placement, AllWant)
    assert parse_policy("placement", "; ".join(policy_texts(placement))) == placement
    assert policy_texts(BytesPerSecond("s3", 1e9)) == ("bytes_per_second?tier=s3&rate=1000000000.0",)


def test_a_policy_of_another_kind_is_refused_and_those_that_fit_are_listed() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'keep_last' is a retention policy, not a placement policy; .*bases_only, every_nth"
    ):
        parse_policy("placement", "keep_last")
    with pytest.raises(ConfigurationError, match=r"no policy 'keep_lats' .*did you mean 'keep_last'"):
        parse_policy("retention", "keep_lats?n=2")
    with pytest.raises(ConfigurationError, match="n must be a whole number from 1"):
        parse_policy("retention", "keep_last?n=0")
    with pytest.raises(ConfigurationError, match="1 to 16 policies, not 0"):
        parse_policy("retention", " ; ")


def test_what_no_text_says_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"no entry point in the group .tiercheck.policies. names .*When"):
        policy_texts(When(lambda seen: True))


def test_the_built_in_policies_come_through_the_same_door() -> None:
    ours = {each.name: each for each in installed_policies() if each.distribution == "tiercheck"}
    assert {each.kind for each in ours.values()} == {"cadence", "placement", "retention", "pacing"}
    assert ours["keep_every"].summary == "Each committed base stays whose version is a multiple of ``k``."
    assert parse_policy("retention", "keep_every?k=5") == KeepEvery(5)
