"""Dense and sparse gradients in one table, from which a compiled loop takes blocks in the order of the elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, pointer
from tiercheck.kernels.gradients import Gradient, SparseGradient

__all__ = ["SOURCE", "sources_of", "take_block", "untake_block"]

SOURCE = np.dtype(
    [("values", np.uintp), ("indices", np.uintp), ("next", np.int64), ("size", np.int64), ("sparse", np.bool_)],
    align=True,
)
"""A gradient: the address of its values; if it is sparse, the address of its indices, the position of the next index to
take, and the number of indices."""


def sources_of(
    state: Sequence[NDArray[np.float32]], gradients: Sequence[Gradient]
) -> tuple[NDArray[np.void], NDArray[np.uintp]]:
    """The table, and the addresses of the arrays that are read from end to end: the state and the dense gradients."""
    sources = np.zeros(len(gradients), SOURCE)
    streams = [address(array) for array in state if array.size]
    for source, gradient in zip(sources, gradients, strict=True):
        if isinstance(gradient, SparseGradient):
            source["values"], source["indices"] = address(gradient.values), address(gradient.indices)
            source["size"], source["sparse"] = gradient.indices.size, True
        else:
            source["values"] = address(gradient)
            streams.append(address(gradient))
    return sources, np.array(streams, np.uintp)


def address(array: NDArray[np.float32] | NDArray[np.uint32]) -> int:
    return int(array.__array_interface__["data"][0])


@compiled
def take_block(sources: NDArray[np.void], index: int, first: int, last: int, scattered: NDArray[np.float32]) -> int:
    """Write the values whose indices are in ``first..last-1`` into ``scattered``, a block of zeros. Returns their
    number.

    Blocks must be taken in ascending order, each once.
    """
    source = sources[index]
    size = source.size
    indices = carray(pointer(source.indices), (size,), np.uint32)
    values = carray(pointer(source.values), (size,), np.float32)
    begin = source.next
    position = begin
    while position < size and indices[position] < last:
        scattered[np.intp(indices[position]) - first] = values[position]
        position += 1
    source.next = position
    return int(position - begin)


@compiled
def untake_block(sources: NDArray[np.void], index: int, first: int, taken: int, scattered: NDArray[np.float32]) -> None:
    """Write zeros over the values that :func:`take_block` has written."""
    source = sources[index]
    indices = carray(pointer(source.indices), (source.size,), np.uint32)
    for position in range(source.next - taken, source.next):
        scattered[np.intp(indices[position]) - first] = np.float32(0)
