"""The error that an approximate replay may have, and a self-test that measures it against the exact replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gradients import SparseGradient
from tiercheck.kernels.reference.adam import replay_fused_adam

__all__ = ["ERROR_MAX", "movement_error"]

ERROR_MAX = 2e-5
"""The largest allowed distance from the exact replay's parameters, relative to the distance that these moved
(Euclidean norms).

This bounds the error of the formula. If steps are so small that parameters move by a few units in the last place,
rounding is larger than that: it separates any two orders of operations, and the exact replay from real arithmetic."""


@cache
def movement_error(replay: Callable[..., None]) -> float:
    """The error of a sparse replay of Adam, as a share of the movement: the largest over three small problems, with
    roots of the second moment far above eps, near eps and below it.

    ``replay(param, exp_avg, exp_avg_sq, gradients, steps)`` works in place on 1-D fp32 arrays.
    """
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
