"""Gradients in half precision as the fp32 arrays that kernels take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.catalogue import widen, widen_scaled
from tiercheck.kernels.gradients import HalfGradient

__all__ = ["widened"]


def widened(gradient: HalfGradient, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The gradient's elements, in ``out``, or as a new array. Errors: ``ValueError`` for a scale that is none, and if
    ``out`` has another size."""
    if gradient.scale is None:
        return widen(gradient.halves.view(np.uint16), out)
    return widen_scaled(gradient.halves, gradient.scale, out)
