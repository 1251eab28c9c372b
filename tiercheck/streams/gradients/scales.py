"""The number that clipping or unscaling has multiplied half-precision gradients by, found in the products.

No framework is asked for it. A gradient of ``m * 2**e`` (m has the significant bits of half precision) times the scale
is rounded to fp32. So of each product there are few scales for each m, up to powers of two: some hundred of eight
million. The scales that several products have in common are the one that was used, and those that give the same
products. It is a guess, and believed of a tensor only when every product was compared (:func:`kernels.are_scaled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.reference.gathering import words_at
from tiercheck.kernels.reference.scaled import SCALE_MAX, SCALE_MIN

__all__ = ["Scale", "Scales", "candidates", "scale_of"]

HALVES = (("BF16", 8), ("F16", 11))
"""The significant bits of each."""
SIGNIFICAND = 1 << 23
"""Of fp32, whose significands are from here to twice this."""
LOOKED_AT = 256
"""Products of a tensor, some way apart."""
COMPARED_MIN, COMPARED_MAX = 6, 32
"""Products whose scales are compared, until one is left. Two of any numbers have one in common once in some tries."""
TENSORS = 4
"""Tensors, the largest ones."""
WAIT_MAX = 16
"""Steps that are left alone when no scale was found for long."""


@dataclass(frozen=True)
class Scale:
    """``dtype``: that of the numbers, ``BF16`` or ``F16``. ``value``: a number of fp32."""

    dtype: str
    value: float

    @property
    def fp16(self) -> bool:
        return self.dtype == "F16"

    @property
    def pattern(self) -> int:
        """Of fp32, which a record holds."""
        return int(np.float32(self.value).view(np.uint32))


class Scales:
    """Finds the scale of each step of one rank. One thread uses it."""

    def __init__(self) -> None:
        self._misses = 0
        self._wait = 0

    def find(self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> Scale | None:
        """Of contiguous fp32 tensors in host memory. ``None``: there is none, or there was none lately."""
        if self._wait:
            self._wait -= 1
            return None
        largest = np.argsort(sizes, kind="stable")[: -TENSORS - 1 : -1]
        for address, size in zip(addresses[largest].tolist(), sizes[largest].tolist(), strict=True):
            products = words_at(address, size).view(np.float32)
            if (found := scale_of(products, lambda: largest_of(addresses, sizes))) is not None:
                self._misses = 0
                return found
        self._wait = min(WAIT_MAX, (1 << self._misses) - 1)
        self._misses = min(self._misses + 1, WAIT_MAX)
        return None


def largest_of(addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> float:
    """The largest magnitude in contiguous fp32 tensors in host memory."""
    each = zip(addresses.tolist(), sizes.tolist(), strict=True)
    return max(magnitude_of(words_at(address, size).view(np.float32)) for address, size in each if size)


def magnitude_of(products: NDArray[np.float32]) -> float:
    return float(max(products.max(), -products.min()))


def scale_of(products: NDArray[np.float32], largest: Callable[[], float] | None = None) -> Scale | None:
    """The scale that products (1-D) may have. Some of them are looked at. ``largest``: the largest magnitude of all
    products that are to have it; without it, of these."""
    some = products[:: max(1, products.size // LOOKED_AT)][:LOOKED_AT]
    bits = some.view(np.uint32) & np.uint32(0x7FFFFFFF)
    bits = bits[(bits >= 0x00800000) & (bits < 0x7F800000)]
    significands = np.unique((bits & np.uint32(SIGNIFICAND - 1)) | np.uint32(SIGNIFICAND)).astype(np.int64)
    if not significands.size:
        return None
    compared = significands[:: max(1, significands.size // COMPARED_MAX)][:COMPARED_MAX]
    for dtype, precision in HALVES:
        common = in_common(compared.tolist(), precision)
        if common is not None:
            value = common * 2.0**-24  # bf16 has the range of fp32, so that any power of two will do
            if dtype == "F16":
                value *= 2.0 ** (fitting_exponent(value, largest() if largest else magnitude_of(products)))
            return Scale(dtype, value) if SCALE_MIN <= value <= SCALE_MAX else None
    return None


def in_common(significands: Iterable[int], precision: int) -> int | None:
    """A significand of a scale that all products of these significands may have, of numbers of so many bits."""
    common: NDArray[np.int64] | None = None
    for compared, each in enumerate(significands, start=1):
        found = candidates(each, precision)
        common = found if common is None else np.intersect1d(common, found, assume_unique=True)
        if not common.size or (common.size == 1 and compared >= COMPARED_MIN):
            break
    return int(common[0]) if common is not None and common.size else None


def candidates(product: int, precision: int) -> NDArray[np.int64]:
    """All S in 2**23 to 2**24 - 1, ascending, such that for an m of ``precision`` bits, the first of them set, m * S
    rounded to 24 bits is ``product`` times a power of two."""
    m = np.arange(1 << (precision - 1), 1 << precision, dtype=np.int64)
    found = []
    for shift in (precision - 1, precision):
        # |m * S - product << shift| is half a unit, 1 << (shift - 1), at most. A product that was rounded up to a power
        # of two is one of its units from the number before: the half of that is less.
        half = 1 << (shift - 1)
        least = -(-((product << shift) - half) // m)
        most = ((product << shift) + half) // m
        for more in range(3):
            scale = least + more
            found.append(scale[scale <= most])
    every = np.unique(np.concatenate(found))
    return every[(every >= SIGNIFICAND) & (every < 2 * SIGNIFICAND)]


def fitting_exponent(scale: float, largest: float) -> int:
    """The e for which the largest number of products by ``scale * 2**e`` is in 2**15 to 2**16, which fp16 ends with.
    Whatever the numbers were, no bit of them is too small for fp16 then."""
    # A number has 11 bits. What rounding has made of a power of two is that power again.
    return int(np.frexp(largest / scale * (1 + 2.0**-20))[1]) - 16 if np.isfinite(largest) else 0
