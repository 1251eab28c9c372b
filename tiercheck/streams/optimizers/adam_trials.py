"""What tells apart the ways in which Adam may round on a GPU.

Two candidates with fp32 scalars differ in many elements of any problem. Two with fp64 scalars do not: what they compute
differs in the last bit of an fp64 number, which is then rounded to fp32, and so in about one of 2^29 elements. These
are found on purpose. The middle of two fp32 numbers is an fp64 number, and rounds to the even one of the two; the next
fp64 number rounds up. What lies halfway between these two fp64 numbers rounds to either, by its last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.streams.optimizers.optimizer import Array, Trial

__all__ = ["adam_trials", "near_ties"]

SIZE = 257
LATER = (12, 997, 99_999)
"""Numbers of steps after which one more is tried: the device's powers count."""
DRAWN, TIES = 1 << 18, 256
"""Numbers that are drawn, and sums that are kept: the closest ones."""
HALF_BIT = 2.0**-53
"""Half of the last bit of an fp64 number in 1..2."""
SCATTERED_BETAS, SCATTERED_DECAY = (0.9137042, 0.9560317), 0.1372961
"""Of a fraction with a small denominator the products would lie in as few places between two fp32 numbers."""
DECAYS = 48
"""Decays that are tried, each with a step of its own."""

Wide = NDArray[np.float64]


def adam_trials(variants: Sequence[Mapping[str, Any]]) -> Iterator[Trial]:
    """Trials of every variant, from the first step on and later; and of sums that are nearly ties."""
    for index, options in enumerate(variants):
        generator = np.random.default_rng(index)
        yield Trial(options, 0, state_of(np.zeros(SIZE), options, generator), gradients_of(5, generator))
        for count in LATER:
            scale = np.power(10.0, generator.integers(-6, 0, SIZE)).astype(np.float64)
            yield Trial(options, count, state_of(scale, options, generator), gradients_of(1, generator))
    scattered = {**variants[0], "betas": SCATTERED_BETAS, "weight_decay": SCATTERED_DECAY}
    yield from moments_near_ties({**scattered, "weight_decay": 0.0})
    yield from decays_near_ties(scattered)
    yield coupling_near_ties(scattered)


def state_of(scale: Wide, options: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Array]:
    def drawn() -> Wide:
        return generator.standard_normal(SIZE) * scale

    held = {"param": generator.standard_normal(SIZE), "exp_avg": drawn(), "exp_avg_sq": drawn() ** 2}
    if options.get("amsgrad"):
        held["max_exp_avg_sq"] = drawn() ** 2
    return {name: each.astype(np.float32) for name, each in held.items()}


def gradients_of(count: int, generator: np.random.Generator) -> list[Array]:
    """One element overflows, one is a denormal, one is not a number from the third on, and some are zeros."""
    found = []
    for index in range(count):
        gradient = generator.standard_normal(SIZE, dtype=np.float32) * np.float32(0.01)
        gradient[0], gradient[-1] = np.float32(1e-42), np.float32(3e38)
        gradient[1:3], gradient[SIZE // 2] = (0.0, -0.0), np.float32(np.nan if index == 2 else 1e-3)
        found.append(gradient)
    return found


def moments_near_ties(options: Mapping[str, Any]) -> Iterator[Trial]:
    """Both moments, each with gradients of its own."""
    beta1, beta2 = options["betas"]
    generator = np.random.default_rng(1)
    moment, g = drawn_in(generator, 1.1 / beta1, 1.3 / beta1), drawn_in(generator, 0.1 / (1 - beta1), 0.6 / (1 - beta1))
    pairs = near_ties(beta1 * moment.astype(np.float64), (1 - beta1) * g.astype(np.float64))
    yield planted(options, gradient=g[pairs[1]], exp_avg=moment[pairs[0]])
    low, high = (0.1 / (1 - beta2)) ** 0.5, (0.6 / (1 - beta2)) ** 0.5
    second, g = drawn_in(generator, 1.1 / beta2, 1.3 / beta2), drawn_in(generator, low, high)
    pairs = near_ties(beta2 * second.astype(np.float64), (1 - beta2) * g.astype(np.float64) * g)
    yield planted(options, gradient=g[pairs[1]], exp_avg_sq=second[pairs[0]])


def coupling_near_ties(options: Mapping[str, Any]) -> Trial:
    """L2 decay: the parameter's share and the gradient."""
    decay, generator = options["weight_decay"], np.random.default_rng(2)
    param, g = drawn_in(generator, 1.1 / decay, 1.4 / decay), drawn_in(generator, 2.0**-24, 0.4)
    pairs = near_ties(decay * param.astype(np.float64), g.astype(np.float64))
    return planted(options, gradient=g[pairs[1]], param=param[pairs[0]])


def decays_near_ties(options: Mapping[str, Any]) -> Iterator[Trial]:
    """A parameter's own decay by a share that leaves nearly such a number. The weight decay is a power of two: so the
    product with the learning rate is that share."""
    generator = np.random.default_rng(3)
    for _ in range(DECAYS):
        param = drawn_in(generator, 2.5, 3.5)[:1]
        wanted = Fraction(float(np.float32(1.0 + generator.random()))) + Fraction(2.0**-24) + Fraction(HALF_BIT)
        share = float(1 - wanted / Fraction(float(param[0])))
        yield planted(
            {**options, "lr": share / 0.5, "weight_decay": 0.5}, gradient=np.zeros(1, np.float32), param=param
        )


def planted(options: Mapping[str, Any], *, gradient: Array, **given: Array) -> Trial:
    """One later step of this state, the rest of it ones."""
    names = ("param", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else []))
    held = {name: given.get(name, np.ones(gradient.size, np.float32)) for name in names}
    return Trial(options, 20, held, [gradient])


def drawn_in(generator: np.random.Generator, low: float, high: float) -> Array:
    return generator.uniform(low, high, DRAWN).astype(np.float32)


def near_ties(one: Wide, other: Wide) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The positions of up to :data:`TIES` pairs, one of each, whose sum is closest to half a bit above the middle of
    two fp32 numbers, if it is in 1..2.

    The middles are the odd multiples of 2^-24. So the remainders modulo 2^-23 are to add up to 2^-24 and half a bit,
    and the nearest partner of each is found among the sorted ones.
    """
    unit = 2.0**-23
    left, right = np.fmod(one, unit), np.fmod(other, unit)
    order = np.argsort(right, kind="stable")  # the same trials on every machine
    wanted = np.mod(unit / 2 + HALF_BIT - left, unit)
    place = np.clip(np.searchsorted(right[order], wanted), 1, right.size - 1)
    below, above = order[place - 1], order[place]
    nearer = np.where(np.abs(right[below] - wanted) < np.abs(right[above] - wanted), below, above)
    total = one + other[nearer]
    distance = np.where((total > 1) & (total < 2), np.abs(right[nearer] - wanted), np.inf)
    closest = np.argsort(distance, kind="stable")[: 64 * TIES]
    _, different = np.unique(nearer[closest], return_index=True)  # one partner may be the nearest of many
    closest = closest[np.sort(different)[:TIES]]
    return closest, nearer[closest]
