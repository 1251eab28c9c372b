"""Compaction in NumPy: the elements of largest magnitude of a gradient, in order.

``values`` are fp32, fp16, or bf16 patterns (uint16). *Survivors*, the elements that are kept, are always fp32, and so
are residuals.

With error feedback, ``residual`` (fp32, one for each element, writable) holds what earlier encodings lost. Then
``x = values + residual``, one fp32 addition an element, is compacted instead of the values, and ``residual`` becomes
``x``. The caller then subtracts what it stored of the survivors: :func:`tiercheck.kernels.settle`.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ELEMENTS_MAX",
    "INFINITY",
    "MAGNITUDE",
    "SAMPLED_TOGETHER",
    "SAMPLES",
    "Values",
    "check_buffers",
    "check_ratio",
    "check_values",
    "compact",
    "compact_into",
    "largest_of",
    "sample_keys",
    "sample_positions",
    "select_threshold",
    "threshold_bits",
    "wanted_of",
    "widened",
]

Values: TypeAlias = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]

SAMPLES = 1 << 16
"""Elements that :func:`select_threshold` looks at."""

SAMPLED_TOGETHER = 4
"""Consecutive elements in one run of samples. They share a cache line, and the cost of sampling is that of reading
cache lines. On real gradients, runs of four, each from its own stratum, estimate the threshold as well as independent
single samples: over 60 seeds the standard deviation of the share that reached it was 3.5 % and 4.0 % (ratio 0.01); it
was 4.6 % with runs of eight."""

ELEMENTS_MAX = 2**32 - 1
"""The most elements of one call: indices have 32 bits."""

MAGNITUDE = np.uint32(0x7FFFFFFF)

INFINITY = np.uint32(0x7F800000)


def select_threshold(
    values: Values, ratio: float, seed: int, *, residual: NDArray[np.float32] | None = None, threads: int = 1
) -> float:
    """A magnitude that about the share ``ratio`` of ``values`` (plus ``residual``) reach, estimated from random
    samples.

    The result is a function of (seed, size, values, residual, ratio); no argument is changed. With ``SAMPLES`` samples
    and a ratio of 0.01, the share that reaches it is usually within a tenth of the ratio. If neighbours have equal
    magnitudes, four samples carry as much information as one, and it is within a fifth. The result is never zero, and
    never above infinity, so that :func:`compact` keeps every element that is not finite.

    Errors: ``ValueError`` for a ratio outside of (0, 1], and for arrays as :func:`compact`.

    Source: Deep Gradient Compression (Lin et al., 2018), section 3, with a fixed number of samples instead of a share.
    """
    check_ratio(ratio)
    check_values(values, residual)
    if values.size > SAMPLES:
        positions = sample_positions(values.size, seed)
        values = values[positions]
        residual = None if residual is None else residual[positions]
    if not values.size:
        return float(np.uint32(1).view(np.float32))
    magnitudes = added(values, residual).view(np.uint32) & MAGNITUDE
    wanted = wanted_of(magnitudes.size, ratio)
    chosen = np.partition(magnitudes, magnitudes.size - wanted)[magnitudes.size - wanted]
    return float(np.clip(chosen, np.uint32(1), INFINITY).view(np.float32))


def sample_positions(size: int, seed: int) -> NDArray[np.uint32]:
    """The positions of :func:`select_threshold`'s samples: ``SAMPLES`` of them below ``size``, a function of size and
    seed.

    The elements are divided into strata of equal size, one for each run of ``SAMPLED_TOGETHER`` consecutive samples.
    Each run begins at a random multiple of ``SAMPLED_TOGETHER`` in its stratum; two strata may share a run at their
    border, and up to three elements at the end belong to no run. The begin is a 32-bit hash of the run's number and the
    seed's keys, scaled to the stratum, so that all positions can be computed in parallel, on any device. ``size`` is
    ``SAMPLES`` to 2**32 - 1.

    Source: the constants and shifts are those of lowbias32 (Wellons, hash-prospector, 2018).
    """
    first, second = sample_keys(seed)
    runs = SAMPLES // SAMPLED_TOGETHER
    hashed = np.arange(runs, dtype=np.uint32) ^ first
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= (hashed >> np.uint32(15)) ^ second
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    places = np.uint64(size // SAMPLED_TOGETHER)
    within = hashed.astype(np.uint64) * places >> np.uint64(32)
    chosen = (np.arange(runs, dtype=np.uint64) * places + within) // np.uint64(runs)
    together = np.arange(SAMPLED_TOGETHER, dtype=np.uint64)
    return (chosen[:, None] * np.uint64(SAMPLED_TOGETHER) + together).reshape(-1).astype(np.uint32)


def sample_keys(seed: int) -> tuple[np.uint32, np.uint32]:
    """The keys of :func:`sample_positions`: the halves of one step of SplitMix64 (Steele et al., 2014)."""
    state = (seed + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    state ^= state >> 31
    return np.uint32(state % 2**32), np.uint32(state >> 32)


def compact(
    values: Values, threshold: float, *, residual: NDArray[np.float32] | None = None, threads: int = 1
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The indices (uint32, ascending) and values (fp32) of the elements whose magnitude is at least ``threshold``.

    Magnitudes are compared as integers: a NaN is larger than an infinity, and an infinity larger than any number. So a
    threshold up to infinity keeps them all. If ``residual`` is given, it becomes ``values + residual``.

    Errors: ``ValueError`` for 2**32 elements or more, for a threshold that is negative or NaN, and for arrays of other
    sizes, dtypes or layouts than the module's; nothing was changed then.
    """
    check_values(values, residual)
    least = threshold_bits(threshold)
    exact = added(values, residual)
    if residual is not None:
        residual[:] = exact
    indices = np.flatnonzero((exact.view(np.uint32) & MAGNITUDE) >= least).astype(np.uint32)
    return indices, exact[indices]


def compact_into(
    values: Values,
    threshold: float,
    indices: NDArray[np.uint32],
    survivors: NDArray[np.float32],
    *,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> int:
    """:func:`compact` into the caller's buffers, both of one size. Returns how many elements reach ``threshold``.

    If more elements reach it than the buffers hold, the buffers hold the first ones, in index order. If fewer do, the
    rest of the buffers is unspecified. In both cases ``residual`` becomes ``values + residual`` for **all** elements:
    if the buffers were too small, the caller goes on with ``compact(residual, threshold)``.

    Errors: as :func:`compact`, and ``ValueError`` for buffers that are not writable, fp32 and uint32, and of one size.
    """
    check_buffers(indices, survivors)
    found, exact = compact(values, threshold, residual=residual)
    held = min(found.size, indices.size)
    indices[:held], survivors[:held] = found[:held], exact[:held]
    return found.size


def largest_of(survivors: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Where the ``count`` of largest magnitude are (as integers, so NaNs first), of equal ones the first; ascending."""
    magnitudes = survivors.view(np.uint32) & MAGNITUDE
    least = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    kept = magnitudes > least
    kept[np.flatnonzero(magnitudes == least)[: count - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def threshold_bits(threshold: float) -> np.uint32:
    """The pattern that a magnitude must reach. Errors: ``ValueError`` for a NaN or a negative number."""
    if not threshold >= 0:
        raise ValueError(f"a threshold must be a magnitude, 0 or more, not {threshold}")
    with np.errstate(over="ignore"):
        return np.float32(threshold).view(np.uint32)


def widened(values: Values) -> NDArray[np.float32]:
    """The values in fp32, without a loss."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def added(values: Values, residual: NDArray[np.float32] | None) -> NDArray[np.float32]:
    if residual is None:
        return widened(values)
    with np.errstate(invalid="ignore", over="ignore"):
        return widened(values) + residual


def wanted_of(samples: int, ratio: float) -> int:
    """How many of the samples shall reach the threshold."""
    return min(samples, max(1, round(ratio * samples)))


def check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(f"a ratio must be in (0, 1], not {ratio}")


def check_values(values: Values, residual: NDArray[np.float32] | None) -> None:
    """Errors: ``ValueError`` if a compaction cannot work on these arrays."""
    if values.dtype not in (np.float32, np.float16, np.uint16):
        raise ValueError(f"values are float32, float16 or bf16 patterns (uint16), not {values.dtype}")
    if values.size > ELEMENTS_MAX:
        raise ValueError(f"indices have 32 bits, and there are {values.size} elements: compact them in pieces")
    check_layout("values", values)
    if residual is None:
        return
    if residual.dtype != np.float32 or residual.size != values.size:
        raise ValueError(f"{values.size} values need as many float32 residuals, not {residual.size} {residual.dtype}")
    check_layout("residual", residual, writable=True)


def check_buffers(indices: NDArray[np.uint32], survivors: NDArray[np.float32]) -> None:
    """Errors: ``ValueError`` if a compaction cannot write to these arrays."""
    if indices.dtype != np.uint32 or survivors.dtype != np.float32 or indices.size != survivors.size:
        raise ValueError(
            f"indices are uint32 and survivors float32, one each; not {indices.size} {indices.dtype} and "
            f"{survivors.size} {survivors.dtype}"
        )
    check_layout("indices", indices, writable=True)
    check_layout("survivors", survivors, writable=True)


def check_layout(name: str, array: np.ndarray, *, writable: bool = False) -> None:
    flags = array.flags
    if array.ndim != 1 or not (flags.c_contiguous and flags.aligned):
        raise ValueError(f"{name}: a kernel's array must be 1-D, contiguous and aligned")
    if writable and not flags.writeable:
        raise ValueError(f"{name}: the kernel writes to this array, and it is read-only")
