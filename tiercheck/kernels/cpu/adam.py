"""Adam and AdamW in Numba, with the bits of torch's fused CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.cpu.compiled import TILE, compiled, multiply_add, pointer_to_floats

__all__ = ["add_decay", "replay_fused_adam", "scalar_row", "update_moments", "update_parameter"]


def replay_fused_adam(
    param: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    gradients: Sequence[NDArray[np.float32]],
    steps: Sequence[AdamStep],
    *,
    contracted: bool,
) -> None:
    """As the reference: torch's fused CPU kernel, bit for bit."""
    scalars = np.array([scalar_row(Coefficients.of(step)) for step in steps], np.float32).reshape(len(steps), 8)
    coupled = np.array([step.weight_decay != 0 and not step.decoupled for step in steps], np.bool_)
    addresses = np.array([gradient.__array_interface__["data"][0] for gradient in gradients], np.uintp)
    apply_steps(param, exp_avg, exp_avg_sq, addresses, scalars, coupled, contracted)


def scalar_row(c: Coefficients) -> tuple[np.float32, ...]:
    small = c.weight1 < np.float32(0.5)
    return (
        c.decay if c.decays else np.float32(1),
        c.weight1 if small else c.weight1 - np.float32(1),
        np.float32(small),
        c.weight2,
        c.beta2,
        c.root_correction,
        c.eps,
        c.negative_step_size,
    )


@compiled
def apply_steps(
    param: NDArray[np.float32],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    addresses: NDArray[np.uintp],
    scalars: NDArray[np.float32],
    coupled: NDArray[np.bool_],
    contracted: bool,
) -> None:
    size = param.size
    scratch = np.empty(TILE, np.float32)
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        p, m, v = param[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop]
        for index in range(addresses.size):
            g = carray(pointer_to_floats(addresses[index]), (size,), np.float32)[start:stop]
            row = scalars[index]
            if coupled[index]:
                add_decay(p, g, scratch, row[0], contracted)
                g = scratch[: stop - start]
                decay = np.float32(1)
            else:
                decay = row[0]
            if contracted:
                vectors = p.size - p.size % 8
                step_contracted(p[:vectors], m[:vectors], v[:vectors], g[:vectors], decay, row)
                step_contracted_tail(p[vectors:], m[vectors:], v[vectors:], g[vectors:], decay, row)
            else:
                step_plain(p, m, v, g, decay, row)


@compiled
def add_decay(
    p: NDArray[np.float32], g: NDArray[np.float32], out: NDArray[np.float32], decay: np.float32, contracted: bool
) -> None:
    """L2 decay: the gradient grows by ``decay * p``."""
    if contracted:
        for i in range(p.size):
            out[i] = multiply_add(p[i], decay, g[i])
    else:
        for i in range(p.size):
            out[i] = p[i] * decay + g[i]


@compiled
def step_contracted(
    p: NDArray[np.float32],
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    g: NDArray[np.float32],
    decay: np.float32,
    row: NDArray[np.float32],
) -> None:
    weight1, small, weight2, beta2 = row[1], row[2] != 0, row[3], row[4]
    root_correction, eps, negative_step_size = row[5], row[6], row[7]
    for i in range(p.size):
        gradient = g[i]
        first = multiply_add(weight1, gradient - m[i], m[i] if small else gradient)
        second = multiply_add(weight2 * gradient, gradient, v[i] * beta2)
        m[i] = first
        v[i] = second
        p[i] = p[i] * decay + (negative_step_size * first) / (np.sqrt(second) / root_correction + eps)


@compiled
def step_contracted_tail(
    p: NDArray[np.float32],
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    g: NDArray[np.float32],
    decay: np.float32,
    row: NDArray[np.float32],
) -> None:
    """The elements behind the last whole vector: torch's compiler contracted their second moment otherwise."""
    weight1, small, weight2, beta2 = row[1], row[2] != 0, row[3], row[4]
    root_correction, eps, negative_step_size = row[5], row[6], row[7]
    for i in range(p.size):
        gradient = g[i]
        first = multiply_add(weight1, gradient - m[i], m[i] if small else gradient)
        second = multiply_add(v[i], beta2, (weight2 * gradient) * gradient)
        m[i] = first
        v[i] = second
        p[i] = p[i] * decay + (negative_step_size * first) / (np.sqrt(second) / root_correction + eps)


@compiled
def step_plain(
    p: NDArray[np.float32],
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    g: NDArray[np.float32],
    decay: np.float32,
    row: NDArray[np.float32],
) -> None:
    weight1, small, weight2, beta2 = row[1], row[2] != 0, row[3], row[4]
    root_correction, eps, negative_step_size = row[5], row[6], row[7]
    for i in range(p.size):
        gradient = g[i]
        first = weight1 * (gradient - m[i]) + (m[i] if small else gradient)
        second = (weight2 * gradient) * gradient + v[i] * beta2
        m[i] = first
        v[i] = second
        p[i] = p[i] * decay + (negative_step_size * first) / (np.sqrt(second) / root_correction + eps)


@compiled
def update_moments(
    p: NDArray[np.float32],
    m: NDArray[np.float32],
    v: NDArray[np.float32],
    g: NDArray[np.float32],
    row: NDArray[np.float32],
    contracted: bool,
) -> None:
    """Decoupled decay of ``p``, then both moments, as torch's separate operations round them."""
    decay, weight1, small, weight2, beta2 = row[0], row[1], row[2] != 0, row[3], row[4]
    for i in range(p.size):
        gradient = g[i]
        start = m[i] if small else gradient
        if contracted:
            m[i] = multiply_add(weight1, gradient - m[i], start)
            v[i] = multiply_add(weight2 * gradient, gradient, v[i] * beta2)
        else:
            m[i] = weight1 * (gradient - m[i]) + start
            v[i] = (weight2 * gradient) * gradient + v[i] * beta2
        p[i] = p[i] * decay


@compiled
def update_parameter(
    p: NDArray[np.float32], m: NDArray[np.float32], roots: NDArray[np.float32], row: NDArray[np.float32]
) -> None:
    """The step itself, given the square roots of the second moment."""
    root_correction, eps, negative_step_size = row[5], row[6], row[7]
    for i in range(p.size):
        p[i] = p[i] + (negative_step_size * m[i]) / (roots[i] / root_correction + eps)
