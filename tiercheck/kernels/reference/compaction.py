"""Compaction in NumPy: the elements of largest magnitude of an fp32 array.

``bits`` are an array's patterns as uint32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["INFINITY", "MAGNITUDE", "SAMPLES", "compact", "select_threshold", "threshold_bits"]

SAMPLES = 1 << 16
"""Elements :func:`select_threshold` looks at."""

MAGNITUDE = np.uint32(0x7FFFFFFF)

INFINITY = np.uint32(0x7F800000)


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
