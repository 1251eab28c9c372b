"""Block codes on the device: int8 and NF4 in blocks of 256, signs in blocks of 128.

The bits are those of :mod:`tiercheck.kernels.reference`; the caller allocates all arrays. Every function puts its work
into ``stream`` and returns. Values that are encoded are fp32, fp16, or bf16 patterns (uint16). If ``residual`` (fp32)
is given, it is added to them, and becomes what is not given back if the codes are decoded in the values' type. Every
function raises ``ValueError`` for an array of the wrong dtype or size.
"""

from __future__ import annotations

import numpy as np

from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.module import NAMES, DeviceArray, Stream, check, check_values, grid_for
from tiercheck.kernels.reference.blocks import BLOCK
from tiercheck.kernels.reference.nf4 import HALF
from tiercheck.kernels.reference.onebit import ONEBIT_BLOCK, SIGN_BYTES

__all__ = [
    "dequantise_into",
    "dequantise_nf4_into",
    "dequantise_onebit_into",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
]

THREADS = 256

WARPS = THREADS // 32
"""Blocks of elements that a block of threads works on at a time: one for each warp."""


def quantise_into(
    values: DeviceArray,
    codes: DeviceArray,
    scales: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """The reference\'s ``quantise_into``. Errors: ``ValueError``."""
    check("codes", codes, np.int8, values.size)
    check("scales", scales, np.float32, -(-values.size // BLOCK))
    encode("quantise_int8", values, residual, codes, scales, BLOCK, stream)


def dequantise_into(codes: DeviceArray, scales: DeviceArray, values: DeviceArray, *, stream: Stream) -> None:
    """The reference\'s ``dequantise``. Errors: ``ValueError``.

    A NaN is written as the pattern 0x7FC00000.
    """
    check("values", values, np.float32)
    check("codes", codes, np.int8, values.size)
    check("scales", scales, np.float32, -(-values.size // BLOCK))
    decode("dequantise_int8", codes, scales, values, grid_for(values.size, THREADS), stream)


def quantise_nf4_into(
    values: DeviceArray,
    codes: DeviceArray,
    scales: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """The reference\'s ``quantise_nf4_into``. Errors: ``ValueError``."""
    blocks = -(-values.size // BLOCK)
    check("codes", codes, np.uint8, blocks * HALF)
    check("scales", scales, np.float32, blocks)
    encode("quantise_nf4", values, residual, codes, scales, BLOCK, stream)


def dequantise_nf4_into(codes: DeviceArray, scales: DeviceArray, values: DeviceArray, *, stream: Stream) -> None:
    """The reference\'s ``dequantise_nf4``. Errors: ``ValueError``.

    A NaN is written as the pattern 0x7FC00000.
    """
    check("values", values, np.float32)
    blocks = -(-values.size // BLOCK)
    check("codes", codes, np.uint8, blocks * HALF)
    check("scales", scales, np.float32, blocks)
    decode("dequantise_nf4", codes, scales, values, grid_for(blocks, WARPS), stream)


def quantise_onebit_into(
    values: DeviceArray,
    bits: DeviceArray,
    scales: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    stream: Stream,
) -> None:
    """The reference\'s ``quantise_onebit_into``. Errors: ``ValueError``."""
    blocks = -(-values.size // ONEBIT_BLOCK)
    check("bits", bits, np.uint8, blocks * SIGN_BYTES)
    check("scales", scales, np.uint16, blocks)
    encode("quantise_onebit", values, residual, bits, scales, ONEBIT_BLOCK, stream)


def dequantise_onebit_into(bits: DeviceArray, scales: DeviceArray, values: DeviceArray, *, stream: Stream) -> None:
    """The reference\'s ``dequantise_onebit``. Errors: ``ValueError``."""
    check("values", values, np.float32)
    blocks = -(-values.size // ONEBIT_BLOCK)
    check("bits", bits, np.uint8, blocks * SIGN_BYTES)
    check("scales", scales, np.uint16, blocks)
    decode("dequantise_onebit", bits, scales, values, grid_for(values.size, THREADS), stream)


def encode(
    kernel: str,
    values: DeviceArray,
    residual: DeviceArray | None,
    codes: DeviceArray,
    scales: DeviceArray,
    block: int,
    stream: Stream,
) -> None:
    check_values(values, residual)
    arguments = (values, np.uint64(values.size), residual, codes, scales)
    grid = grid_for(-(-values.size // block), WARPS)
    module.launch("blocks", f"{kernel}_{NAMES[values.dtype]}", grid, THREADS, arguments, stream)


def decode(
    kernel: str, codes: DeviceArray, scales: DeviceArray, values: DeviceArray, grid: int, stream: Stream
) -> None:
    module.launch("blocks", kernel, grid, THREADS, (codes, np.uint64(values.size), scales, values), stream)
