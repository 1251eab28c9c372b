"""Pauses that double, up to a bound."""

from __future__ import annotations

from tiercheck.runtime.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.pause_s(failures) for failures in (1, 2, 3, 4, 10**6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_draw_shortens_the_pause() -> None:
    assert [Backoff(0.5, 3.0).pause_s(3, draw) for draw in (0.0, 0.25, 1.0)] == [0.0, 0.5, 2.0]
