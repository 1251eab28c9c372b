"""The kernels in Numba. They give the bits of :mod:`tiercheck.kernels.reference`.

Compiled on first use and cached on disk: call :func:`tiercheck.kernels.warm_up` off the critical path. Every
kernel releases the GIL and runs on the calling thread. ``fastmath`` is off and ``error_model`` is ``numpy``, without
which the check for a zero divisor keeps the loops from being vectorised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.reference import BLOCK, threshold_bits

__all__ = ["compact", "dequantise", "is_bfloat16", "narrow_into", "quantise_into", "replay_fused_adam", "widen"]

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

CPointer: Any = types.CPointer

TILE = 4096
"""Elements a replay keeps in the first two caches while it applies all steps to them."""
GROUP = 64
"""Elements :func:`compact` tests at once."""


def compiled(function: Function) -> Function:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError as error:  # Numba finds no directory that it may write to
        logger.warning("%s is compiled anew in every process; set NUMBA_CACHE_DIR (%s)", function.__name__, error)
        return cast(Function, numba.njit(**options)(function))


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view: Numba compiles a kernel anew for an argument that can be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in fp32, rounded once."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]
def pointer_to_floats(typing_context: Any, address: Any) -> Any:
    """An address as a pointer, so that a kernel takes any number of arrays without being compiled for each."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return CPointer(types.float32)(types.uintp), generate


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


def compact(values: NDArray[np.float32], threshold: float) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """As the reference. One pass counts, one collects; both skip groups without a survivor."""
    bits, least = frozen(values.view(np.uint32)), threshold_bits(threshold)
    indices = np.empty(count_at_least(bits, least), np.uint32)
    survivors = np.empty(indices.size, np.uint32)
    collect_at_least(bits, least, indices, survivors)
    return indices, survivors.view(np.float32)


@compiled
def count_at_least(bits: NDArray[np.uint32], least: np.uint32) -> int:
    count = 0
    for start in range(0, bits.size, TILE):
        tile = bits[start : start + TILE]
        found = np.uint32(0)
        for i in range(tile.size):
            found += np.uint32((tile[i] & np.uint32(0x7FFFFFFF)) >= least)
        count += int(found)
    return count


@compiled
def collect_at_least(
    bits: NDArray[np.uint32], least: np.uint32, indices: NDArray[np.uint32], survivors: NDArray[np.uint32]
) -> None:
    kept = 0
    for start in range(0, bits.size, GROUP):
        group = bits[start : start + GROUP]
        if any_at_least(group, least) == 0:
            continue
        for i in range(group.size):
            if (group[i] & np.uint32(0x7FFFFFFF)) >= least:
                indices[kept] = start + i
                survivors[kept] = group[i]
                kept += 1


@compiled
def any_at_least(group: NDArray[np.uint32], least: np.uint32) -> np.uint32:
    found = np.uint32(0)
    for i in range(group.size):
        found |= np.uint32((group[i] & np.uint32(0x7FFFFFFF)) >= least)
    return found


def quantise_into(values: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    """As the reference."""
    quantise_blocks(frozen(values), codes, scales)


@compiled
def quantise_blocks(values: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    for block in range(scales.size):
        start = block * BLOCK
        scales[block] = quantise_block(values[start : start + BLOCK], codes[start : start + BLOCK])


@compiled
def quantise_block(values: NDArray[np.float32], codes: NDArray[np.int8]) -> Any:
    bits = values.view(np.uint32)
    infinity = np.uint32(0x7F800000)
    magnitude = np.zeros(1, np.uint32)
    for i in range(values.size):
        magnitude[0] = max(magnitude[0], bits[i] & np.uint32(0x7FFFFFFF))
    finite = magnitude[0] < infinity
    if not finite:
        magnitude[0] = 0
        for i in range(values.size):
            one = bits[i] & np.uint32(0x7FFFFFFF)
            magnitude[0] = max(magnitude[0], one if one < infinity else np.uint32(0))
    largest = magnitude.view(np.float32)[0]
    scale = scale_reaching(largest)
    divisor = np.float32(1) if scale == 0 else scale
    if finite:
        for i in range(values.size):
            codes[i] = np.int8(np.int32(np.rint(values[i] / divisor)))
    else:
        for i in range(values.size):
            infinite = (bits[i] & np.uint32(0x7FFFFFFF)) >= infinity
            code = np.rint((np.float32(0) if infinite else values[i]) / divisor)
            codes[i] = np.int8(-128) if infinite else np.int8(np.int32(code))
    return scale


@compiled
def scale_reaching(largest: Any) -> Any:
    """``largest / 127``, or the next number up where 127 times that falls short of ``largest``."""
    scale = np.empty(1, np.float32)
    scale[0] = largest / np.float32(127)
    if scale[0] * np.float32(127) < largest:
        scale.view(np.uint32)[0] += np.uint32(1)
    return scale[0]


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """As the reference."""
    values = np.empty(codes.size, np.float32)
    dequantise_blocks(frozen(codes), frozen(scales), values)
    return values


@compiled
def dequantise_blocks(codes: NDArray[np.int8], scales: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    for block in range(scales.size):
        start = block * BLOCK
        dequantise_block(codes[start : start + BLOCK], scales[block], values[start : start + BLOCK])


@compiled
def dequantise_block(codes: NDArray[np.int8], scale: np.float32, values: NDArray[np.float32]) -> None:
    largest = np.float32(3.4028234663852886e38)
    for i in range(codes.size):
        value = min(max(np.float32(codes[i]) * scale, -largest), largest)
        values[i] = np.float32(np.nan) if codes[i] == np.int8(-128) else value


def is_bfloat16(values: NDArray[np.float32]) -> bool:
    """As the reference, up to the first tile with a value that bf16 cannot hold."""
    return bool(low_halves_are_zero(frozen(values.view(np.uint32))))


@compiled
def low_halves_are_zero(bits: NDArray[np.uint32]) -> bool:
    for start in range(0, bits.size, TILE):
        tile = bits[start : start + TILE]
        lost = np.uint32(0)
        for i in range(tile.size):
            lost |= tile[i]
        if lost & np.uint32(0xFFFF):
            return False
    return True


def narrow_into(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """As the reference."""
    upper_halves(frozen(values.view(np.uint32)), out)


@compiled
def upper_halves(bits: NDArray[np.uint32], out: NDArray[np.uint16]) -> None:
    for i in range(bits.size):
        out[i] = np.uint16(bits[i] >> np.uint32(16))


def widen(patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
    """As the reference."""
    bits = np.empty(patterns.size, np.uint32)
    widen_into(frozen(patterns), bits)
    return bits.view(np.float32)


@compiled
def widen_into(patterns: NDArray[np.uint16], bits: NDArray[np.uint32]) -> None:
    for i in range(patterns.size):
        bits[i] = np.uint32(patterns[i]) << np.uint32(16)
