"""When a base is due."""

from __future__ import annotations

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.policy.guard import ask_cadence
from tiercheck.policy.policies import CadencePolicy, EverySeconds, EveryVersions, Progress, When


def due(policy: CadencePolicy, last: int, *, seconds_each: float = 1.0) -> list[int]:
    """The versions up to ``last`` at which a base is due, asked at each version."""
    found = [0]
    for version in range(1, last + 1):
        if ask_cadence(policy, Progress(version, found[-1], (version - found[-1]) * seconds_each))[0]:
            found.append(version)
    return found[1:]


def test_a_base_is_due_by_versions_by_seconds_or_by_a_function() -> None:
    assert due(EveryVersions(10), 35) == [10, 20, 30]
    assert due(EverySeconds(12), 40) == [12, 24, 36]
    assert due(When(lambda seen: seen.version in (7, 9)), 20) == [7, 9]


def test_after_its_interval_a_base_is_due_whatever_the_policy_says() -> None:
    assert due(EverySeconds(1000, versions_max=15), 50) == [15, 30, 45]
    assert due(When(lambda seen: False, versions_max=20), 50) == [20, 40]


def test_of_two_cadences_either_one_is_enough() -> None:
    either = EveryVersions(20) | EverySeconds(15, ask_every=5)
    assert (either.interval, either.check_every, either.alike) == (20, 5, False)
    assert due(either, 60) == [15, 20, 35, 40, 55, 60]
    assert (EveryVersions(6) | EveryVersions(4)).alike
    assert (EverySeconds(1, ask_every=6) | EverySeconds(2, ask_every=4)).check_every == 2


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "60"])
def test_impossible_seconds_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="seconds must be"):
        EverySeconds(seconds)


def test_of_several_cadences_each_is_asked_at_its_own_versions() -> None:
    either = When(lambda seen: True, 100, ask_every=6) | When(lambda seen: False, 100, ask_every=4)
    assert either.check_every == 2
    assert [version for version in range(1, 13) if either.due(Progress(version, 0, 0.0))] == [6, 12]
