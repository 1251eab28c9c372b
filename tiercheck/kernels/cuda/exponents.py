"""Exponents in few bits, on the device.

As :mod:`tiercheck.kernels.reference`, bit for bit, into arrays that the caller has allocated; how much it is that was
packed, or is stored, stays on the device. Every function puts its work into ``stream`` and returns.
"""

from __future__ import annotations

import numpy as np

from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.compaction import begin_scan
from tiercheck.kernels.cuda.module import DeviceArray, Stream, check
from tiercheck.kernels.reference.compaction import ELEMENTS_MAX
from tiercheck.kernels.reference.exponents import EXPONENT_BLOCK, blocks_of, check_packed, check_room

__all__ = ["exponents_workspace", "pack_exponents", "unpack_exponents"]

THREADS = 256

WARPS = THREADS // 32
"""Blocks of exponents a block of threads works on: a tile."""


def exponents_workspace(size: int) -> int:
    """The uint64 elements of workspace that packing, or unpacking, ``size`` exponents needs."""
    return 1 + tiles_of(size)


def pack_exponents(
    exponents: DeviceArray, packed: DeviceArray, length: DeviceArray, workspace: DeviceArray, *, stream: Stream
) -> None:
    """As the reference's ``pack_exponents``, with the bytes that they take in ``length`` (uint64[1]).

    ``workspace``: uint64, at least :func:`exponents_workspace`, nobody else's until the work is done; it is cleared
    here. Nothing of ``packed`` beyond the length is written.

    Raises:
        ValueError: an array's type or size is not right, or there are more than 2**32 - 256 exponents.
    """
    check_exponents(exponents)
    check("packed", packed, np.uint8)
    check("length", length, np.uint64, 1)
    check_room(exponents.size, packed)
    scan = begin_scan(workspace, tiles_of(exponents.size), stream)
    launch("pack_exponents", exponents.size, (exponents, np.uint64(exponents.size), packed, length, *scan), stream)


def unpack_exponents(
    packed: DeviceArray, exponents: DeviceArray, stored: DeviceArray, workspace: DeviceArray, *, stream: Stream
) -> None:
    """As the reference's ``unpack_exponents``, but that the caller compares: ``stored`` (uint32[1]) says how many codes
    stand for stored exponents.

    Where ``packed`` has another number of bytes behind its codes, it is damaged, or goes on with something else.
    Whatever it holds, nothing beyond it is read. ``workspace`` as in :func:`pack_exponents`.

    Raises:
        ValueError: an array's type or size is not right, or there are more than 2**32 - 256 exponents.
    """
    check_exponents(exponents)
    check("packed", packed, np.uint8)
    check("stored", stored, np.uint32, 1)
    check_packed(blocks_of(exponents.size), packed)
    scan = begin_scan(workspace, tiles_of(exponents.size), stream)
    arguments = (packed, np.uint64(packed.size), exponents, np.uint64(exponents.size), stored, *scan)
    launch("unpack_exponents", exponents.size, arguments, stream)


def check_exponents(exponents: DeviceArray) -> None:
    check("exponents", exponents, np.uint8)
    if blocks_of(exponents.size) * EXPONENT_BLOCK > ELEMENTS_MAX:
        raise ValueError(
            f"stored exponents are counted in 32 bits, and there are {exponents.size}: pack them in pieces"
        )


def tiles_of(size: int) -> int:
    return max(1, -(-blocks_of(size) // WARPS))


def launch(kernel: str, size: int, arguments: tuple[object, ...], stream: Stream) -> None:
    module.launch("exponents", kernel, tiles_of(size), THREADS, arguments, stream)
