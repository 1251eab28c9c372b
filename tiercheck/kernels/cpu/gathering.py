"""Many small tensors at once, in Numba."""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.cpu.bfloat16 import low_halves_are_zero
from tiercheck.kernels.cpu.compiled import compiled, pointer
from tiercheck.kernels.reference.gathering import check_lengths

__all__ = ["are_bfloat16", "gather_into"]


def are_bfloat16(addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """As the reference."""
    check_lengths(addresses, sizes)
    found = np.empty(addresses.size, np.bool_)
    look_at_each(addresses, sizes, found)
    return found


@compiled
def look_at_each(addresses: NDArray[np.int64], sizes: NDArray[np.int64], found: NDArray[np.bool_]) -> None:
    for i in range(addresses.size):
        if sizes[i] == 0:
            found[i] = False
            continue
        words = carray(pointer(np.uintp(addresses[i])), (sizes[i],), np.uint32)
        found[i] = (words[0] & np.uint32(0xFFFF)) == 0 and low_halves_are_zero(words)


def gather_into(
    addresses: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    narrowed: NDArray[np.bool_],
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """As the reference."""
    check_lengths(addresses, nbytes, narrowed, starts)
    copy_each(addresses, nbytes, narrowed, starts, out)


@compiled
def copy_each(
    addresses: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    narrowed: NDArray[np.bool_],
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    for i in range(addresses.size):
        if narrowed[i]:
            size = nbytes[i] // 4
            words = carray(pointer(np.uintp(addresses[i])), (size,), np.uint32)
            halves = out[starts[i] : starts[i] + 2 * size].view(np.uint16)
            for k in range(size):
                halves[k] = np.uint16(words[k] >> np.uint32(16))
        else:
            octets = carray(pointer(np.uintp(addresses[i])), (nbytes[i],), np.uint8)
            target = out[starts[i] : starts[i] + nbytes[i]]
            for k in range(nbytes[i]):
                target[k] = octets[k]
