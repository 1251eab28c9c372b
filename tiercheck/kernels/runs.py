"""Runs of steps without a gradient, in closed form.

An element's moments get a gradient in step a (or are what they were before step 1: a = 0), and none reaches them again
until after step b. Step j of the run (a <= j <= b) finds them multiplied by the betas j - a times, and moves the
parameter by ``w_j * m_a / (sqrt(v_a) + x_j)``, where, with ``B1`` and ``B2`` the products of the betas since a,
``t_j = sqrt(B2) / root_correction_j``, ``w_j = step_size_j * B1 / t_j`` and ``x_j = eps_j / t_j``. With the decay that
each movement still meets taken into the weights, what moves the parameter is a sum of ``w_j / (s + x_j)``,
``s = sqrt(v_a)``, for which two fractions stand:

    ``param_b = D * param - m_a * (K1 / (s + X1) + K2 / (s + X2))``

The nodes X and the weights K are those of Gauss' quadrature with the weights ``w_j`` at the points ``x_j``: they have
the sum of the weights and the first three moments of the points. Its error is the integral of ``(x - X1)^2 (x - X2)^2``
times at most ``1 / (s + min x_j)^5``; relative to the run's movement, which is at least ``1 / (s + mean x)``, at most

    ``E (mean x / min x) / (s + min x_j)^4``,  E the integral's share of the weights.

It is 0 in runs of one or two steps, and where eps is. Elements of which it may be more than :data:`TOLERANCE` are left
to the exact steps: those whose root is near eps or below.

Source: Golub and Welsch, *Calculation of Gauss quadrature rules* (Mathematics of Computation 23, 1969), for two nodes.

Everything is rounded to fp32 once a run instead of once a step, in another order, so that the result is not the
optimizer's bit for bit: an explicit choice.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients

__all__ = ["RUN", "RUN_MAX", "TOLERANCE", "has_closed_form", "runs_of"]

RUN_MAX = 64
"""Steps whose runs are tabled together."""

TOLERANCE = 2.0**-19
"""The largest error of a run that is not from rounding, relative to the movement in it."""

SPREAD_MIN = 1e-13
"""Points whose variance is a smaller share of their squared mean are one point: double precision sees no more."""

RUN = np.dtype(
    [(name, np.float32) for name in ("beta1", "beta2", "decay", "weight1", "point1", "weight2", "point2", "least")],
    align=True,
)
"""A run's scalars: ``D`` is ``decay``, ``K`` and ``X`` are ``weight`` and ``point``; under ``least``, a second moment
takes the exact steps."""

Doubles = NDArray[np.float64]


def has_closed_form(step: AdamStep) -> bool:
    """Whether a step without a gradient needs nothing but the moments: neither L2 decay nor a running maximum."""
    return not step.coupled and not step.amsgrad


@lru_cache(maxsize=16)
def runs_of(steps: tuple[AdamStep, ...]) -> NDArray[np.void]:
    """The scalars of every run, a record of :data:`RUN` each: ``[b, a]`` for steps a to b, or 1 to b where a is 0.

    Read-only, and kept: tensor after tensor takes the same steps.
    """
    size = len(steps) + 1
    runs = np.zeros((size, size), RUN)
    beta1, beta2, decay = np.ones(size), np.ones(size), np.ones(size)
    sums = np.zeros((5, size))  # of the weights, times the points to the powers 0 to 4
    smallest, sound = np.full(size, np.inf), np.full(size, True)
    for b in range(size):
        begun = slice(0, b + 1)  # the runs that have begun; the last of them with this step
        if b > 0:
            c = Coefficients.of(steps[b - 1])
            kept = float(c.decay) if c.decays else 1.0
            beta1[:b] *= 1 - np.float64(c.weight1)
            beta2[:b] *= np.float64(c.beta2)
            decay[begun] *= kept
            with np.errstate(all="ignore"):
                unit = np.sqrt(beta2[begun]) / np.float64(c.root_correction)
                weight, x = -np.float64(c.negative_step_size) * beta1[begun] / unit, np.float64(c.eps) / unit
                sums[:, begun] = sums[:, begun] * kept + weight * x ** np.arange(5)[:, None]
            smallest[begun] = np.minimum(smallest[begun], x)
            sound[begun] &= (kept > 0) & (weight >= 0)
        row = runs[b, begun]
        row["beta1"], row["beta2"], row["decay"] = beta1[begun], beta2[begun], decay[begun]
        fill_fractions(row, sums[:, begun], smallest[begun], sound[begun])
    runs.flags.writeable = False
    return runs


def fill_fractions(row: NDArray[np.void], sums: Doubles, smallest: Doubles, sound: NDArray[np.bool_]) -> None:
    """The two fractions from the weights' sums, and from where on they are good enough; where not ``sound``: never."""
    total = sums[0]
    with np.errstate(all="ignore"):
        mean, power2, power3, power4 = sums[1:] / total
        variance = power2 - mean**2
        third = power3 - 3 * mean * power2 + 2 * mean**3
        fourth = power4 - 4 * mean * power3 + 6 * mean**2 * power2 - 3 * mean**4
        spread = variance > SPREAD_MIN * mean**2
        slant = np.where(spread, third / variance, 0)
        width = np.where(spread, np.sqrt(slant**2 + 4 * variance), 1)
        below, above = (slant - width) / 2, (slant + width) / 2  # the nodes, as seen from the mean
        error = np.where(spread, np.maximum(fourth - slant * third - variance**2, 0), 0)
        root = np.where(error > 0, (error * mean / (smallest * TOLERANCE)) ** 0.25 - smallest, 0)
        weight1 = np.where(spread, total * above / width, total)
        point1, point2 = np.where(spread, mean + below, mean), np.where(spread, mean + above, mean)
    still = total == 0  # no step, or a learning rate of 0
    usable = still | (sound & np.isfinite(total + point1 + point2 + root) & (point1 >= 0))
    moves = usable & ~still
    row["weight1"], row["point1"] = np.where(moves, weight1, 0), np.where(moves, point1, 1)
    row["weight2"], row["point2"] = np.where(moves & spread, total - weight1, 0), np.where(moves, point2, 1)
    row["least"] = np.where(usable, np.where(moves, np.maximum(root, 0) ** 2, 0), np.inf)
