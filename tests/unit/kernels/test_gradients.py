"""Cutting a sparse gradient into pieces."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tiercheck.kernels import SparseGradient


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 1), (0, 7), (3, 3), (3, 9), (7, 8), (8, 40), (40, 40), (0, 2**32)]
)
def test_the_indices_between_two_elements_are_those_that_lie_there(start: int, stop: int) -> None:
    indices = np.array([0, 3, 7, 8, 39, 2**32 - 1], np.uint32)
    gradient = SparseGradient(indices, np.arange(6, dtype=np.float32))
    first, last = gradient.between(start, stop)
    assert indices[first:last].tolist() == [index for index in indices.tolist() if start <= index < stop]
    piece = gradient.piece(start, stop)
    assert piece.indices.tolist() == [index - start for index in indices.tolist() if start <= index < stop]


def test_looking_for_a_tile_does_not_copy_all_indices() -> None:
    """A replay looks for each of its tiles, so that a copy would make it quadratic."""
    size = 1_000_000
    gradient = SparseGradient(np.arange(size, dtype=np.uint32), np.zeros(size, np.float32))
    tracemalloc.start()
    try:
        gradient.between(1000, 2000)
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
