"""Block quantisation in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.cpu.compiled import compiled, frozen
from tiercheck.kernels.reference.blocks import BLOCK

__all__ = ["dequantise", "quantise_into"]


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
