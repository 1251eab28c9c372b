"""What compiled code is given beside Numba's own."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import LINE, aligned, borrowed, compiled, keep_alive


@compiled
def sum_of_ones(count: int) -> tuple[float, float]:
    """Of an array that is borrowed, while another of its size is made."""
    ones = np.ones(count, np.float32)
    lent = borrowed(ones)
    sevens = np.full(count, np.float32(7))
    total = np.float64(0)
    for i in range(count):
        total += lent[i]
    keep_alive(ones)
    return total, sevens.sum()


@compiled
def double(array: NDArray[np.float32]) -> None:
    lent = borrowed(array)
    for i in range(lent.size):
        lent[i] *= lent.dtype.type(2)


def test_what_is_kept_alive_is_not_used_again() -> None:
    for count in (1, 16, 512, 4096):
        assert sum_of_ones(count) == (count, 7 * count), count


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint16])
def test_what_is_borrowed_is_the_same_memory(dtype: type[np.generic]) -> None:
    array = np.arange(7).astype(dtype)
    double(array[2:])
    assert array.tolist() == [0, 1, 4, 6, 8, 10, 12]


def test_what_is_aligned_begins_a_line_and_keeps_its_size() -> None:
    for before in range(17):
        room = np.zeros(100 + LINE + before, np.float32)[before:]
        lined = address_and_size(room)
        assert lined == (lined[0] // 64 * 64, 100), before
        assert room.ctypes.data <= lined[0] <= room.ctypes.data + 4 * LINE, before


@compiled
def address_and_size(room: NDArray[np.float32]) -> tuple[int, int]:
    lined = aligned(room)
    return lined.ctypes.data, lined.size
