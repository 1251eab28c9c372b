"""XXH3-64 of many parts of one array, by the library that every reader verifies with."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiercheck.kernels.reference.gathering import check_lengths

__all__ = ["check_parts", "hash_each"]


def hash_each(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The XXH3-64, with seed 0, of the bytes from each of ``starts`` to each of ``stops`` in ``data``, which is 1-D and
    contiguous. Errors: ``ValueError`` if not every part has both, or one is not in ``data``."""
    check_parts(data, starts, stops)
    memory = data.data
    parts = map(memory.__getitem__, map(slice, starts.tolist(), stops.tolist()))
    return np.array([*map(xxhash.xxh3_64_intdigest, parts)], np.uint64)


def check_parts(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    check_lengths(starts, stops)
    if starts.size and (starts.min() < 0 or stops.max() > data.size or (starts > stops).any()):
        raise ValueError(f"not every part lies in the {data.size} bytes")
