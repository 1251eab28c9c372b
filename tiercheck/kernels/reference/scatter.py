"""From survivors back to a dense array, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_pairs", "scatter", "scatter_add", "settle"]


def scatter(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out`` (fp32) is zero but for ``out[indices] = values``; of equal indices the last counts.

    Errors: ``IndexError`` for an index beyond ``out``, ``ValueError`` for other sizes or dtypes; nothing was written.
    """
    check_pairs(indices, out, values)
    out[:] = 0
    out[indices] = values


def scatter_add(indices: NDArray[np.uint32], values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out[indices] += values``, each in its turn. Errors: as :func:`scatter`."""
    check_pairs(indices, out, values)
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(out, indices, values)


def settle(
    residual: NDArray[np.float32],
    indices: NDArray[np.uint32],
    survivors: NDArray[np.float32],
    decoded: NDArray[np.float32],
) -> None:
    """Error feedback after a compaction: ``residual[indices] = survivors - decoded``, 0 where that is not finite.

    ``decoded`` is what the stored survivors will come back as. Errors: as :func:`scatter`.
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
