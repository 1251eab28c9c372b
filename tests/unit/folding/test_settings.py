"""What the process that folds may use."""

from __future__ import annotations

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.folding.settings import FoldSettings

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
    assert FoldSettings.of(threads, cpus, allowed=NODE) == FoldSettings(count, tuple(sorted(chosen)), nice=10)
    assert FoldSettings.of(None, "", allowed={5}).threads == 1
    assert FoldSettings.of(None, "", 0, allowed=NODE, ranks=1) == FoldSettings(1, tuple(NODE), nice=0)


@pytest.mark.parametrize(
    ("threads", "cpus", "nice", "why"),
    [
        (0, "", None, "at least 1"),
        (None, "3-1", None, "a list such as 0-3,8"),
        (None, "all", None, "a list such as 0-3,8"),
        (None, "62-65", None, r"may not use \(\[64, 65\]\)"),
        (None, "", -5, "at least 0 and at most 19, not -5"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(threads: int | None, cpus: str, nice: int | None, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        FoldSettings.of(threads, cpus, nice, allowed=NODE)
