"""What a version may not hold is saved in its host state, within bounds, and read back or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tiercheck.streams.doubts import KEY, NAMES_MAX, Doubts


def test_doubts_add_up_and_come_back() -> None:
    provider = Doubts(moved=("best",)).saved_in({"options": []})
    state = Doubts().with_late(("a", "b")).with_late(("b", "c")).with_unseen(("d",)).saved_in(provider)
    assert Doubts.of(state) == Doubts(late=("a", "b", "c"), unseen=("d",), moved=("best",))
    assert state["options"] == []
    assert len(Doubts.of(state).notes(replayed=True)) == 3
    assert len(Doubts.of(state).notes(replayed=False)) == 2, "a base holds what no differential does"


def test_where_there_are_none_nothing_is_said() -> None:
    assert Doubts().saved_in({"options": []}) == {"options": []}
    assert Doubts.of({"options": []}).notes(replayed=True) == []


def test_names_are_bounded() -> None:
    doubts = Doubts().with_late(tuple(f"tensor {index}" for index in range(1000)))
    assert len(doubts.late) == NAMES_MAX
    assert "and perhaps others" in doubts.notes(replayed=True)[0]


@pytest.mark.parametrize(
    "said", [3, [], {"late": "name"}, {"late": [3]}, {"other": []}, {"moved": ["x"] * (NAMES_MAX + 1)}]
)
def test_what_is_malformed_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match="malformed"):
        Doubts.of({KEY: said})
    with pytest.raises(ValueError, match="malformed"):
        Doubts.of(said if not isinstance(said, dict) else [])
