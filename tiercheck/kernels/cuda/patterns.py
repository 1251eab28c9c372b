"""Bit patterns on the device: fp32 values that bf16 holds, and exponents apart from the rest.

The bits are those of :mod:`tiercheck.kernels.reference`; the caller allocates all arrays. Every function puts its work
into ``stream`` and returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.compaction import clear
from tiercheck.kernels.cuda.module import DeviceArray, Stream, address_of, check, grid_for
from tiercheck.kernels.reference.scale_search import CANDIDATES, FOUND_NBYTES, SAMPLED_TENSORS_MAX
from tiercheck.kernels.reference.scaled import check_scale

__all__ = [
    "find_low_halves",
    "find_scale",
    "join_exponents",
    "narrow_found_into",
    "narrow_into",
    "narrow_scaled_into",
    "split_exponents",
    "widen_into",
    "widen_scaled_into",
]

THREADS = 256
SAMPLED = np.dtype([("values", np.uint64, SAMPLED_TENSORS_MAX), ("sizes", np.uint64, SAMPLED_TENSORS_MAX)])


def find_low_halves(values: DeviceArray, low: DeviceArray, *, stream: Stream) -> None:
    """Write zero to ``low`` (uint32[1]) if bf16 holds every fp32 value exactly, that is, if their low 16 bits are zero;
    else another number.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check("values", values, np.float32)
    check("low", low, np.uint32, 1)
    clear(low, stream)
    launch("find_low_halves", values.size, (values, np.uint64(values.size), low), stream)


def narrow_into(values: DeviceArray, out: DeviceArray, *, stream: Stream) -> None:
    """Write the upper 16 bits (uint16) of fp32 values. If :func:`find_low_halves` gives zero, these are their bf16
    patterns.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check("values", values, np.float32)
    check("out", out, np.uint16, values.size)
    launch("narrow", values.size, (values, np.uint64(values.size), out), stream)


def widen_into(patterns: DeviceArray, out: DeviceArray, *, stream: Stream) -> None:
    """Write the fp32 values of bf16 patterns (uint16).

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check("patterns", patterns, np.uint16)
    check("out", out, np.float32, patterns.size)
    launch("widen", patterns.size, (patterns, np.uint64(patterns.size), out), stream)


def narrow_scaled_into(
    values: DeviceArray, scale: float, out: DeviceArray, lost: DeviceArray, *, stream: Stream
) -> None:
    """The reference's ``narrow_scaled_into``. It writes zero to ``lost`` (uint32[1]) if every value is given back; else
    another number. Errors: ``ValueError`` for a scale out of range, or an array of the wrong dtype or size."""
    check_scale(scale)
    check("values", values, np.float32)
    check("lost", lost, np.uint32, 1)
    clear(lost, stream)
    multiplier = np.float32(scale)
    kernel = f"narrow_scaled_{kind_of(out, values.size)}"
    arguments = (values, np.uint64(values.size), multiplier, np.float32(1) / multiplier, out, lost)
    launch(kernel, values.size, arguments, stream)


def find_scale(tensors: Sequence[DeviceArray], found: DeviceArray, *, stream: Stream) -> None:
    """Write the reference's ``find_scale`` to ``found``, uint8 of :data:`FOUND_NBYTES`, and zero behind it. Errors:
    ``ValueError`` for an array of the wrong dtype or size, or too many tensors."""
    if len(tensors) > SAMPLED_TENSORS_MAX:
        raise ValueError(f"a scale is looked for in {SAMPLED_TENSORS_MAX} tensors at most, not in {len(tensors)}")
    check("found", found, np.uint8, FOUND_NBYTES)
    sampled = np.zeros(1, SAMPLED)
    for index, each in enumerate(tensors):
        check("values", each, np.float32)
        if each.size:
            sampled["values"][0, index] = address_of(each)
            sampled["sizes"][0, index] = each.size
    module.launch("patterns", "find_scale", 1, CANDIDATES, (sampled, found), stream)


def narrow_found_into(values: DeviceArray, found: DeviceArray, out: DeviceArray, *, stream: Stream) -> None:
    """The reference's ``narrow_scaled_into`` to bf16, by the scale that :func:`find_scale` has found. If not every
    value is given back, the number behind the scale is not zero any more. Errors: ``ValueError`` for an array of the
    wrong dtype or size."""
    check("values", values, np.float32)
    check("found", found, np.uint8, FOUND_NBYTES)
    check("out", out, np.uint16, values.size)
    launch("narrow_found", values.size, (values, np.uint64(values.size), found, out), stream)


def widen_scaled_into(halves: DeviceArray, scale: float, out: DeviceArray, *, stream: Stream) -> None:
    """Write the reference's ``widen_scaled``. Errors: as :func:`narrow_scaled_into`."""
    check_scale(scale)
    check("out", out, np.float32, halves.size)
    kernel = f"widen_scaled_{kind_of(halves, out.size)}"
    launch(kernel, halves.size, (halves, np.uint64(halves.size), np.float32(scale), out), stream)


def kind_of(halves: DeviceArray, size: int) -> str:
    """What fp16 numbers, or bf16 patterns as uint16, are. Errors: ``ValueError`` for an array of another dtype or
    size."""
    fp16 = halves.dtype == np.float16
    check("halves", halves, np.float16 if fp16 else np.uint16, size)
    return "float16" if fp16 else "bfloat16"


def split_exponents(patterns: DeviceArray, exponents: DeviceArray, rest: DeviceArray, *, stream: Stream) -> None:
    """The reference's ``split_exponents``. Errors: ``ValueError`` for an array of the wrong dtype or size."""
    width = check_planes(patterns, exponents, rest)
    arguments = (patterns, np.uint64(patterns.size), exponents, rest)
    launch(f"split_exponents_{width}", patterns.size, arguments, stream)


def join_exponents(exponents: DeviceArray, rest: DeviceArray, patterns: DeviceArray, *, stream: Stream) -> None:
    """The reference's ``join_exponents``. Errors: ``ValueError`` for an array of the wrong dtype or size."""
    width = check_planes(patterns, exponents, rest)
    arguments = (exponents, rest, np.uint64(patterns.size), patterns)
    launch(f"join_exponents_{width}", patterns.size, arguments, stream)


def check_planes(patterns: DeviceArray, exponents: DeviceArray, rest: DeviceArray) -> int:
    """The bits of a pattern, 16 or 32. Errors: ``ValueError`` for an array of the wrong dtype or size."""
    if patterns.dtype not in (np.uint16, np.uint32):
        raise ValueError(f"patterns are uint16 or uint32, not {patterns.dtype}")
    check("patterns", patterns, patterns.dtype)
    check("exponents", exponents, np.uint8, patterns.size)
    check("rest", rest, np.uint8, patterns.size * (patterns.dtype.itemsize - 1))
    return int(patterns.dtype.itemsize) * 8


def launch(kernel: str, size: int, arguments: tuple[object, ...], stream: Stream) -> None:
    module.launch("patterns", kernel, grid_for(size, THREADS), THREADS, arguments, stream)
