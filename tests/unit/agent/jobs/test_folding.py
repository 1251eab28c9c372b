"""What the agent's folds run on."""

from __future__ import annotations

import os

import pytest

from tiercheck.agent.jobs.folding import FoldThreads
from tiercheck.errors import ConfigurationError

NODE = set(range(64))


@pytest.mark.parametrize(
    ("environment", "count", "cpus"),
    [
        ({}, 8, NODE),
        ({"TIERCHECK_FOLD_THREADS": "3"}, 3, NODE),
        ({"TIERCHECK_FOLD_CPUS": "0-3,8"}, 1, {0, 1, 2, 3, 8}),
        ({"TIERCHECK_FOLD_CPUS": "16-31", "TIERCHECK_FOLD_THREADS": "4"}, 4, set(range(16, 32))),
    ],
    ids=str,
)
def test_folds_take_an_eighth_of_the_processors_or_what_they_are_given(
    environment: dict[str, str], count: int, cpus: set[int]
) -> None:
    assert FoldThreads.of(environment, NODE) == FoldThreads(count, frozenset(cpus))
    assert FoldThreads.of({}, {5}).count == 1


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"TIERCHECK_FOLD_THREADS": "0"}, "at least 1"),
        ({"TIERCHECK_FOLD_THREADS": "many"}, "must be a number"),
        ({"TIERCHECK_FOLD_CPUS": "3-1"}, "a list such as 0-3,8"),
        ({"TIERCHECK_FOLD_CPUS": "all"}, "a list such as 0-3,8"),
        ({"TIERCHECK_FOLD_CPUS": "62-65"}, r"may not use \(\[64, 65\]\)"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(environment: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        FoldThreads.of(environment, NODE)


def test_only_the_threads_that_fold_are_bound_to_their_processors() -> None:
    allowed = os.sched_getaffinity(0)
    (one, *_) = allowed
    with FoldThreads.of({"TIERCHECK_FOLD_CPUS": str(one)}, allowed).executor() as executor:
        assert executor.submit(os.sched_getaffinity, 0).result() == {one}
    assert os.sched_getaffinity(0) == allowed
