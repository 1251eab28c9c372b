"""Finds the *scale* of half-precision gradients: the one number that clipping or unscaling multiplied them by.

No framework is asked for it: the scale is found in the products. A product P is a half-precision number ``m * 2**e``
times the scale S, rounded to fp32; m has 8 (bf16) or 11 (fp16) significant bits. For each m only a few S give P, up to
powers of two. So P leaves some hundred or thousand of the 8 million significands that S may have. Those that several
products have in common are the scale, or give the same products as the scale. This is a guess: it is used for a tensor
only after every one of its products was compared (:func:`kernels.are_scaled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.ma  # np.unique would import it in a step, and training might wait for a disk's folders
from numpy.typing import NDArray

from tiercheck.kernels.reference.gathering import words_at
from tiercheck.kernels.reference.scaled import SCALE_MAX, SCALE_MIN

__all__ = ["Scale", "Scales", "candidates", "scale_of"]

HALVES = (("BF16", 8), ("F16", 11))
"""The half-precision dtypes, with their significant bits."""
SIGNIFICAND = 1 << 23
"""The smallest significand of a normal fp32 number, as an integer of 24 bits. The largest is twice this, less 1."""
LOOKED_AT = 256
"""How many products of a tensor are sampled, evenly spaced."""
COMPARED_MIN, COMPARED_MAX = 6, 32
"""How many different significands of products are compared. After ``COMPARED_MIN`` of them the search ends as soon as
one scale is left; with fewer, products that have no scale would often have one in common by chance."""
TENSORS = 4
"""How many tensors are searched, the largest ones first."""
WAIT_MAX = 16
"""The most steps that are not searched after searches without a result."""


@dataclass(frozen=True)
class Scale:
    """``dtype``: ``BF16`` or ``F16``, the dtype of the numbers before the multiplication. ``value``: an fp32 number."""

    dtype: str
    value: float

    @property
    def fp16(self) -> bool:
        return self.dtype == "F16"

    @property
    def pattern(self) -> int:
        """The bits of the fp32 value. A record holds them."""
        return int(np.float32(self.value).view(np.uint32))


class Scales:
    """Finds the scale of each step of one rank. One thread uses it."""

    def __init__(self) -> None:
        self._misses = 0
        self._wait = 0

    def find(self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> Scale | None:
        """The scale of contiguous fp32 tensors in host memory. ``sizes``: in elements. ``None`` if there is none, or if
        this step is not searched because there was none lately."""
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
    """The scale that products (1-D) may have; ``None`` if there is none. A sample of them is searched. ``largest``:
    gives the largest magnitude of all products of that scale; by default that of these products."""
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
            value = common * 2.0**-24  # any power of two will do: bf16 has the range of fp32
            if dtype == "F16":
                value *= 2.0 ** (fitting_exponent(value, largest() if largest else magnitude_of(products)))
            return Scale(dtype, value) if SCALE_MIN <= value <= SCALE_MAX else None
    return None


def in_common(significands: Iterable[int], precision: int) -> int | None:
    """The significand of a scale that all products with these significands may have, if their numbers have
    ``precision`` significant bits; ``None`` if there is none."""
    common: NDArray[np.int64] | None = None
    for compared, each in enumerate(significands, start=1):
        found = candidates(each, precision)
        common = found if common is None else np.intersect1d(common, found, assume_unique=True)
        if not common.size or (common.size == 1 and compared >= COMPARED_MIN):
            break
    return int(common[0]) if common is not None and common.size else None


def candidates(product: int, precision: int) -> NDArray[np.int64]:
    """The significands S of the scales that may give this product, ascending, from 2**23 to 2**24 - 1. For each of them
    there is an m of exactly ``precision`` bits such that m * S, rounded to 24 bits, is ``product`` times a power of
    two."""
    m = np.arange(1 << (precision - 1), 1 << precision, dtype=np.int64)
    found = []
    for shift in (precision - 1, precision):
        # Rounding moved m * S by half a unit at most: |m * S - (product << shift)| <= 1 << (shift - 1). This also holds
        # for a product that was rounded up to a power of two: the units below it are smaller.
        half = 1 << (shift - 1)
        least = -(-((product << shift) - half) // m)
        most = ((product << shift) + half) // m
        for more in range(3):
            scale = least + more
            found.append(scale[scale <= most])
    every = np.unique(np.concatenate(found))
    return every[(every >= SIGNIFICAND) & (every < 2 * SIGNIFICAND)]


def fitting_exponent(scale: float, largest: float) -> int:
    """The e for which the largest number (product / (scale * 2**e)) lies from 2**15 to 2**16, the top of fp16's range.
    So no number has bits that are too small for fp16."""
    # The factor undoes rounding: a power of two that came out slightly smaller counts as that power again.
    return int(np.frexp(largest / scale * (1 + 2.0**-20))[1]) - 16 if np.isfinite(largest) else 0
