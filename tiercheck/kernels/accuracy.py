"""How far a replay that is not exact may be off, and a self-test of it against the exact one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gradients import SparseGradient
from tiercheck.kernels.reference.adam import replay_fused_adam

__all__ = ["ERROR_MAX", "movement_error"]

ERROR_MAX = 2e-5
"""Distance from the exact replay's parameters, relative to the distance these moved (Euclidean norms).

Of the arithmetic. Where steps are so small that parameters hardly move by units in their last place, rounding alone
puts any two orders of operations further apart, and the exact replay as far from the real numbers."""


@cache
def movement_error(replay: Callable[..., None]) -> float:
    """The error of a sparse replay of Adam: the largest of small problems, roots far from eps, near and below."""
    errors = []
    for beta2, scale in ((0.999, 1e-3), (0.95, 1e-7), (0.95, 1e-9)):
        generator = np.random.default_rng(7)
        size, warm, count = 500, 3, 12
        steps = [
            AdamStep(step, 1e-3 * (1 + 1 / step), beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.1, decoupled=True)
            for step in range(1, warm + count + 1)
        ]
        dense = [generator.standard_normal(size, dtype=np.float32) * np.float32(scale) for _ in range(warm)]
        sparse = []
        for _ in range(count):
            kept = np.flatnonzero(generator.random(size) < 0.05).astype(np.uint32)
            sparse.append(
                SparseGradient(kept, generator.standard_normal(kept.size, dtype=np.float32) * np.float32(scale))
            )
        p = generator.standard_normal(size, dtype=np.float32) * np.float32(0.02)
        m, v = np.zeros((2, size), np.float32)
        replay_fused_adam(p, m, v, dense, steps[:warm], contracted=True)
        exact, actual = p.copy(), p.copy()
        replay_fused_adam(exact, m.copy(), v.copy(), sparse, steps[warm:], contracted=True)
        replay(actual, m.copy(), v.copy(), sparse, steps[warm:])
        error, moved = (np.linalg.norm(exact.astype(np.float64) - each) for each in (actual, p))
        errors.append(float(error / moved))
    return max(errors)
