"""Sparse tensors with loss: the elements of largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.kernels import Kernel, SparseGradient
from tiercheck.streams.codecs import indices as layout
from tiercheck.streams.codecs.checks import check_dtype, check_residual, flat_array
from tiercheck.streams.codecs.encoding import FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.floats import KERNELS_USED, from_float32, rounded
from tiercheck.streams.codecs.indices import Indices, chunks, planned_parts, read_indices
from tiercheck.types import Fidelity

__all__ = ["EXPONENT_MAX", "Sparse", "Survivors"]

EXPONENT_MAX = 15 + 149
"""The scale of a tensor whose largest element is the smallest denormal of fp32."""

INFINITY = np.uint32(0x7F800000)

MAGNITUDE = np.uint32(0x7FFFFFFF)

PIECE_MIN = 1 << 16
"""Elements that :func:`collect_largest` looks at at a time, at least."""


@dataclass(frozen=True)
class Sparse(Codec):
    """The elements of largest magnitude; the others come back as zero.

    - ``ratio``: the share of the elements that is kept.

    Values are fp16 under a power-of-two scale for the tensor, which brings the largest to [2**14, 2**15): off by at
    most 2**-11 of themselves, or by 2**-39 of the largest. The threshold is estimated from samples; never more than
    1.25 times the ratio is kept, the largest of them, and of equal ones the first. NaNs and infinities count as the
    largest; they come back as NaN and infinity, and ``nonfinite`` counts those in the tensor.

    Source: Deep Gradient Compression (Lin et al., 2018); TierCheck's paper, for the ratio and the fp16 values.
    """

    name = "sparse"
    fidelity = Fidelity.APPROXIMATE
    feedback = True
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {self.ratio}")

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        finite = np.isfinite(values)
        kept = values.size - int(np.count_nonzero(finite)) <= self.capacity(values.size)
        return np.where(finite, np.abs(values), 0.0 if kept else np.inf).astype(np.float64)

    def capacity(self, size: int) -> int:
        """The most elements that are kept of ``size``."""
        return min(size, math.ceil(1.25 * self.ratio * size))

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, FLOATS, self.name)
        size = math.prod(shape)
        return planned_parts(self.capacity(size), "F16", size, layout.CHUNK_ELEMENTS)

    def encode(
        self,
        array: NDArray[Any],
        dtype: str,
        *,
        seed: int,
        slot: Slot,
        residual: NDArray[np.float32] | None = None,
        threads: int = 1,
    ) -> Encoding:
        check_dtype(dtype, FLOATS, self.name)
        check_residual(residual, array.size)
        flat = flat_array(array, dtype)
        threshold = threshold_of(flat, self.ratio, seed, residual)
        indices, survivors, nonfinite = collect(flat, threshold, self.capacity(flat.size), residual, threads)
        halves = indices.write(slot, "F16")
        exponent = kernels.to_half(survivors, halves)
        if residual is not None:
            decoded = rounded(kernels.from_half(halves, exponent), dtype)
            for chunk, stored in indices.by_chunk():
                kernels.settle(residual[chunk], indices.within[stored], survivors[stored], decoded[stored])
        return self.encoding(dtype, tuple(array.shape), indices, exponent, nonfinite)

    def encoding(self, dtype: str, shape: tuple[int, ...], indices: Indices, exponent: int, nonfinite: int) -> Encoding:
        """What is said of a tensor of which these elements are stored."""
        scalars = {"exponent": exponent, "nonfinite": nonfinite, **indices.scalars}
        suffixes = tuple(part.suffix for part in self.plan(dtype, shape))
        return Encoding(self.text, dtype, shape, suffixes, scalars)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        indices, values = self.stored(encoding, parts)
        return indices.dense(from_float32(values, encoding.dtype)).reshape(encoding.shape)

    def decode_sparse(
        self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1
    ) -> SparseGradient | None:
        indices, values = self.stored(encoding, parts)
        flat = indices.flat()
        return None if flat is None else SparseGradient(flat, rounded(values, encoding.dtype))

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return (
            kernels.select_threshold,
            kernels.compact_into,
            kernels.compact,
            kernels.to_half,
            kernels.from_half,
            kernels.settle,
            *KERNELS_USED,
        )

    def stored(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> tuple[Indices, NDArray[np.float32]]:
        capacity = self.capacity(math.prod(encoding.shape))
        indices, halves = read_indices(encoding, parts, "F16", capacity, ("exponent", "nonfinite"))
        exponent = encoding.scalars["exponent"]
        if not -EXPONENT_MAX <= exponent <= EXPONENT_MAX:
            raise Corruption(f"the scale's exponent {exponent} is out of range")
        return indices, kernels.from_half(halves, exponent)


@dataclass(frozen=True)
class Survivors:
    """The elements of a gradient that a device has chosen and made fp16: it has ``CHUNK_ELEMENTS`` or fewer."""

    codec: Sparse
    dtype: str
    """Of the gradient, as its shape."""
    shape: tuple[int, ...]
    indices: NDArray[np.uint32]
    halves: NDArray[np.float16]
    exponent: int
    nonfinite: int

    def store(self, slot: Slot) -> Encoding:
        """As the codec's ``encode`` does."""
        indices = Indices(math.prod(self.shape), layout.CHUNK_ELEMENTS, [self.indices.size], self.indices)
        indices.write(slot, "F16")[:] = self.halves
        return self.codec.encoding(self.dtype, self.shape, indices, self.exponent, self.nonfinite)


def threshold_of(flat: NDArray[Any], ratio: float, seed: int, residual: NDArray[np.float32] | None) -> float:
    if flat.size > kernels.ELEMENTS_MAX:  # more than the kernel has positions for: it gets the samples
        positions = np.random.default_rng(seed).integers(0, flat.size, kernels.SAMPLES)
        flat, residual = flat[positions], None if residual is None else residual[positions]
    return kernels.select_threshold(flat, ratio, seed, residual=residual)


def collect(
    flat: NDArray[Any], threshold: float, capacity: int, residual: NDArray[np.float32] | None, threads: int
) -> tuple[Indices, NDArray[np.float32], int]:
    """The elements that reach the threshold, the largest ``capacity`` of them; and how many are not finite.

    One read of the tensor. ``residual`` becomes ``flat + residual``, 0 if that is not finite and not collected.
    """
    within, survivors = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
    counts: list[int] = []
    held = 0
    for chunk in chunks(flat.size, layout.CHUNK_ELEMENTS):
        part = None if residual is None else residual[chunk]
        reached = kernels.compact_into(
            flat[chunk], threshold, within[held:], survivors[held:], residual=part, threads=threads
        )
        counts.append(reached)
        held = min(capacity, held + reached)
    if sum(counts) > capacity:
        return collect_largest(flat, threshold, capacity, residual, threads)
    survivors = survivors[:held]
    nonfinite = held - int(np.count_nonzero(np.isfinite(survivors)))
    return Indices(flat.size, layout.CHUNK_ELEMENTS, counts, within[:held]), survivors, nonfinite


def collect_largest(
    flat: NDArray[Any], threshold: float, capacity: int, residual: NDArray[np.float32] | None, threads: int
) -> tuple[Indices, NDArray[np.float32], int]:
    """As :func:`collect`, where more reach the threshold than are wanted: piece by piece, raising it.

    ``residual`` is what to collect from, where it is given.
    """
    source = flat if residual is None else residual
    positions, survivors = np.empty(0, np.int64), np.empty(0, np.float32)
    nonfinite, step = 0, max(PIECE_MIN, 4 * capacity)
    for start in range(0, source.size, step):
        indices, values = kernels.compact(source[start : start + step], threshold, threads=threads)
        found = indices.astype(np.int64) + start
        strange = found[~np.isfinite(values)]
        nonfinite += strange.size
        if residual is not None:
            residual[strange] = 0
        positions, survivors = np.concatenate((positions, found)), np.concatenate((survivors, values))
        if survivors.size > capacity:
            kept = kernels.largest_of(survivors, capacity)
            positions, survivors = positions[kept], survivors[kept]
            # From here on an equal one comes too late.
            least = np.min(survivors.view(np.uint32) & MAGNITUDE) + np.uint32(1)
            threshold = float(np.minimum(least, INFINITY).view(np.float32))
    edges = np.searchsorted(positions, [chunk.start for chunk in chunks(flat.size, layout.CHUNK_ELEMENTS)])
    counts = np.diff(np.append(edges, positions.size)).tolist()
    within = (positions % layout.CHUNK_ELEMENTS).astype(np.uint32)
    return Indices(flat.size, layout.CHUNK_ELEMENTS, counts, within), survivors, nonfinite
