"""Adam as a GPU rounds it: each candidate in Numba has its reference's bits, and the reference fuses exactly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.inputs import adam_steps, gradient, powers_on_host, same
from tiercheck import kernels
from tiercheck.errors import ConfigurationError
from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gpu_adam import (
    FAST,
    FUSED,
    OPERATIONS,
    ROUNDINGS,
    Powers,
    Rounding,
    Scheme,
    powers_needed,
    scalars_of,
)
from tiercheck.kernels.gradients import SparseGradient
from tiercheck.kernels.reference.gpu_adam import fma_wide

ON_HOST = [each.name for each in (*FUSED, *OPERATIONS)]

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"decoupled": False, "maximize": True},
    {"weight_decay": 0.0, "beta1": 0.4, "gradient_scale": 0.37},
    {"beta1": 0.5, "eps": 0.0},
    {"amsgrad": True},
    {"amsgrad": True, "decoupled": False, "beta2": 0.0},
)


@pytest.mark.parametrize("name", ON_HOST)
def test_numba_has_the_bits_of_the_reference(name: str) -> None:
    """Also with zeros, denormals, infinities and NaNs, and over several tiles."""
    for options in OPTIONS:
        for size in (0, 1, 31, 4099):
            dense = [gradient(size, seed) for seed in range(4)]
            assert_forms_agree(ROUNDINGS[name], size, dense, adam_steps(4, **options))
    thirds = np.arange(0, 4099, 3, dtype=np.uint32)
    some = [SparseGradient(thirds, each[thirds]) for each in dense[1:3]]
    assert_forms_agree(ROUNDINGS[name], 4099, [*some, dense[0]], adam_steps(3))


def assert_forms_agree(rounding: Rounding, size: int, gradients: list[Any], steps: list[Any]) -> None:
    amsgrad = steps[0].amsgrad
    state = [gradient(size, 10, special=False), gradient(size, 11, special=False)]
    state += [np.abs(gradient(size, 12 + each, special=False)) for each in range(1 + amsgrad)]
    powers = powers_on_host(rounding, {beta for step in steps for beta in (step.beta1, step.beta2)})
    found = []
    for form in ("reference", "numba"):
        held = [each.copy() for each in state]
        replay, largest = kernels.replay_gpu_adam.by(form), held[3] if amsgrad else None
        replay(*held[:3], gradients, steps, max_exp_avg_sq=largest, rounding=rounding, powers=powers)
        found.append(held)
    for expected, actual in zip(*found, strict=True):
        assert same(actual, expected), steps[0]


def test_it_is_adam() -> None:
    """To a few roundings, whatever the candidate."""
    size, steps = 400, adam_steps(3, maximize=True)
    dense = [gradient(size, seed, special=False) for seed in range(3)]
    start = gradient(size, 10, special=False)
    wide = [start.astype(np.float64), np.zeros(size), np.zeros(size)]
    for each, step in zip(dense, steps, strict=True):
        g = -each.astype(np.float64)
        wide[0] *= 1 - step.lr * step.weight_decay
        wide[1] = step.beta1 * wide[1] + (1 - step.beta1) * g
        wide[2] = step.beta2 * wide[2] + (1 - step.beta2) * g * g
        root = np.sqrt(wide[2] / (1 - step.beta2**step.step)) + step.eps
        wide[0] -= step.lr / (1 - step.beta1**step.step) * wide[1] / root
    for rounding in ROUNDINGS.values():
        state = [start.copy(), *np.zeros((2, size), np.float32)]
        powers = powers_on_host(rounding, (0.9, 0.95))
        kernels.replay_gpu_adam.by("reference")(*state, dense, steps, rounding=rounding, powers=powers)
        for actual, expected in zip(state, wide, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-9)


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


class TestFusedInFp64:
    @given(NUMBERS, st.floats(-1, 1, allow_subnormal=False), NUMBERS, st.floats(-1, 1, allow_subnormal=False))
    @settings(max_examples=300)
    def test_rounds_once(self, a: float, weight: float, c: float, other: float) -> None:
        """Of what a step computes: numbers of fp32, times scalars."""
        for x, y, z in ((a, weight, c), (weight, c, other * a), (weight * a, a, other * c)):
            if 0 < abs(x * y) < 1e-200 or 0 < abs(z) < 1e-200:
                continue  # what no fp32 number and no scalar of an optimizer leads to
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            result = float(fma_wide(np.array([x]), y, z)[0])
            assert result == float(exact)  # Python rounds a fraction to the nearest

    def test_rounds_once_where_two_roundings_differ(self) -> None:
        a, b, c = 1 + 2.0**-52, 1 - 2.0**-53, 2.0**-60
        exact = float(Fraction(a) * Fraction(b) + Fraction(c))
        assert fma_wide(np.array([a]), b, c)[0] == exact
        small = np.array([2.0**-27 + 2.0**-79])
        assert fma_wide(small, 2.0**-27, 1.0)[0] == float(Fraction(small[0]) * Fraction(2.0**-27) + 1)

    def test_infinities_and_nans(self) -> None:
        found = fma_wide(np.array([np.inf, np.inf, 1.0, np.nan]), np.array([1.0, 0.0, 1.0, 1.0]), 1.0)
        assert found[0] == np.inf and np.isnan(found[1]) and found[2] == 2 and np.isnan(found[3])

    def test_the_sign_of_a_zero(self) -> None:
        found = fma_wide(np.array([-0.0, -0.0, 0.5, 0.0]), 0.5, np.array([-0.0, 0.0, -0.25, -0.0]))
        assert np.signbit(found).tolist() == [True, False, False, False]

    def test_numba_rounds_once_too(self) -> None:
        from tests.unit.kernels.wide import fused

        generator = np.random.default_rng(1)
        a, c = (generator.standard_normal(10_000) for _ in range(2))
        for b in (0.1, -0.9, 1 + 2.0**-52):
            assert fused(a, b, c * 2.0**-40).tobytes() == fma_wide(a, b, c * 2.0**-40).tobytes()


class TestPowers:
    @pytest.mark.parametrize("beta", [0.0, 0.4, 0.9, 0.95, 0.999, 0.9999])
    def test_behind_the_table_the_correction_is_one(self, beta: float) -> None:
        """Whatever the last bits of a device's powers."""
        needed = powers_needed(beta)
        assert np.float32(1) - np.float32(beta**needed * (1 + 2.0**-20)) == 1
        table = np.array([beta ** (1 + n) for n in range(needed)], np.float32)
        assert Powers({beta: table}).power(beta, needed + 1) == 0
        assert Powers({beta: table}).power(beta, 1) == np.float32(beta)

    def test_a_beta_that_takes_too_many_is_refused(self) -> None:
        for beta in (1 - 1e-8, 1.0):
            with pytest.raises(ConfigurationError, match="too many"):
                powers_needed(beta)

    def test_the_devices_powers_decide(self) -> None:
        """One last bit of a power is a last bit of the step size."""
        step = adam_steps(1, first=7)[0]
        powers = powers_on_host(FUSED[0], (0.9, 0.95))
        other = {beta: np.nextafter(table, np.float32(1)) for beta, table in powers.tables.items()}
        ours, theirs = scalars_of(FUSED[0], step, powers), scalars_of(FUSED[0], step, Powers(other))
        assert ours.first != theirs.first
        assert ours.step_size != theirs.step_size
        operations = scalars_of(OPERATIONS[0], step, Powers())
        assert operations == scalars_of(OPERATIONS[0], step, Powers(other)), "the host computes these"


def test_what_only_a_gpu_can_do_is_refused_by_name() -> None:
    state = [np.zeros(8, np.float32) for _ in range(4)]
    with pytest.raises(ConfigurationError, match="approximations, which no processor has"):
        kernels.replay_gpu_adam.by("numba")(*state[:3], state[3:], adam_steps(1), rounding=FAST[0], powers=Powers())
    assert {each.scheme for each in FAST} == {Scheme.FAST}


@pytest.mark.parametrize("form", ["reference", "numba"])
def test_a_missing_power_changes_nothing(form: str) -> None:
    state = [np.ones(8, np.float32) for _ in range(4)]
    with pytest.raises(ConfigurationError, match=r"powers of the beta 0\.9 on the device are not known"):
        kernels.replay_gpu_adam.by(form)(*state[:3], state[3:], adam_steps(1), rounding=FUSED[0], powers=Powers())
    with pytest.raises(ConfigurationError, match="amsgrad steps, and no others"):
        kernels.replay_gpu_adam.by(form)(
            *state[:3], state[3:], adam_steps(1, amsgrad=True), rounding=OPERATIONS[0], powers=Powers()
        )
    assert all(np.all(each == 1) for each in state)


def test_the_reciprocal_of_separate_operations_is_taken_in_fp64() -> None:
    """As torch takes it (seen on a GPU): here that of the fp32 number is another one."""
    step = AdamStep(step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True)
    scalars = scalars_of(ROUNDINGS["operations.reciprocal"], step, Powers())
    assert scalars.reciprocal == np.float32(1 / (1 - 0.999) ** 0.5)
    assert scalars.reciprocal != np.float32(1) / scalars.root
