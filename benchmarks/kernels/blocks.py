"""Quantisation in blocks, against one read of the array."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.ceilings.read import Read
from benchmarks.figures import Figure, Measured
from benchmarks.kernels.gradients import harvest, repeated
from benchmarks.kernels.settings import KernelSettings, clocked, compared
from benchmarks.training import Floats
from tiercheck import kernels

__all__ = ["FIGURES", "FORMATS"]

Encode = Callable[[Floats | None], object]
Decode = Callable[[], Floats]
Format = Callable[[Floats, int], tuple[Encode, Decode]]
"""What encodes the values into buffers of its own, with a residual perhaps, and what decodes those."""


def blocks_of(values: Floats, block: int) -> int:
    return -(-values.size // block)


def int8(values: Floats, threads: int) -> tuple[Encode, Decode]:
    codes, scales = np.empty(values.size, np.int8), np.empty(blocks_of(values, kernels.BLOCK), np.float32)
    return (
        lambda residual: kernels.quantise_into(values, codes, scales, residual=residual, threads=threads),
        lambda: kernels.dequantise(codes, scales, threads=threads),
    )


def nf4(values: Floats, threads: int) -> tuple[Encode, Decode]:
    blocks = blocks_of(values, kernels.BLOCK)
    codes, scales = np.empty(blocks * kernels.BLOCK // 2, np.uint8), np.empty(blocks, np.float32)
    return (
        lambda residual: kernels.quantise_nf4_into(values, codes, scales, residual=residual, threads=threads),
        lambda: kernels.dequantise_nf4(codes, scales, values.size, threads=threads),
    )


def onebit(values: Floats, threads: int) -> tuple[Encode, Decode]:
    blocks = blocks_of(values, kernels.ONEBIT_BLOCK)
    bits, scales = np.empty(blocks * kernels.ONEBIT_BLOCK // 8, np.uint8), np.empty(blocks, np.uint16)
    return (
        lambda residual: kernels.quantise_onebit_into(values, bits, scales, residual=residual, threads=threads),
        lambda: kernels.dequantise_onebit(bits, scales, values.size, threads=threads),
    )


FORMATS: dict[str, Format] = {"int8": int8, "nf4": nf4, "onebit": onebit}


async def encoding(settings: KernelSettings, *, format_: Format, feedback: bool = False) -> Measured:
    values = repeated(harvest(settings.setup).gradient, settings.elements)
    encode, decode = format_(values, settings.threads)
    residual = np.zeros_like(values) if feedback else None
    read = Read(values, settings.threads)
    read.calibrate()
    encode(None)
    details = {"relative_error": relative_error(decode(), values), "ceiling_shape": read.shape}
    return await compared(settings, clocked(lambda: encode(residual)), clocked(read), values.nbytes, details)


async def decoding(settings: KernelSettings, *, format_: Format) -> Measured:
    values = repeated(harvest(settings.setup).gradient, settings.elements)
    encode, decode = format_(values, settings.threads)
    encode(None)
    read = Read(values, settings.threads)
    read.calibrate()
    return await compared(settings, clocked(decode), clocked(read), values.nbytes, {"ceiling_shape": read.shape})


def relative_error(decoded: Floats, values: Floats) -> float:
    """The norm of what one encoding loses over the norm of what it encodes; at least finite, and not all of it.

    Errors: ``RuntimeError`` where nothing of the values is left: that would be no speed of an encoding.
    """
    sample = slice(0, 1 << 22)
    error = float(np.linalg.norm(decoded[sample] - values[sample]) / np.linalg.norm(values[sample]))
    if not error < 1:
        raise RuntimeError(f"what was decoded is {error:g} of the values' norm away from them")
    return float(f"{error:.3g}")


def figures_of(name: str, goal: float | None) -> tuple[Figure[KernelSettings], ...]:
    format_ = FORMATS[name]
    return (
        Figure(
            f"{name}/read_ceiling", "a gradient encoded, against one read", partial(encoding, format_=format_), goal
        ),
        Figure(
            f"{name}.feedback/read_ceiling",
            "the same with error feedback: two arrays are read, and one is written besides",
            partial(encoding, format_=format_, feedback=True),
        ),
        Figure(f"{name}.decode/read_ceiling", "decoded into new memory", partial(decoding, format_=format_)),
    )


FIGURES: tuple[Figure[KernelSettings], ...] = (
    *figures_of("int8", 0.35),
    *figures_of("nf4", 0.25),
    *figures_of("onebit", None),
)
