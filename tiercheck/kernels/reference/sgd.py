"""SGD in NumPy, with the rounding of torch's CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.gradients import Gradient, dense
from tiercheck.kernels.reference.adam import VECTOR, fma, multiply_then_add
from tiercheck.kernels.sgd import SgdCoefficients, SgdStep

__all__ = ["replay_sgd"]


def replay_sgd(
    param: NDArray[np.float32],
    momentum_buffer: NDArray[np.float32] | None,
    gradients: Sequence[Gradient],
    steps: Sequence[SgdStep],
    *,
    fused: bool,
    contracted: bool,
) -> None:
    """Apply the steps in order, in place.

    All arrays are fp32, 1-D, contiguous, and of one size; there is one gradient for each step. ``momentum_buffer`` is
    ``None`` for steps without momentum. Nothing is checked.

    ``contracted``: each ``a + alpha * b`` of torch is one fma (its vector code with AVX2 and AVX-512). The buffer
    becomes ``fma(g, 1 - dampening, buffer * momentum)``. In the last ``size % 8`` elements of the ``fused`` kernel,
    which is compiled as one expression, it becomes ``fma(buffer, momentum, g * (1 - dampening))``.

    Source: the documentation of ``torch.optim.SGD``, for the formula.
    """
    multiply_add = fma if contracted else multiply_then_add
    vectors = param.size - param.size % VECTOR if fused and contracted else param.size
    for gradient, step in zip(gradients, steps, strict=True):
        c = SgdCoefficients.of(step)
        g = dense(gradient, param.size)
        with np.errstate(all="ignore"):
            if c.multiplier != 1:
                g = g * c.multiplier
            if step.weight_decay:
                g = multiply_add(param, c.decay, g)
            if step.momentum and momentum_buffer is not None:
                if step.first:
                    momentum_buffer[:] = g
                else:
                    body, last = momentum_buffer[:vectors], momentum_buffer[vectors:]
                    body[:] = multiply_add(g[:vectors], c.weight, body * c.momentum)
                    last[:] = fma(last, c.momentum, g[vectors:] * c.weight)
                g = multiply_add(momentum_buffer, c.momentum, g) if step.nesterov else momentum_buffer
            param[:] = multiply_add(g, c.negative_lr, param)
