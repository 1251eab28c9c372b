"""Which stages a lost pipeline stage is made from, and with what weights."""

from __future__ import annotations

from math import inf, isclose, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.policy.neighbours import (
    CHECKFREE_PLUS,
    Layer,
    Method,
    RaisedRate,
    Share,
    Substitute,
    check_layers,
    moment_share,
    substitutes,
    weigh,
)

NORMS: dict[int, float | None] = {0: 5.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 6.0}


def test_an_inner_stage_is_the_average_of_its_neighbours_weighed_by_the_squares_of_their_norms() -> None:
    (made,) = substitutes(6, [2], NORMS)
    assert made == Substitute(2, Method.AVERAGE, (Share(1, 0.1, 1.0), Share(3, 0.9, 3.0)))


@pytest.mark.parametrize(("exponent", "weight"), [(0, 0.5), (1, 0.75), (2, 0.9)])
def test_the_exponent_is_a_choice(exponent: float, weight: float) -> None:
    (made,) = substitutes(6, [2], NORMS, exponent=exponent)
    assert [share.weight for share in made.shares] == pytest.approx([1 - weight, weight])
    assert [share.norm for share in made.shares] == ([1.0, 3.0] if exponent else [None, None])


def test_several_lost_stages_are_made_if_no_two_are_in_a_row() -> None:
    assert [made.stage for made in substitutes(6, {4, 1}, NORMS)] == [1, 4]


def test_an_end_stage_is_copied_by_checkfree_plus_and_refused_by_checkfree() -> None:
    made = substitutes(6, [0, 3, 5], NORMS, methods=CHECKFREE_PLUS)
    assert [(each.method, each.shares[0]) for each in made] == [
        (Method.COPY_END, Share(1, 1.0)),
        (Method.AVERAGE, Share(2, 4 / 20, 2.0)),
        (Method.COPY_END, Share(4, 1.0)),
    ]
    with pytest.raises(RecoveryError, match=r"stage 5 \(average: it is an end stage of 6.*takes .neighbours-and-ends"):
        substitutes(6, [5], NORMS)


@pytest.mark.parametrize("lost", [(2, 3), (0, 1), (4, 5)])
def test_two_in_a_row_are_refused_but_by_roll_back(lost: tuple[int, int]) -> None:
    with pytest.raises(RecoveryError, match=r"two in a row take .older-base|no neighbour of it is left"):
        substitutes(6, lost, NORMS, methods=CHECKFREE_PLUS)
    made = substitutes(6, lost, NORMS, methods=[Method.ROLL_BACK], bases={stage: [100, 300] for stage in lost})
    assert made == tuple(Substitute(stage, Method.ROLL_BACK, (), 300) for stage in lost)


def test_every_stage_that_cannot_be_made_is_named_with_the_reason_of_each_method() -> None:
    with pytest.raises(RecoveryError) as refused:
        substitutes(4, [0, 2], {1: nan, 3: 1.0}, methods=[Method.ROLL_BACK, Method.AVERAGE])
    assert "stage 0 (roll-back: no older base of it is at hand; average: it is an end stage" in str(refused.value)
    assert "stage 2 (roll-back: no older base of it is at hand; average: a gradient norm is nan" in str(refused.value)


def test_a_plain_copy_is_of_the_stage_before_or_of_the_one_that_is_left() -> None:
    made = substitutes(6, [0, 2, 3], NORMS, methods=[Method.COPY])
    assert [each.shares[0].stage for each in made] == [1, 1, 4]
    with pytest.raises(RecoveryError, match="no neighbour of it is left"):
        substitutes(6, [1, 2, 3], NORMS, methods=[Method.COPY])


def test_the_first_method_that_applies_is_taken() -> None:
    methods = (Method.ROLL_BACK, *CHECKFREE_PLUS)
    made = substitutes(6, [0, 2, 4], NORMS, methods=methods, bases={2: [7]})
    assert [each.method for each in made] == [Method.COPY_END, Method.ROLL_BACK, Method.AVERAGE]


def test_a_stage_rolled_back_moves_with_the_nearest_survivors_that_have_its_base() -> None:
    bases = {stage: [100] for stage in range(6)}
    made = substitutes(6, [2, 3], {}, methods=[Method.ROLL_BACK], bases=bases, movement=0.5)
    assert made[0] == Substitute(2, Method.ROLL_BACK, (Share(1, 0.5), Share(4, 0.5)), 100, 0.5)
    bases[1] = [50]
    (only,) = substitutes(6, [2], {}, methods=[Method.ROLL_BACK], bases=bases, movement=0.5)
    assert only.shares == (Share(3, 1.0),)
    bases[3] = []
    with pytest.raises(RecoveryError, match="no surviving neighbour has a base of version 100"):
        substitutes(6, [2], {}, methods=[Method.ROLL_BACK], bases=bases, movement=0.5)


def test_norms_that_tell_nothing_are_refused_and_zeros_weigh_alike() -> None:
    assert weigh([0.0, 0.0]) == (0.5, 0.5)
    assert weigh([0.0, 1e-300]) == (0.0, 1.0)
    assert weigh([1e300, 1e300]) == (0.5, 0.5)
    assert weigh([nan, None], exponent=0) == (0.5, 0.5)
    for norm in (nan, inf, None):
        with pytest.raises(RecoveryError, match=f"a gradient norm is {'not known' if norm is None else norm}"):
            weigh([1.0, norm])
        with pytest.raises(RecoveryError, match=f"stage 3: {norm}.*exponent 0"):
            substitutes(6, [2], {1: 1.0, 3: norm})
    with pytest.raises(RecoveryError, match="not known"):
        substitutes(6, [2], {1: 1.0})


def test_what_contradicts_itself_is_the_callers_error() -> None:
    for bad in ({"lost": [6]}, {"lost": [-1]}, {"lost": [1], "methods": ()}, {"lost": [1], "movement": nan}):
        with pytest.raises(ConfigurationError):
            substitutes(6, norms=NORMS, **bad)  # type: ignore[arg-type]
    for exponent in (-1, nan, inf):
        with pytest.raises(ConfigurationError, match="exponent"):
            weigh([1.0], exponent)
    with pytest.raises(ConfigurationError, match="negative"):
        weigh([1.0, -1.0])


norms_of_any_scale = st.lists(st.floats(0, allow_nan=False, allow_infinity=False), min_size=1, max_size=5)


@given(norms_of_any_scale, st.floats(0, 8))
def test_weights_are_shares_of_one_and_follow_the_norms(norms: list[float], exponent: float) -> None:
    weights = weigh(norms, exponent)
    assert isclose(sum(weights), 1, rel_tol=1e-12) and all(0 <= weight <= 1 for weight in weights)
    assert [weights[at] for at in sorted(range(len(norms)), key=norms.__getitem__)] == sorted(weights)
    mirrored = weigh(norms[::-1], exponent)[::-1]
    assert all(isclose(one, two, rel_tol=1e-12) for one, two in zip(weights, mirrored, strict=True))


@given(st.integers(2, 9), st.data())
def test_a_mirrored_pipeline_is_made_from_mirrored_shares(stages: int, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, stages - 1)))
    norms = {stage: data.draw(st.floats(0, 1e6)) for stage in range(stages)}

    def shares(flip: bool) -> dict[int, dict[int, float]] | None:
        def place(stage: int) -> int:
            return stages - 1 - stage if flip else stage

        try:
            made = substitutes(
                stages,
                {place(stage) for stage in lost},
                {place(stage): norm for stage, norm in norms.items()},
                methods=CHECKFREE_PLUS,
            )
        except RecoveryError:
            return None
        return {place(each.stage): {place(share.stage): share.weight for share in each.shares} for each in made}

    one, two = shares(False), shares(True)
    assert one == two
    assert (one is None) == any(stage + 1 in lost for stage in lost)
    for stage, parts in (one or {}).items():
        assert all(abs(stage - each) == 1 and each not in lost for each in parts)


def test_each_layer_may_be_weighed_by_its_own_norms() -> None:
    (made,) = substitutes(6, [2], NORMS)
    first, second = made.by_layer({1: [1.0, 0.0], 3: [2.0, 7.0]})
    assert first == (Share(1, 0.2, 1.0), Share(3, 0.8, 2.0))
    assert second == (Share(1, 0.0, 0.0), Share(3, 1.0, 7.0))
    with pytest.raises(RecoveryError, match="stage 1: 1, stage 3: 2"):
        made.by_layer({1: [1.0], 3: [2.0, 7.0]})


def layer(name: str, **shapes: tuple[int, ...]) -> Layer:
    return Layer(name, tuple(shapes.items()))


def test_layers_of_other_shapes_are_refused_by_name() -> None:
    (made,) = substitutes(6, [2], NORMS)
    alike = {stage: [layer(f"layers.{stage}", weight=(4, 4), bias=(4,))] for stage in range(6)}
    check_layers(made, alike)
    unlike = {
        r"stage 2 cannot be made from stage 3: 'weight' differs in 'layers.2' \(\(4, 4\)\) and 'x' \(\(4, 8\)\)": [
            layer("x", weight=(4, 8), bias=(4,))
        ],
        r"'bias' differs in 'layers.2' \(\(4,\)\) and 'x' \(no 'bias'\)": [layer("x", weight=(4, 4))],
        "another order": [layer("x", bias=(4,), weight=(4, 4))],
        "1 and 2 layers": [*alike[3], *alike[4]],
    }
    for message, layers in unlike.items():
        with pytest.raises(RecoveryError, match=message):
            check_layers(made, {**alike, 3: layers})


def test_the_learning_rate_is_raised_for_some_steps() -> None:
    assert [RaisedRate(1.1, 2).at(step) for step in range(4)] == [1.1, 1.1, 1.0, 1.0]
    with pytest.raises(ConfigurationError, match="factor above 0"):
        RaisedRate(0.0)


def test_a_moment_is_corrected_for_its_own_steps_before_it_is_averaged() -> None:
    """Two stages of the same gradient, one of which was made anew three steps ago: the average is the moment of 10."""

    def moment(steps: int) -> float:
        return sum(0.9**at * 0.1 for at in range(steps))

    made = sum(moment_share(0.5, 0.9, steps, 10) * moment(steps) for steps in (10, 3))
    assert made == pytest.approx(moment(10))
    assert moment_share(0.25, 0.9, 10, 10) == 0.25
    assert moment_share(0.5, 0.9, 0, 10) == 0
    with pytest.raises(ConfigurationError, match="beta"):
        moment_share(0.5, 1.0, 3, 3)
