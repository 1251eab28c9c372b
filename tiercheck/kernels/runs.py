"""Runs of steps without a gradient, in closed form.

An element has a gradient in step a, and none from then until step b. (a = 0 stands for the moments before step 1.) The
steps a to b are a *run*. In step j of the run (a <= j <= b), Adam's moments are those of step a, multiplied by the
betas of the steps since. The step moves the parameter by ``w_j * m_a / (s + x_j)`` with

    ``s = sqrt(v_a)``,  ``t_j = sqrt(B2) / root_correction_j``,
    ``w_j = step_size_j * B1 / t_j``,  ``x_j = eps_j / t_j``

with B1 and B2 the products of the betas since a. Weight decay in the later steps scales a movement; its factor is
taken into ``w_j``. The sum of ``w_j / (s + x_j)`` over the run is approximated by two fractions:

    ``param_b = D * param - m_a * (K1 / (s + X1) + K2 / (s + X2))``

D is the product of the decay factors. The nodes X and the weights K are those of the Gauss quadrature for the weights
``w_j`` at the points ``x_j``: the sum of the weights and the first three moments agree. The error of the sum is at most
the weighted mean square of ``(x - X1)(x - X2)``, times ``1 / (s + min x)^5``. The run's movement is at least
``1 / (s + mean x)``, per weight. So the relative error is at most

    ``E (mean x / min x) / (s + min x)^4``,  E the weighted mean of ``(x - X1)^2 (x - X2)^2``.

It is 0 for runs of one or two steps, and if eps is 0. An element whose bound exceeds :data:`TOLERANCE`, since its root
is near eps or below, takes the exact steps instead.

Source: Golub and Welsch, *Calculation of Gauss quadrature rules* (Mathematics of Computation 23, 1969), for two nodes.

The result is rounded to fp32 once a run, not once a step, and in another order. It does not have the optimizer's bits:
such a replay is used only if the user asks for it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients

__all__ = ["RUN", "RUN_MAX", "TOLERANCE", "has_closed_form", "runs_of"]

RUN_MAX = 64
"""The most steps for which one table of runs is made."""

TOLERANCE = 2.0**-19
"""The largest error of the closed form, rounding aside, relative to the run's movement."""

SPREAD_MIN = 1e-13
"""If the variance of the points is a smaller share of their squared mean, they count as one point: fp64 cannot tell
them apart."""

RUN = np.dtype(
    [(name, np.float32) for name in ("beta1", "beta2", "decay", "weight1", "point1", "weight2", "point2", "least")],
    align=True,
)
"""A run's scalars: ``decay`` is D, ``weight`` and ``point`` are K and X. An element whose second moment is below
``least`` takes the exact steps."""

Doubles = NDArray[np.float64]


def has_closed_form(step: AdamStep) -> bool:
    """Whether a step without a gradient depends on the moments alone: it has neither L2 decay nor amsgrad's maximum."""
    return not step.coupled and not step.amsgrad


@lru_cache(maxsize=16)
def runs_of(steps: tuple[AdamStep, ...]) -> NDArray[np.void]:
    """The scalars of every run of these steps: an array of :data:`RUN`, of shape (n + 1, n + 1) for n steps.

    Row b and column a hold the run of steps a to b; column 0 holds that of steps 1 to b. Entries with a > b are zero.
    The result is read-only and cached, since every tensor takes the same steps.
    """
    size = len(steps) + 1
    runs = np.zeros((size, size), RUN)
    beta1, beta2, decay = np.ones(size), np.ones(size), np.ones(size)
    sums = np.zeros((5, size))  # of weight * point**k for k = 0 to 4
    smallest, sound = np.full(size, np.inf), np.full(size, True)
    for b in range(size):
        begun = slice(0, b + 1)  # the runs that have begun; the last one begins with this step
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
    """Write the two fractions of each run, and ``least``, from the sums. A run that is not ``sound`` has ``least``
    infinity: every element takes the exact steps."""
    total = sums[0]
    with np.errstate(all="ignore"):
        mean, power2, power3, power4 = sums[1:] / total
        variance = power2 - mean**2
        third = power3 - 3 * mean * power2 + 2 * mean**3
        fourth = power4 - 4 * mean * power3 + 6 * mean**2 * power2 - 3 * mean**4
        spread = variance > SPREAD_MIN * mean**2
        slant = np.where(spread, third / variance, 0)
        width = np.where(spread, np.sqrt(slant**2 + 4 * variance), 1)
        below, above = (slant - width) / 2, (slant + width) / 2  # the nodes, less the mean
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
