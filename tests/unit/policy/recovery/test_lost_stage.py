"""Which ranks are lost, and what a user may say of it."""

from __future__ import annotations

from typing import Any

import pytest

from tiercheck.errors import ConfigurationError
from tiercheck.policy.neighbours import Method
from tiercheck.policy.recovery.consensus import Reachable
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.recovery.lost_stage import LostStage, lost_ranks

LINEAGE = Lineage.of([Branch(1, 0, 0, 3, "a"), Branch(2, 1, 40, 3, "b")])


def reaching(first: int, last: int, generation: int = 2) -> Reachable:
    return ((generation, ((first, last),)),)


@pytest.mark.parametrize(
    ("reaches", "behind_max", "lost"),
    [
        ([reaching(40, 48), (), reaching(40, 47)], None, {1}),
        ([reaching(40, 48), reaching(0, 40, generation=1), reaching(40, 47)], None, set()),
        ([reaching(40, 48), reaching(0, 40, generation=1), reaching(40, 47)], 5, {1}),
        ([reaching(40, 48), reaching(0, 40, generation=1), reaching(40, 47)], 7, set()),
        ([reaching(40, 48), reaching(0, 39, generation=1), reaching(41, 47)], None, set()),
        ([reaching(40, 48), reaching(0, 39, generation=1), reaching(41, 47)], 3, {1}),
        ([reaching(40, 44), (), reaching(45, 48)], None, set()),
        ([(), (), ()], None, set()),
        ([reaching(40, 48), reaching(1, 60, generation=9), reaching(40, 48)], None, {1}),
    ],
    ids=[
        "one has nothing",
        "all can go back",
        "it would take the others far back",
        "seven versions are not far",
        "nobody has nothing, and they cannot meet",
        "unless it may be left behind",
        "the others cannot meet either",
        "nothing is left of any",
        "what it has is of another past",
    ],
)
def test_lost_ranks(reaches: list[Reachable], behind_max: int | None, lost: set[int]) -> None:
    assert lost_ranks(dict(enumerate(reaches)), LINEAGE, behind_max) == lost


@pytest.mark.parametrize(
    ("given", "methods", "threshold"),
    [
        ("neighbours", (Method.AVERAGE,), None),
        ("neighbours-and-ends", (Method.AVERAGE, Method.COPY_END), None),
        ({"method": "older-base"}, (Method.ROLL_BACK,), 20),
        (LostStage(method="older-base", behind_max=3), (Method.ROLL_BACK,), 3),
        ({"method": "older-base-or-neighbours", "exponent": 0}, (Method.ROLL_BACK, Method.AVERAGE), 20),
    ],
)
def test_what_a_user_may_pass(given: Any, methods: tuple[Method, ...], threshold: int | None) -> None:
    option = LostStage.of(given)
    assert option.methods == methods
    assert option.threshold == threshold


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("neighbors", "method must be one of neighbours, "),
        ({"power": 2}, "no field 'power'"),
        ({"exponent": -1.0}, "exponent"),
        ({"weights": "by-tensor"}, "weights must be by-stage or by-layer, not 'by-tensor'"),
        ({"moments": True}, "moments must be new or averaged, not True"),
        ({"exponent": True}, "exponent"),
        ({"steps": -1}, "steps must be a whole number from 0, not -1"),
        ({"behind_max": 1.5}, "behind_max must be a whole number from 0, not 1.5"),
        ({"learning_rate": "1.1"}, "learning_rate must be a number, not '1.1'"),
        ({"learning_rate": 0.0}, "factor above 0"),
        (7, "must be a LostStage"),
    ],
)
def test_what_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LostStage.of(given)


def test_what_is_ours_is_off_unless_asked_for() -> None:
    assert not LostStage().by_layer
    assert not LostStage().averages_moments
    asked = LostStage.of({"weights": "by-layer", "moments": "averaged"})
    assert asked.by_layer
    assert asked.averages_moments


def test_the_rate_is_raised_where_no_schedule_is_attached() -> None:
    assert LostStage().rate(scheduled=False).factor == 1.1
    assert LostStage().rate(scheduled=True).factor == 1.0
    assert LostStage(learning_rate=1.5, steps=7).rate(scheduled=True).at(6) == 1.5
    assert LostStage(learning_rate=1.5, steps=7).rate(scheduled=True).at(7) == 1.0
