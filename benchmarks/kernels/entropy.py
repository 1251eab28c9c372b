"""Lossless entropy coding of gradients: how much it saves, and how fast it is."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.ceilings.read import Read
from benchmarks.figures import Figure, Measured
from benchmarks.kernels.gradients import harvest, repeated
from benchmarks.kernels.settings import KernelSettings, clocked, compared
from benchmarks.machine import cpu_text
from benchmarks.pairs import Summary
from benchmarks.parts import EncodedTensor
from tiercheck.streams.codecs import codec

__all__ = ["FIGURES", "bfloat16"]

CODEC = "exact+entropy"


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The patterns of the values rounded to bf16, as a bf16 training has them; ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def encoded(settings: KernelSettings, dtype: str) -> tuple[EncodedTensor, NDArray[np.generic]]:
    values = repeated(harvest(settings.setup).gradient, settings.elements)
    array = bfloat16(values) if dtype == "BF16" else values
    return EncodedTensor(codec(CODEC), dtype, array.shape), array


async def speed(settings: KernelSettings, *, dtype: str, decode: bool) -> Measured:
    tensor, array = encoded(settings, dtype)
    tensor.encode(array, seed=0, threads=settings.threads)
    if not np.array_equal(tensor.decode(settings.threads), array):
        raise RuntimeError("what was decoded is not what was encoded")
    read = Read(array.view(np.float32), settings.threads)
    read.calibrate()
    subject = (
        clocked(lambda: tensor.decode(settings.threads))
        if decode
        else clocked(lambda: tensor.encode(array, seed=0, threads=settings.threads))
    )
    details = {"size": round(tensor.nbytes / array.nbytes, 4), "ceiling_shape": read.shape}
    return await compared(settings, subject, clocked(read), array.nbytes, details)


async def size(settings: KernelSettings, *, dtype: str) -> Measured:
    """Of one step's gradient alone: repeated, it would be no other."""
    gradient = harvest(settings.setup).gradient
    array = bfloat16(gradient) if dtype == "BF16" else gradient
    tensor = EncodedTensor(codec(CODEC), dtype, array.shape)
    tensor.encode(array, seed=0)
    ratio = tensor.nbytes / array.nbytes
    summary = Summary(tensor.nbytes, array.nbytes, ratio, (ratio, ratio), 1)
    return Measured(summary, "bytes", cpu_text(), array.nbytes, {"threads": 1})


def figures_of(name: str, dtype: str) -> tuple[Figure[KernelSettings], ...]:
    return (
        Figure(
            f"entropy.{name}.size/raw",
            f"bytes of a {name} gradient, coded without loss",
            partial(size, dtype=dtype),
            1,
            True,
        ),
        Figure(
            f"entropy.{name}/read_ceiling",
            "its coding, against one read",
            partial(speed, dtype=dtype, decode=False),
        ),
        Figure(
            f"entropy.{name}.decode/read_ceiling",
            "its decoding, against one read of what comes out",
            partial(speed, dtype=dtype, decode=True),
        ),
    )


FIGURES: tuple[Figure[KernelSettings], ...] = (*figures_of("fp32", "F32"), *figures_of("bf16", "BF16"))
