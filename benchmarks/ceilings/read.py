"""The fastest read of an fp32 array that a compiled loop on so many threads makes.

A sum, an exclusive or, or a sum of four places at a time, which the processor fetches ahead of one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.threads import run, split

__all__ = ["Read"]

CALIBRATIONS = 3


@numba.njit(nogil=True, cache=True, fastmath=True)
def total(values: NDArray[np.float32]) -> np.float32:
    """Reassociated, so that it runs in vectors with several accumulators."""
    found = np.float32(0)
    for i in range(values.size):
        found += values[i]
    return found


@numba.njit(nogil=True, cache=True)
def parity(values: NDArray[np.float32]) -> np.uint32:
    """Of the patterns; integers may be reassociated anyway."""
    bits = values.view(np.uint32)
    found = np.uint32(0)
    for i in range(bits.size):
        found ^= bits[i]
    return found


@numba.njit(nogil=True, cache=True, fastmath=True)
def total_of_quarters(values: NDArray[np.float32]) -> np.float32:
    quarter = values.size // 4
    a, b = values[:quarter], values[quarter : 2 * quarter]
    c, d = values[2 * quarter : 3 * quarter], values[3 * quarter : 4 * quarter]
    found = np.float32(0)
    for i in range(quarter):
        found += (a[i] + b[i]) + (c[i] + d[i])
    for i in range(4 * quarter, values.size):
        found += values[i]
    return found


Kernel = Callable[[NDArray[np.float32]], object]

KERNELS: dict[str, Kernel] = {"sum": total, "exclusive or": parity, "sum of quarters": total_of_quarters}


class Read:
    """Reads ``values`` once, in a contiguous piece a thread."""

    def __init__(self, values: NDArray[np.float32], threads: int) -> None:
        self._values = values
        self._pieces = split(values.size, threads)
        self.kernel: Kernel = total
        self.shape = "sum"
        """Which loop it is."""

    def calibrate(self) -> None:
        """Choose the fastest of the loops."""
        found: dict[str, float] = {}
        for name, self.kernel in KERNELS.items():
            self()  # compiles
            seconds = []
            for _ in range(CALIBRATIONS):
                begun = time.perf_counter()
                self()
                seconds.append(time.perf_counter() - begun)
            found[name] = min(seconds)
        self.shape = min(found, key=lambda name: found[name])
        self.kernel = KERNELS[self.shape]

    def __call__(self) -> None:
        run(lambda piece: self.kernel(self._values[piece]), self._pieces)
