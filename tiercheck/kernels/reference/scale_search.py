"""The scale of bf16 gradients, looked for where they are: on a GPU, without the host waiting.

A product of a bf16 number and the scale leaves a few hundred of the 8 million significands that the scale may have
(:mod:`tiercheck.streams.gradients.scales` says why). Those that one product leaves are compared with all the other
products of a sample. What is found is a guess, as there: whoever narrows by it compares every product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["CANDIDATES", "FOUND_NBYTES", "SAMPLED_TENSORS_MAX", "SAMPLES", "find_scale", "significands_of"]

FOUND_NBYTES = 8
"""What a GPU writes: the scale (fp32), and whether some value is not given back by it (uint32)."""
SAMPLED_TENSORS_MAX = 4
SAMPLES = 128
"""Of each tensor, evenly spaced."""
LEAST, END = 1 << 23, 1 << 24
"""Of the significands of normal numbers."""
CANDIDATES = 2 * 128 * 3
"""For each of two shifts, each bf16 significand, and three neighbours."""


def find_scale(tensors: Sequence[NDArray[np.float32]]) -> float:
    """The scale of contiguous fp32 tensors (1-D), :data:`SAMPLED_TENSORS_MAX` at most: the least significand that all
    sampled products have in common, as a number from 0.5 to 1. 1.0 if there is none, if none is needed, or if there
    is no product to look at: zeros, infinities and NaNs are none."""
    significands = np.concatenate([significands_of(each) for each in tensors] or [np.zeros(0, np.int64)])
    significands = significands[significands > 0]
    if not significands.size:
        return 1.0
    common = candidates_of(int(significands[0]))
    for product in np.unique(significands):
        common = common[may_scale(common, int(product))]
    if not common.size or common.min() == LEAST:
        return 1.0
    return float(common.min()) * 2.0**-24


def significands_of(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Of the sampled elements: integers of 24 bits; 0 for what is no normal number."""
    patterns = values[:: max(1, values.size // SAMPLES)][:SAMPLES].view(np.uint32) & np.uint32(0x7FFFFFFF)
    normal = (patterns >= 0x00800000) & (patterns < 0x7F800000)
    return np.where(normal, (patterns & np.uint32(LEAST - 1)) | np.uint32(LEAST), 0).astype(np.int64)


def candidates_of(product: int) -> NDArray[np.int64]:
    """Significands that scales may have which give this product: some, among them all that are right."""
    m = np.arange(128, 256, dtype=np.int64)
    found = []
    for shift in (7, 8):
        least = -(-((product << shift) - (1 << (shift - 1))) // m)
        found += [least + more for more in range(3)]
    every = np.concatenate(found)
    every = every[(every >= LEAST) & (every < END)]
    return every[may_scale(every, product)]


def may_scale(scales: NDArray[np.int64], product: int) -> NDArray[np.bool_]:
    """For which of these significands some bf16 number times the scale, rounded to 24 bits, is the product, but for a
    power of two."""
    fits = np.zeros(scales.shape, np.bool_)
    for shift in (7, 8):
        target = product << shift
        m = (2 * target + scales) // (2 * scales)  # the nearest
        fits |= (m >= 128) & (m <= 255) & (np.abs(m * scales - target) <= 1 << (shift - 1))
    return fits
