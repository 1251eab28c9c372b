"""The kernels in NumPy: slow, readable, and the specification of every other implementation.

Arrays are 1-D and contiguous. ``bits`` are an fp32 array's patterns as uint32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients

__all__ = [
    "BLOCK",
    "NONFINITE_CODE",
    "SAMPLES",
    "compact",
    "dequantise",
    "fma",
    "is_bfloat16",
    "narrow_into",
    "quantise_into",
    "replay_fused_adam",
    "select_threshold",
    "widen",
]

BLOCK = 256
"""Elements that share a scale in :func:`quantise_into`."""
NONFINITE_CODE = -128
"""The code of a NaN or an infinity."""
SAMPLES = 1 << 16
"""Elements :func:`select_threshold` looks at."""

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
LARGEST = np.finfo(np.float32).max
INT8_MAX = np.float32(127)
VECTOR = 8
"""Lanes of the vectors in torch's fused kernel; it has no AVX-512 variant."""


def select_threshold(values: NDArray[np.float32], ratio: float, rng_seed: int) -> float:
    """A magnitude that about ``ratio`` of ``values`` reach, from a fixed number of random samples.

    Deterministic for (seed, size, values). With 64K samples the share reached is within a tenth of a ratio of
    0.01. Never zero (a zero tells nothing) and never above infinity, so that :func:`compact` keeps whatever is
    not finite.

    Source: Deep Gradient Compression (Lin et al., 2018), section 3, with a fixed number of samples instead of a share.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"a ratio must be in (0, 1], not {ratio}")
    bits = values.view(np.uint32)
    if bits.size > SAMPLES:
        bits = bits[np.random.default_rng(rng_seed).integers(0, bits.size, SAMPLES)]
    if not bits.size:
        return float(np.uint32(1).view(np.float32))
    magnitudes = bits & MAGNITUDE
    wanted = min(magnitudes.size, max(1, round(ratio * magnitudes.size)))
    chosen = np.partition(magnitudes, magnitudes.size - wanted)[magnitudes.size - wanted]
    return float(np.clip(chosen, np.uint32(1), INFINITY).view(np.float32))


def compact(values: NDArray[np.float32], threshold: float) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The indices (ascending) and values of the elements whose magnitude is at least ``threshold``.

    Magnitudes are compared as integers: a NaN is larger than an infinity, which is larger than any number, so
    that no threshold up to infinity loses one. ``values`` has fewer than 2**32 elements.
    """
    magnitudes = values.view(np.uint32) & MAGNITUDE
    indices = np.flatnonzero(magnitudes >= threshold_bits(threshold)).astype(np.uint32)
    return indices, values[indices]


def threshold_bits(threshold: float) -> np.uint32:
    if not threshold >= 0:
        raise ValueError(f"a threshold is a magnitude, not {threshold}")
    return np.float32(threshold).view(np.uint32)


def quantise_into(values: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    """Write 8-bit codes, and a scale for every block of 256: ``value ~ code * scale``, ``|error| <= scale / 2``.

    The scale is the block's largest finite magnitude / 127, rounded up where 127 scales would not reach it
    (denormals); codes round half to even. A value that is not finite gets the code -128, and leaves its block's
    scale alone. The bound on the error holds to 127 units in the last place of fp32.
    """
    blocks = -(-values.size // BLOCK)
    padded = np.zeros((blocks, BLOCK), np.float32)
    padded.reshape(-1)[: values.size] = values
    finite = np.isfinite(padded)
    largest = np.where(finite, np.abs(padded), np.float32(0)).max(axis=1, initial=0)
    scale = largest / INT8_MAX
    with np.errstate(over="ignore"):
        short = scale * INT8_MAX < largest
    scale = np.where(short, (scale.view(np.uint32) + np.uint32(1)).view(np.float32), scale)
    divisor = np.where(scale == 0, np.float32(1), scale)[:, None]
    rounded = np.where(finite, np.rint(np.where(finite, padded, np.float32(0)) / divisor), np.float32(NONFINITE_CODE))
    codes[:] = rounded.astype(np.int8).reshape(-1)[: values.size]
    scales[:] = scale


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values of codes and their blocks' scales (finite, not negative); NaN for the code -128."""
    spread = np.repeat(scales, BLOCK)[: codes.size]
    with np.errstate(over="ignore"):
        values = np.clip(codes.astype(np.float32) * spread, -LARGEST, LARGEST)
    return np.where(codes == NONFINITE_CODE, np.float32(np.nan), values)


def is_bfloat16(values: NDArray[np.float32]) -> bool:
    """Whether bf16 holds every fp32 value exactly: its low 16 bits are zero."""
    return not np.any(values.view(np.uint32) & np.uint32(0xFFFF))


def narrow_into(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """Write the upper 16 bits of fp32 values: their bf16 patterns, where :func:`is_bfloat16`."""
    out[:] = values.view(np.uint32) >> np.uint32(16)


def widen(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The fp32 values of bf16 patterns; every bit survives."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def replay_fused_adam(
    param: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradients: Sequence[NDArray[np.float32]],
    steps: Sequence[AdamStep],
    *,
    contracted: bool,
) -> None:
    """Apply the steps in order, in place, with the rounding of torch's fused CPU kernel.

    ``contracted``: its compiler fused multiplications into additions (every x86 build with AVX2). There the second
    moment of the last ``size % 8`` elements is contracted the other way round. ``exp_avg`` is a lerp in two
    branches, as in torch's ``lerp``.
    """
    multiply_add = fma if contracted else multiply_then_add
    vectors = param.size - param.size % VECTOR
    for gradient, step in zip(gradients, steps, strict=True):
        c = Coefficients.of(step)
        g = gradient
        with np.errstate(all="ignore"):
            if c.decays and c.decoupled:
                param *= c.decay
            elif c.decays:
                g = multiply_add(param, c.decay, g)
            small = c.weight1 < np.float32(0.5)
            weight, start = (c.weight1, exp_avg) if small else (c.weight1 - np.float32(1), g)
            exp_avg[:] = multiply_add(weight, g - exp_avg, start)
            scaled = c.weight2 * g
            exp_avg_sq[:] = np.concatenate(
                (
                    multiply_add(scaled[:vectors], g[:vectors], exp_avg_sq[:vectors] * c.beta2),
                    multiply_add(exp_avg_sq[vectors:], c.beta2, scaled[vectors:] * g[vectors:]),
                )
            )
            denominator = np.sqrt(exp_avg_sq) / c.root_correction + c.eps
            param += (c.negative_step_size * exp_avg) / denominator


def multiply_then_add(
    a: NDArray[np.float32] | np.float32, b: NDArray[np.float32] | np.float32, c: NDArray[np.float32]
) -> NDArray[np.float32]:
    return a * b + c


def fma(
    a: NDArray[np.float32] | np.float32, b: NDArray[np.float32] | np.float32, c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """``a * b + c`` in fp32, rounded once.

    The product is exact in fp64. The sum is rounded there *to odd*: its error (Knuth's TwoSum) says whether it is
    inexact, and then the neighbour with the odd last bit is taken, from which rounding to fp32 cannot err twice.

    Source: Boldo and Melquiond, *Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd* (2008), theorem 2.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(total) & (error != 0)
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(inexact & even, odd, total).astype(np.float32)
