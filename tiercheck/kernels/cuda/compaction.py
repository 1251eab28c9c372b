"""Compaction on the device: the elements of largest magnitude (survivors), as fp16 and back into a dense array.

The bits are those of :mod:`tiercheck.kernels.reference`, with these differences: the caller allocates all arrays; a
threshold, a count and an exponent stay on the device, in arrays of one element, so that the host need not wait; and a
function that takes ``count`` works on the first ``min(count, size)`` elements. Every function puts its work into
``stream`` and returns.
"""

from __future__ import annotations

import numpy as np

from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.module import NAMES, DeviceArray, Stream, check, check_values, grid_for
from tiercheck.kernels.reference.compaction import ELEMENTS_MAX, SAMPLES, check_ratio, sample_keys, wanted_of

__all__ = [
    "compact_into",
    "compact_workspace",
    "from_half",
    "keep_largest",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "to_half",
]

TILE = 4096
"""Elements of a block of threads. The CUDA source has the same number."""

THREADS = 256

SELECTING_THREADS = 1024


def compact_workspace(size: int) -> int:
    """The uint64 elements of workspace that :func:`compact_into` needs for ``size`` values."""
    return 1 + tiles_of(size)


def compact_into(
    values: DeviceArray,
    threshold: DeviceArray,
    indices: DeviceArray,
    survivors: DeviceArray,
    count: DeviceArray,
    workspace: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """Write the indices (uint32, ascending) and values (fp32) of the elements whose magnitude reaches ``threshold``.

    ``values`` are fp32, fp16, or bf16 patterns (uint16), fewer than 2**32. ``threshold`` (fp32[1]) is not negative.
    ``count`` (uint32[1]) becomes the number of elements that reach it. If that is more than ``indices`` and
    ``survivors`` hold, they hold the first ones, and nothing is written beyond: call :func:`keep_largest`. With
    ``residual`` (fp32, finite) the elements are ``values + residual``, and ``residual`` becomes that for all elements;
    then call :func:`settle`.
    ``workspace`` is uint64, of at least :func:`compact_workspace` elements. It is cleared here, and belongs to this
    call until the work is done.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check_indexable(values, residual)
    check("threshold", threshold, np.float32, 1)
    check("indices", indices, np.uint32)
    check("survivors", survivors, np.float32, indices.size)
    check("count", count, np.uint32, 1)
    tiles = tiles_of(values.size)
    arguments = (
        values,
        np.uint64(values.size),
        threshold,
        residual,
        indices,
        survivors,
        np.uint64(indices.size),
        count,
        *begin_scan(workspace, tiles, stream),
    )
    module.launch("compaction", f"compact_{NAMES[values.dtype]}", tiles, THREADS, arguments, stream)


def keep_largest(
    values: DeviceArray,
    indices: DeviceArray,
    survivors: DeviceArray,
    count: DeviceArray,
    nonfinite: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """If more elements reached the threshold of :func:`compact_into` than were wanted, choose the largest of all.

    All arguments are what that function was given, and has written. If ``count`` is more than ``indices`` hold, they
    and ``survivors`` get the elements of largest magnitude, as the reference's ``largest_of`` says, and ``count``
    becomes their number. An element that is not finite then leaves 0 in ``residual``, whether it was chosen or not.
    ``nonfinite`` (uint32[1]) becomes how many elements are not finite, if the threshold was infinity or less.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check_indexable(values, residual)
    check("indices", indices, np.uint32)
    check("survivors", survivors, np.float32, indices.size)
    check("count", count, np.uint32, 1)
    check("nonfinite", nonfinite, np.uint32, 1)
    room = np.uint64(indices.size)
    arguments = (values, np.uint64(values.size), residual, indices, survivors, room, count, nonfinite)
    module.launch("largest", f"keep_largest_{NAMES[values.dtype]}", 1, SELECTING_THREADS, arguments, stream)


def tiles_of(size: int) -> int:
    return max(1, -(-size // TILE))


def begin_scan(workspace: DeviceArray, tiles: int, stream: Stream) -> tuple[DeviceArray, DeviceArray]:
    """The ticket and the tiles' states of a scan, cleared, as views of a workspace of uint64."""
    check("workspace", workspace, np.uint64, least=1 + tiles)
    clear(workspace[: 1 + tiles].view(np.uint32), stream)
    return workspace[:1], workspace[1 : 1 + tiles]


def check_indexable(values: DeviceArray, residual: DeviceArray | None) -> None:
    check_values(values, residual)
    if values.size > ELEMENTS_MAX:
        raise ValueError(f"indices have 32 bits, and there are {values.size} elements: compact them in pieces")


def clear(words: DeviceArray, stream: Stream) -> None:
    """Write zeros to an array of 32-bit elements."""
    arguments = (words, np.uint64(words.size))
    module.launch("survivors", "clear", grid_for(words.size, THREADS), THREADS, arguments, stream)


def select_threshold(
    values: DeviceArray,
    ratio: float,
    seed: int,
    threshold: DeviceArray,
    workspace: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """Write the reference's ``select_threshold`` of ``values``, ``ratio`` and ``seed`` to ``threshold`` (fp32[1]).

    ``values`` as in :func:`compact_into`. ``workspace`` is uint32, one element for each sample:
    ``min(values.size, SAMPLES)``.

    Raises:
        ValueError: an array has the wrong dtype or size, or the ratio is not in (0, 1].
    """
    check_ratio(ratio)
    check_indexable(values, residual)
    check("threshold", threshold, np.float32, 1)
    samples = min(values.size, SAMPLES)
    check("workspace", workspace, np.uint32, least=samples)
    sampled = (values, np.uint64(values.size), residual, *sample_keys(seed), np.uint32(samples), workspace)
    kernel = f"sample_{NAMES[values.dtype]}"
    module.launch("threshold", kernel, grid_for(samples, THREADS), THREADS, sampled, stream)
    selected = (workspace, np.uint32(samples), np.uint32(max(1, wanted_of(samples, ratio))), threshold)
    module.launch("threshold", "select_magnitude", 1, SELECTING_THREADS, selected, stream)


def to_half(
    survivors: DeviceArray,
    halves: DeviceArray,
    exponent: DeviceArray,
    workspace: DeviceArray,
    *,
    count: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """Write ``survivors * 2**exponent`` to ``halves`` (fp16), with the ``exponent`` (int32[1], written) that brings the
    largest to [2**14, 2**15). ``workspace`` is uint32[1].

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check("survivors", survivors, np.float32)
    check("halves", halves, np.float16, survivors.size)
    check("exponent", exponent, np.int32, 1)
    check("workspace", workspace, np.uint32, least=1)
    capacity, grid = np.uint64(check_count(survivors, count)), grid_for(survivors.size, THREADS)
    clear(workspace[:1], stream)
    module.launch("survivors", "largest_finite", grid, THREADS, (survivors, count, capacity, workspace), stream)
    arguments = (survivors, count, capacity, workspace, halves, exponent)
    module.launch("survivors", "to_half", grid, THREADS, arguments, stream)


def from_half(
    halves: DeviceArray,
    exponent: DeviceArray,
    values: DeviceArray,
    *,
    count: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """Write the fp32 values of :func:`to_half`'s fp16 values.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check("halves", halves, np.float16)
    check("exponent", exponent, np.int32, 1)
    check("values", values, np.float32, halves.size)
    arguments = (halves, count, np.uint64(check_count(halves, count)), exponent, values)
    module.launch("survivors", "from_half", grid_for(halves.size, THREADS), THREADS, arguments, stream)


def settle(
    residual: DeviceArray,
    indices: DeviceArray,
    survivors: DeviceArray,
    decoded: DeviceArray,
    *,
    count: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """Error feedback: ``residual[indices] = survivors - decoded``, or 0 if that is not finite.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check("residual", residual, np.float32)
    check("indices", indices, np.uint32)
    check("survivors", survivors, np.float32, indices.size)
    check("decoded", decoded, np.float32, indices.size)
    capacity = np.uint64(check_count(indices, count))
    arguments = (residual, np.uint64(residual.size), indices, survivors, decoded, count, capacity)
    module.launch("survivors", "settle", grid_for(indices.size, THREADS), THREADS, arguments, stream)


def scatter(
    indices: DeviceArray, values: DeviceArray, out: DeviceArray, *, count: DeviceArray | None = None, stream: Stream
) -> None:
    """Write zeros to ``out`` (fp32), then ``values`` at ``indices``. For an index beyond ``out`` nothing is written.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check_scatter(indices, values, out)
    clear(out.view(np.uint32), stream)
    add_or_set("scatter", indices, values, out, count, stream)


def scatter_add(
    indices: DeviceArray, values: DeviceArray, out: DeviceArray, *, count: DeviceArray | None = None, stream: Stream
) -> None:
    """Add ``values`` to ``out`` (fp32) at ``indices``, each of which is there once. For an index beyond ``out`` nothing
    is written.

    Raises:
        ValueError: an array has the wrong dtype or size.
    """
    check_scatter(indices, values, out)
    add_or_set("scatter_add", indices, values, out, count, stream)


def add_or_set(
    kernel: str, indices: DeviceArray, values: DeviceArray, out: DeviceArray, count: DeviceArray | None, stream: Stream
) -> None:
    arguments = (indices, values, count, np.uint64(check_count(indices, count)), out, np.uint64(out.size))
    module.launch("survivors", kernel, grid_for(indices.size, THREADS), THREADS, arguments, stream)


def check_scatter(indices: DeviceArray, values: DeviceArray, out: DeviceArray) -> None:
    check("indices", indices, np.uint32)
    check("values", values, np.float32, indices.size)
    check("out", out, np.float32)


def check_count(elements: DeviceArray, count: DeviceArray | None) -> int:
    if count is not None:
        check("count", count, np.uint32, 1)
    return int(elements.size)
