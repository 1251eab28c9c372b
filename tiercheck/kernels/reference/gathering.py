"""Many small tensors at once, in NumPy. They are given by their addresses: an array object for each would cost more
time than its bytes."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.bfloat16 import is_bfloat16

__all__ = ["are_bfloat16", "check_lengths", "first_word", "gather_into", "words_at"]


def are_bfloat16(addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of contiguous fp32 tensors in host memory, by address and number of elements: whether bf16 holds every value
    exactly, and there is one. Reading past the first value that it cannot hold is not needed.

    The addresses are believed: whoever calls keeps the tensors alive. Errors: ``ValueError`` if not every tensor has
    both.
    """
    check_lengths(addresses, sizes)
    words = [words_at(address, size) for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True)]
    return np.array([each.size > 0 and is_bfloat16(each.view(np.float32)) for each in words], np.bool_)


def gather_into(
    addresses: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    narrowed: NDArray[np.bool_],
    starts: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Copy contiguous tensors in host memory, by address and length in bytes, to where each one ``starts`` in ``out``.

    Of one that is ``narrowed``, which is fp32, the upper 16 bits of each value are copied. The addresses are believed,
    as in :func:`are_bfloat16`; so is that ``out`` has room. Errors: ``ValueError`` if not every tensor has all four.
    """
    check_lengths(addresses, nbytes, narrowed, starts)
    each = zip(addresses.tolist(), nbytes.tolist(), narrowed.tolist(), starts.tolist(), strict=True)
    for address, length, narrow, start in each:
        if narrow:
            halves = (words_at(address, length // 4) >> np.uint32(16)).astype(np.uint16)
            out[start : start + length // 2] = halves.view(np.uint8)
        elif length:
            out[start : start + length] = bytes_at(address, length)


def first_word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def words_at(address: int, size: int) -> NDArray[np.uint32]:
    if not size:  # which may have no address
        return np.empty(0, np.uint32)
    return bytes_at(address, 4 * size).view(np.uint32)


def bytes_at(address: int, length: int) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(address)), np.uint8)


def check_lengths(*arrays: NDArray[np.int64] | NDArray[np.bool_]) -> None:
    if len({each.size for each in arrays}) > 1:
        raise ValueError(f"these describe one tensor each, and are of {[each.size for each in arrays]} elements")
