"""What the agent's folds run on."""

from __future__ import annotations

import os

import pytest

from tiercheck.agent.jobs.folding import FoldThreads
from tiercheck.errors import ConfigurationError

NODE = set(range(64))


@pytest.mark.parametrize(
    ("threads", "cpus", "count", "chosen"),
    [
        (None, "", 8, NODE),
        (3, "", 3, NODE),
        (None, "0-3,8", 1, {0, 1, 2, 3, 8}),
        (4, "16-31", 4, set(range(16, 32))),
    ],
    ids=str,
)
def test_folds_take_an_eighth_of_the_processors_or_what_they_are_given(
    threads: int | None, cpus: str, count: int, chosen: set[int]
) -> None:
    assert FoldThreads.of(threads, cpus, NODE) == FoldThreads(count, frozenset(chosen))
    assert FoldThreads.of(None, "", {5}).count == 1


@pytest.mark.parametrize(
    ("threads", "cpus", "why"),
    [
        (0, "", "at least 1"),
        (None, "3-1", "a list such as 0-3,8"),
        (None, "all", "a list such as 0-3,8"),
        (None, "62-65", r"may not use \(\[64, 65\]\)"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(threads: int | None, cpus: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        FoldThreads.of(threads, cpus, NODE)


def test_only_the_threads_that_fold_are_bound_to_their_processors() -> None:
    allowed = os.sched_getaffinity(0)
    (one, *_) = allowed
    with FoldThreads.of(None, str(one), allowed).executor() as executor:
        assert executor.submit(os.sched_getaffinity, 0).result() == {one}
    assert os.sched_getaffinity(0) == allowed
