"""Writing survivors into a dense array, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_pairs", "scatter", "scatter_add", "settle"]


def scatter(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write ``values`` to ``out`` at ``indices``, and zero to all other elements of ``out``. Of equal indices the last
    counts. ``indices`` are uint32, ``values`` (one for each index) and ``out`` fp32.

    Errors: ``IndexError`` for an index beyond ``out``; ``ValueError`` for other sizes or dtypes, or an ``out`` that is
    read-only. Nothing was written then.
    """
    check_pairs(indices, out, values)
    out[:] = 0
    out[indices] = values


def scatter_add(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Add ``values`` to ``out`` at ``indices``, in their order: one fp32 addition each. Errors: as :func:`scatter`."""
    check_pairs(indices, out, values)
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(out, indices, values)


def settle(
    residual: NDArray[np.float32],
    indices: NDArray[np.uint32],
    survivors: NDArray[np.float32],
    decoded: NDArray[np.float32],
) -> None:
    """Error feedback after a compaction: ``residual[indices] = survivors - decoded``, or 0 if that is not finite.

    ``decoded`` are the values to which the stored survivors decode. All are fp32. Errors: as :func:`scatter`.
    """
    check_pairs(indices, residual, survivors, decoded)
    with np.errstate(invalid="ignore", over="ignore"):
        lost = survivors - decoded
    residual[indices] = np.where(np.isfinite(lost), lost, np.float32(0))


def check_pairs(indices: NDArray[np.uint32], target: NDArray[np.float32], *values: NDArray[np.float32]) -> None:
    """Errors: ``IndexError`` for an index beyond ``target``, ``ValueError`` for other sizes or dtypes."""
    if indices.dtype != np.uint32 or any(each.dtype != np.float32 for each in (target, *values)):
        raise ValueError("indices are uint32, and all values float32")
    if any(each.size != indices.size for each in values):
        raise ValueError(f"{indices.size} indices need one value each, not {[each.size for each in values]}")
    if not target.flags.writeable:
        raise ValueError("the array to write to is read-only")
    largest = int(np.maximum.reduce(indices, initial=0))
    if indices.size and largest >= target.size:
        raise IndexError(f"the index {largest} is beyond an array of {target.size} elements")
