"""The values every layer shares, and how they are shown."""

from __future__ import annotations

import pytest

from tiercheck.types import is_unicode, shown


@pytest.mark.parametrize("value", [None, True, 7, -1.5, "text", b"bytes", [1, "a"], ("b",), {"c": 2}])
def test_a_small_value_is_shown_as_it_is(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), "x" * 10**6, b"x" * 10**6, [[10**5000] * 99] * 99, {10**5000: 10**5000}, "\udc80" * 999],
    ids=range(7),
)
def test_whatever_comes_from_outside_is_shown_in_short(value: object) -> None:
    for characters in (20, 80, 200):
        text = shown(value, characters)
        assert len(text) <= characters
        assert is_unicode(text)


def test_a_value_that_contains_itself_is_shown() -> None:
    value: list[object] = []
    value.append(value)
    assert "..." in shown(value)
