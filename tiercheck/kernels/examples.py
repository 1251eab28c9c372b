"""Arrays for the examples of kernels' calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bytes_of", "floats_of", "with_and_without_residual"]


def floats_of(size: int, seed: int) -> NDArray[np.float32]:
    """Values of many magnitudes. The first three are zero, infinity and NaN."""
    generator = np.random.default_rng([size, seed])
    values = (generator.standard_normal(size) * 10.0 ** generator.integers(-30, 30)).astype(np.float32)
    values[:3] = [0, np.inf, np.nan][: values[:3].size]
    return values


def bytes_of(size: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng([size, seed]).integers(0, 256, size, dtype=np.uint8)


def with_and_without_residual(size: int, seed: int) -> Iterator[dict[str, Any]]:
    yield {}
    yield {"residual": floats_of(size, seed + 1)}
