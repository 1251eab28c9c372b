"""Weighted sums of tensors, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.bfloat16 import check_pair, widen

__all__ = ["accumulate", "check_weight"]


def accumulate(
    values: NDArray[np.float32] | NDArray[np.uint16], weight: float, total: NDArray[np.float32], *, threads: int = 1
) -> None:
    """Add ``weight * values`` to ``total``, in place. ``values``: fp32, or bf16 patterns (uint16).

    The weight is rounded to fp32, then each product, then each sum; nothing is fused. A weighted sum of any number of
    tensors is one call for each, in a fixed order, from a ``total`` of zeros.

    Errors: ``ValueError`` if ``total`` has another size, or if fp32 cannot hold the weight as a finite number.
    """
    check_weight(weight)
    check_pair(total, values)
    wide = widen(values.view(np.uint16)) if values.dtype == np.uint16 else values
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        total += np.float32(weight) * wide


def check_weight(weight: float) -> None:
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(weight)):
            raise ValueError(f"a weight must be a finite fp32 number, not {weight}")
