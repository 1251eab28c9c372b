"""The fused multiply-add of fp64, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, multiply_add_wide

__all__ = ["fused"]


@compiled
def fused(a: NDArray[np.float64], b: float, c: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.empty_like(a)
    for i in range(a.size):
        out[i] = multiply_add_wide(a[i], b, c[i])
    return out
