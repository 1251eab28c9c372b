"""Sparse tensors without loss: the elements that are not zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels import Kernel, SparseGradient
from tiercheck.streams.codecs import indices as layout
from tiercheck.streams.codecs.checks import check_dtype, flat_array, refuse_residual
from tiercheck.streams.codecs.encoding import DTYPES, FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.codecs.floats import to_float32
from tiercheck.streams.codecs.indices import Indices, chunks, planned_parts, read_indices
from tiercheck.types import Fidelity

__all__ = ["Nonzero"]

SLICE_ELEMENTS = 1 << 17
"""Elements that :func:`find_nonzero` looks at at a time."""

PLAIN = Exact()


class Nonzero(Codec):
    """The elements that are not zero, each bit of them, and their indices: for gradients that training has made sparse.

    An element is left out only if all its bits are zero, so that ``-0.0`` and the payloads of NaNs come back. Where
    indices and values would take more than the tensor itself, it is stored by ``exact``; so is what is no float. Never
    more bytes than ``exact`` takes, and those of the elements' indices while they are few.
    """

    name = "nonzero"
    fidelity = Fidelity.EXACT
    dtypes = DTYPES

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, DTYPES, self.name)
        if dtype not in FLOATS:
            return PLAIN.plan(dtype, shape)
        size = math.prod(shape)
        return planned_parts(capacity(size, dtype), dtype, size, layout.CHUNK_ELEMENTS)

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
        check_dtype(dtype, DTYPES, self.name)
        refuse_residual(residual, self.name)
        flat = flat_array(array, dtype)
        indices = find_nonzero(flat, capacity(flat.size, dtype)) if dtype in FLOATS else None
        if indices is None:
            return PLAIN.encode(array, dtype, seed=seed, slot=slot, threads=threads)
        values = indices.write(slot, dtype)
        for chunk, stored in indices.by_chunk():
            values[stored] = flat[chunk][indices.within[stored]]
        suffixes = tuple(part.suffix for part in self.plan(dtype, array.shape))
        return Encoding(self.text, dtype, tuple(array.shape), suffixes, indices.scalars)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        indices, values = self.stored(encoding, parts)
        return indices.dense(values).reshape(encoding.shape)

    def decode_sparse(
        self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1
    ) -> SparseGradient | None:
        indices, values = self.stored(encoding, parts)
        flat = indices.flat()
        return None if flat is None else SparseGradient(flat, to_float32(values, encoding.dtype))

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return PLAIN.kernels_used()

    def stored(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> tuple[Indices, NDArray[Any]]:
        most = capacity(math.prod(encoding.shape), encoding.dtype)
        return read_indices(encoding, parts, encoding.dtype, most)


def capacity(size: int, dtype: str) -> int:
    """As many elements, with their indices, as take no less than the whole tensor."""
    itemsize = DTYPES[dtype].itemsize
    return -(-size * itemsize // (4 + itemsize))


def find_nonzero(flat: NDArray[Any], most: int) -> Indices | None:
    """Where the elements of ``flat`` are that have a bit set; ``None`` for ``most`` of them or more."""
    patterns = flat.view(f"u{flat.itemsize}")
    # Counted before any is looked for, which takes several times as long: most gradients are dense.
    counted = 0
    for start in range(0, flat.size, SLICE_ELEMENTS):
        counted += int(np.count_nonzero(patterns[start : start + SLICE_ELEMENTS]))
        if counted >= max(1, most):
            return None
    found: list[NDArray[np.uint32]] = []
    counts: list[int] = []
    for chunk in chunks(flat.size, layout.CHUNK_ELEMENTS):
        counts.append(0)
        for start in range(chunk.start, chunk.stop, SLICE_ELEMENTS):
            some = np.flatnonzero(patterns[start : min(start + SLICE_ELEMENTS, chunk.stop)] != 0)
            counts[-1] += some.size
            found.append((some + (start - chunk.start)).astype(np.uint32))
    within = np.concatenate(found) if found else np.empty(0, np.uint32)
    return Indices(flat.size, layout.CHUNK_ELEMENTS, counts, within)
