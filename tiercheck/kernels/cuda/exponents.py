"""Lossless coding of exponents in few bits, on the device.

The bits are those of :mod:`tiercheck.kernels.reference`; the caller allocates all arrays. Lengths and counts stay on
the device, in arrays of one element. Every function puts its work into ``stream`` and returns.
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
"""Blocks of exponents that a block of threads works on, one for each warp: a tile."""


def exponents_workspace(size: int) -> int:
    """The uint64 elements of workspace that packing or unpacking ``size`` exponents needs."""
    return 1 + tiles_of(size)


def pack_exponents(
    exponents: DeviceArray, packed: DeviceArray, length: DeviceArray, workspace: DeviceArray, *, stream: Stream
) -> None:
    """The reference's ``pack_exponents``. The bytes that they take are written to ``length`` (uint64[1]).

    ``workspace`` is uint64, of at least :func:`exponents_workspace` elements. It is cleared here, and belongs to this
    call until the work is done. Nothing of ``packed`` beyond the length is written.

    Raises:
        ValueError: an array has the wrong dtype or size, or there are more than 2**32 - 256 exponents.
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
    """The reference's ``unpack_exponents``, without its check: the number of codes that stand for stored exponents is
    written to ``stored`` (uint32[1]).

    The caller compares it with the number of bytes behind the codes in ``packed``: if they differ, ``packed`` is
    damaged, or something else follows. Nothing beyond ``packed`` is read in any case. ``workspace`` as in
    :func:`pack_exponents`.

    Raises:
        ValueError: an array has the wrong dtype or size, or there are more than 2**32 - 256 exponents.
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
