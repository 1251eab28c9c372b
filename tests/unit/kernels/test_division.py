"""Division by a constant gives the bits of the divider."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tiercheck.kernels.cpu.compiled import compiled, multiply_add
from tiercheck.kernels.division import DIVISOR_MIN, candidates, nearest, reciprocal

TWO_BINADES = (np.arange(1 << 24, dtype=np.uint32) + np.uint32(0x3F000000)).view(np.float32)
"""Every significand, under an even and an odd exponent."""

FRACTIONS = ((0.999, 1), (0.95, 2), (0.99, 7), (0.95, 300))
CORRECTIONS = [float(np.float32((1 - beta2**step) ** 0.5)) for beta2, step in FRACTIONS]


@compiled
def differing(values: np.ndarray, divisor: np.float32, high: np.float32, low: np.float32) -> int:  # type: ignore[type-arg]
    count = 0
    for i in range(values.size):
        count += multiply_add(values[i], high, values[i] * low) != values[i] / divisor
    return count


def quotients_that_differ(divisor: float, values: np.ndarray) -> int:  # type: ignore[type-arg]
    parts = reciprocal(divisor)
    return int(differing(values, np.float32(divisor), parts.high, parts.low))


@pytest.mark.parametrize("divisor", [1.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), *CORRECTIONS])
def test_every_significand(divisor: float) -> None:
    assert (quotients_that_differ(divisor, TWO_BINADES) == 0) == reciprocal(divisor).exact


def test_a_divisor_that_its_reciprocal_does_not_stand_for_is_found() -> None:
    """About one divisor in 70; the first few, tried with every significand: the two candidates alone are wrong."""
    divisors = (float(each) for each in np.random.default_rng(0).uniform(0.05, 1, 2_000).astype(np.float32))
    inexact = [each for each in divisors if not reciprocal(each).exact]
    assert 10 < len(inexact) < 60
    for divisor in inexact[:3]:
        wrong = quotients_that_differ(divisor, TWO_BINADES)
        assert 1 <= wrong <= 2 * len(candidates(divisor))


def test_random_divisors_and_roots() -> None:
    """Of all magnitudes that square roots of fp32 numbers have, zero included, and infinity, which is bounded first."""
    generator = np.random.default_rng(1)
    patterns = generator.integers(0, 0x7F800000, 20_000, dtype=np.uint32).view(np.float32)
    roots = np.concatenate(([0.0], np.sqrt(patterns), np.sqrt(np.array([1e-45, 3.4e38], np.float32)))).astype(
        np.float32
    )
    divisors = np.concatenate(
        (generator.uniform(0.001, 1, 200), 2.0 ** generator.uniform(np.log2(DIVISOR_MIN), 0, 200))
    ).astype(np.float32)
    for divisor in divisors:
        if reciprocal(float(divisor)).exact:
            assert quotients_that_differ(float(divisor), roots) == 0, divisor


def test_divisors_out_of_range_are_left_to_the_divider() -> None:
    assert not reciprocal(2.0**-30).exact
    assert not reciprocal(float(np.float32(1.5))).exact


def test_nearest_rounds_half_to_even() -> None:
    unit = Fraction(1, 1 << 23)
    assert nearest(1 + unit / 2) == 1
    assert nearest(1 + 3 * unit / 2) == 1 + 2 * unit
    assert nearest(Fraction(-1, 3)) == Fraction(float(np.float32(-1 / 3)))
    assert nearest(Fraction(0)) == 0
