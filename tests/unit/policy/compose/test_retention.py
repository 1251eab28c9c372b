"""What retention policies keep, and that the rest goes."""

from __future__ import annotations

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.policy.policies import Best, Committed, Keep, KeepBest, KeepEvery, KeepLast, Metric

BASES = (0, 10, 20, 30, 40)


def losses(**values: float) -> tuple[Metric, ...]:
    return tuple(Metric(int(version[1:]), "loss", value) for version, value in values.items())


def test_each_built_in_policy_keeps_what_it_says() -> None:
    seen = Committed("durable", BASES, losses(v13=0.3, v25=0.1, v30=0.2))
    assert KeepLast(2).keep(seen) == Keep(since=30)
    assert KeepLast(9).keep(seen) == Keep(since=0)
    assert KeepEvery(20).keep(seen) == Keep(frozenset({0, 20, 40}))
    assert KeepBest("loss", 2).keep(seen) == Keep(frozenset({25, 30}))
    assert KeepBest("loss", 1, Best.MAX).keep(seen) == Keep(frozenset({13}))
    assert KeepBest("accuracy").keep(seen) == Keep()


def test_what_is_united_keeps_what_one_of_both_keeps() -> None:
    seen = Committed("durable", BASES, losses(v13=0.3))
    assert (KeepLast(2) | KeepEvery(20) | KeepBest("loss")).keep(seen) == Keep(frozenset({0, 13, 20, 40}), 30)
    assert (KeepEvery(20) | KeepLast(3) | KeepLast(1)).keep(seen).since == 20


def test_of_equal_values_the_newer_version_is_the_better_one_and_a_nan_is_none() -> None:
    seen = Committed("durable", BASES, losses(v10=0.1, v20=0.1, v30=float("nan")))
    assert KeepBest("loss").keep(seen) == Keep(frozenset({20}))
    assert KeepBest("loss", 3).keep(seen) == Keep(frozenset({10, 20}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepLast(0), "n must be a whole number from 1"),
        (lambda: KeepLast(True), "n must be a whole number"),
        (lambda: KeepEvery(0), "k must be a whole number"),
        (lambda: KeepBest("eval loss"), "metric must be a name"),
        (lambda: KeepBest("loss", best="least"), "'min' or 'max'"),  # type: ignore[arg-type]  # what a user may write
    ],
)
def test_impossible_policies_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()  # type: ignore[operator]  # a lambda
