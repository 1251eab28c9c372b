"""What the CUDA kernels are tried on, and how results are compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gpu_adam import Powers, Rounding, powers_needed

__all__ = [
    "Floats",
    "adam_steps",
    "exponent_planes",
    "gradient",
    "identical",
    "narrowed",
    "powers_on_host",
    "same",
    "sums_that_depend_on_their_order",
]

Floats = NDArray[np.float32]


def patterns_of(array: NDArray[Any]) -> NDArray[Any]:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def same(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Bit for bit; of a NaN that an operation makes, sign and payload are the machine's."""
    nan = np.isnan(expected)
    return bool(
        actual.dtype == expected.dtype
        and np.array_equal(np.isnan(actual), nan)
        and np.array_equal(patterns_of(actual)[~nan], patterns_of(expected)[~nan])
    )


def identical(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    return actual.dtype == expected.dtype and actual.tobytes() == expected.tobytes()


def gradient(size: int, seed: int = 0, special: bool = True) -> Floats:
    """Heavy-tailed values over many magnitudes, with zeros, denormals and, if ``special``, NaNs and infinities."""
    generator = np.random.default_rng(seed + size)
    values = (generator.standard_t(2, size) * 10.0 ** generator.integers(-6, 1, size)).astype(np.float32)
    values[generator.random(size) < 0.05] = 0
    values[generator.random(size) < 0.02] = -0.0
    values[generator.random(size) < 0.02] *= np.float32(1e-39)
    if special and size > 40:
        values[generator.integers(0, size, 3)] = [np.nan, np.inf, -np.inf]
    return values


def exponent_planes(size: int) -> list[NDArray[np.uint8]]:
    """None to store, most, few; on both sides of where a byte begins anew; with a largest one that is itself stored."""
    generator = np.random.default_rng(size)
    planes = [
        np.full(size, 255),
        generator.integers(0, 256, size),
        generator.normal(110, 2, size).clip(0, 255),
        generator.choice([0, 3, 252, 255], size),
        generator.choice([130, 120, 118], size, p=[0.05, 0.75, 0.2]),
    ]
    return [plane.astype(np.uint8) for plane in planes]


def sums_that_depend_on_their_order() -> Floats:
    """Blocks of 128 with one large element, on the edge between two bf16 means, and two tiny ones.

    The large one absorbs a tiny one (half of its last place), but not the sum of both: so it matters which two meet
    first. The places differ in one or two bits, in every way.
    """
    bits = [1 << at for at in range(7)]
    distances = sorted({one ^ other for one in bits for other in [0, *bits]} - {0})
    pairs = [(one, other) for one in distances for other in distances if one < other]
    values = np.zeros((len(pairs), 128), np.float32)
    for row, pair in enumerate(pairs):
        values[row, row % 128] = 128 * (1 + 2.0**-8)
        for distance in pair:
            values[row, row % 128 ^ distance] = 128 * 2.0**-24
    return values.reshape(-1)


def narrowed(values: Floats, dtype: type) -> NDArray[Any]:
    """The values as float32, float16, or bf16 patterns (uint16)."""
    if dtype is np.uint16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def adam_steps(count: int, first: int = 1, **options: Any) -> list[AdamStep]:
    chosen = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, **options}
    return [AdamStep(step=first + at, lr=1e-3 * (1 + at) / 3, **chosen) for at in range(count)]


def powers_on_host(rounding: Rounding, betas: Iterable[float]) -> Powers:
    """The powers that a device would have to tell, by NumPy."""
    if (number := rounding.powers) is None:
        return Powers()
    return Powers({beta: number(beta) ** np.arange(1, powers_needed(beta) + 1).astype(number) for beta in betas})
