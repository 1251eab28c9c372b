"""Every kernel, declared once: reference, Numba form, CUDA forms, and examples of calls.

The reference's docstring says what a kernel computes. All forms give its bits, the payloads of NaNs aside. A form of
:mod:`tiercheck.kernels.cpu` has the name and the arguments of its reference.

To add a kernel: write the reference, write the forms, declare them here. Dispatch, warm-up, the compilation for a GPU
and the test that compares the forms all read the declarations. A codec also names it in ``kernels_used``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.examples import bytes_of, floats_of, with_and_without_residual
from tiercheck.kernels.reference import (
    adam,
    averages,
    bfloat16,
    blocks,
    compaction,
    exponents,
    fp16,
    gathering,
    gpu_adam,
    nf4,
    onebit,
    planes,
    scaled,
    sgd,
    xxh3,
)
from tiercheck.kernels.reference import scatter as scattering
from tiercheck.kernels.registry import Call, CudaForm, declare, of_each_type

__all__ = [
    "accumulate",
    "are_bfloat16",
    "are_scaled",
    "compact",
    "compact_into",
    "dequantise",
    "dequantise_nf4",
    "dequantise_onebit",
    "from_half",
    "gather_into",
    "gather_scaled_into",
    "hash_each",
    "is_bfloat16",
    "join_exponents",
    "lose_bfloat16",
    "narrow_into",
    "narrow_scaled_into",
    "pack_exponents",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
    "replay_fused_adam",
    "replay_gpu_adam",
    "replay_sgd",
    "round_bfloat16_into",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "split_and_pack_exponents",
    "split_exponents",
    "to_half",
    "unpack_exponents",
    "widen",
    "widen_scaled",
]

Calls = Iterator[Call]


# Compaction: the elements of largest magnitude.


def each_source(size: int, seed: int) -> Iterator[tuple[compaction.Values, dict[str, Any]]]:
    values = floats_of(size, seed)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    for source in (values, halves, (values.view(np.uint32) >> 16).astype(np.uint16)):
        for options in with_and_without_residual(size, seed):
            yield source, options


def threshold_calls(size: int, seed: int) -> Calls:
    for source, options in each_source(size, seed):
        yield (source, 0.5, seed), options
    # More values than samples: positions are drawn at random.
    yield (floats_of(compaction.SAMPLES + 1, seed), 0.5, seed), {}


def compaction_calls(size: int, seed: int) -> Calls:
    for source, options in each_source(size, seed):
        yield (source, 0.5), options


def buffer_calls(size: int, seed: int) -> Calls:
    room = size // 2
    for source, options in each_source(size, seed):
        yield (source, 0.5, np.zeros(room, np.uint32), np.zeros(room, np.float32)), options


select_threshold = declare(
    compaction.select_threshold,
    cpu="compaction.threshold",
    cuda=(
        CudaForm(
            "compaction:select_threshold",
            {"threshold": (*of_each_type("sample"), "select_magnitude")},
        ),
    ),
    examples=threshold_calls,
)
compact = declare(compaction.compact, cpu="compaction.compact", examples=compaction_calls)
compact_into = declare(
    compaction.compact_into,
    cpu="compaction.compact",
    cuda=(
        CudaForm(
            "compaction:compact_into",
            {"compaction": of_each_type("compact"), "survivors": ("clear",)},
        ),
        CudaForm("compaction:keep_largest", {"largest": of_each_type("keep_largest")}),
    ),
    examples=buffer_calls,
)


# Survivors: as fp16 under a scale, and back into a dense array.


def survivor_calls(size: int, seed: int) -> Calls:
    yield (floats_of(size, seed), np.zeros(size, np.float16)), {}


def half_calls(size: int, seed: int) -> Calls:
    yield (bytes_of(2 * size, seed).view(np.float16), seed % 200 - 100), {}


def scatter_calls(size: int, seed: int) -> Calls:
    every_third = np.arange(0, size, 3, dtype=np.uint32)
    yield (every_third, floats_of(every_third.size, seed), floats_of(size, seed + 1)), {}


def settle_calls(size: int, seed: int) -> Calls:
    every_third = np.arange(0, size, 3, dtype=np.uint32)
    survivors, decoded = floats_of(every_third.size, seed), floats_of(every_third.size, seed + 1)
    yield (floats_of(size, seed + 2), every_third, survivors, decoded), {}


to_half = declare(
    fp16.to_half,
    cpu="compaction.fp16",
    cuda=(CudaForm("compaction:to_half", {"survivors": ("clear", "largest_finite", "to_half")}),),
    examples=survivor_calls,
)
from_half = declare(
    fp16.from_half,
    cpu="compaction.fp16",
    cuda=(CudaForm("compaction:from_half", {"survivors": ("from_half",)}),),
    examples=half_calls,
)
settle = declare(
    scattering.settle,
    cpu="compaction.scatter",
    cuda=(CudaForm("compaction:settle", {"survivors": ("settle",)}),),
    examples=settle_calls,
)
scatter = declare(
    scattering.scatter,
    cpu="compaction.scatter",
    cuda=(CudaForm("compaction:scatter", {"survivors": ("clear", "scatter")}),),
    examples=scatter_calls,
)
scatter_add = declare(
    scattering.scatter_add,
    cpu="compaction.scatter",
    cuda=(CudaForm("compaction:scatter_add", {"survivors": ("scatter_add",)}),),
    examples=scatter_calls,
)


# Blocks: a code for every element, and a scale for every block.


def block_calls(code: type, code_bits: int, scale: type, block: int, *, whole: bool) -> Callable[[int, int], Calls]:
    """``whole``: the last block is stored whole, even if it is short."""

    def calls(size: int, seed: int) -> Calls:
        count = -(-size // block)
        codes = (count * block if whole else size) * code_bits // 8
        for options in with_and_without_residual(size, seed):
            for more in ({}, {"before": floats_of(size, seed + 2)}, {"rooted": True}):
                yield (floats_of(size, seed), np.zeros(codes, code), np.zeros(count, scale)), {**options, **more}

    return calls


def int8_calls(size: int, seed: int) -> Calls:
    scales = np.abs(floats_of(-(-size // blocks.BLOCK), seed))
    yield (bytes_of(size, seed).view(np.int8), scales), {}


def nf4_calls(size: int, seed: int) -> Calls:
    count = -(-size // blocks.BLOCK)
    yield (bytes_of(count * blocks.BLOCK // 2, seed), np.abs(floats_of(count, seed)), size), {}


def onebit_calls(size: int, seed: int) -> Calls:
    count = -(-size // onebit.ONEBIT_BLOCK)
    patterns = (np.abs(floats_of(count, seed)).view(np.uint32) >> 16).astype(np.uint16)
    yield (bytes_of(count * onebit.ONEBIT_BLOCK // 8, seed), patterns, size), {}


quantise_into = declare(
    blocks.quantise_into,
    cpu="blocks.int8",
    cuda=(CudaForm("blocks:quantise_into", {"blocks": of_each_type("quantise_int8")}),),
    examples=block_calls(np.int8, 8, np.float32, blocks.BLOCK, whole=False),
)
dequantise = declare(
    blocks.dequantise,
    cpu="blocks.int8",
    cuda=(CudaForm("blocks:dequantise_into", {"blocks": ("dequantise_int8",)}),),
    examples=int8_calls,
)
quantise_nf4_into = declare(
    nf4.quantise_nf4_into,
    cpu="blocks.nf4",
    cuda=(CudaForm("blocks:quantise_nf4_into", {"blocks": of_each_type("quantise_nf4")}),),
    examples=block_calls(np.uint8, 4, np.float32, blocks.BLOCK, whole=True),
)
dequantise_nf4 = declare(
    nf4.dequantise_nf4,
    cpu="blocks.nf4",
    cuda=(CudaForm("blocks:dequantise_nf4_into", {"blocks": ("dequantise_nf4",)}),),
    examples=nf4_calls,
)
quantise_onebit_into = declare(
    onebit.quantise_onebit_into,
    cpu="blocks.onebit",
    cuda=(CudaForm("blocks:quantise_onebit_into", {"blocks": of_each_type("quantise_onebit")}),),
    examples=block_calls(np.uint8, 1, np.uint16, onebit.ONEBIT_BLOCK, whole=True),
)
dequantise_onebit = declare(
    onebit.dequantise_onebit,
    cpu="blocks.onebit",
    cuda=(CudaForm("blocks:dequantise_onebit_into", {"blocks": ("dequantise_onebit",)}),),
    examples=onebit_calls,
)


# Bit patterns: bf16, and exponents apart from the other bits.


def float_calls(size: int, seed: int) -> Calls:
    yield (floats_of(size, seed),), {}


def narrowing_calls(size: int, seed: int) -> Calls:
    yield (floats_of(size, seed), np.zeros(size, np.uint16)), {}


def widening_calls(size: int, seed: int) -> Calls:
    yield (bytes_of(2 * size, seed).view(np.uint16),), {}


SCALE = float(np.float32(0.7))


def products_of(size: int, seed: int) -> Iterator[tuple[NDArray[np.float32], scaled.Halves]]:
    """Half-precision numbers times :data:`SCALE`, with a few values that are no product; and memory for the numbers."""
    patterns = bytes_of(2 * size, seed).view(np.uint16)
    for halves in (patterns, patterns.view(np.float16)):
        values = scaled.widen_scaled(halves, SCALE)
        values[:3] = floats_of(3, seed)[: values[:3].size]
        yield values, np.zeros_like(halves)


def narrowing_scaled_calls(size: int, seed: int) -> Calls:
    for values, out in products_of(size, seed):
        yield (values, SCALE, out), {}
        yield (values[3:], SCALE, out[3:]), {}


def widening_scaled_calls(size: int, seed: int) -> Calls:
    for patterns in (bytes_of(2 * size, seed).view(np.uint16), bytes_of(2 * size, seed).view(np.float16)):
        yield (patterns, SCALE), {}


def losing_calls(size: int, seed: int) -> Calls:
    yield (floats_of(size, seed), floats_of(size, seed + 1)), {}


def each_width(size: int, seed: int) -> Iterator[NDArray[Any]]:
    yield bytes_of(2 * size, seed).view(np.uint16)
    yield floats_of(size, seed).view(np.uint32)


def splitting_calls(size: int, seed: int) -> Calls:
    for patterns in each_width(size, seed):
        yield (patterns, np.zeros(size, np.uint8), np.zeros(size * (patterns.itemsize - 1), np.uint8)), {}


def joining_calls(size: int, seed: int) -> Calls:
    for dtype in (np.dtype(np.uint16), np.dtype(np.uint32)):
        rest = bytes_of(size * (dtype.itemsize - 1), seed + 1)
        yield (bytes_of(size, seed), rest, np.zeros(size, dtype)), {}


def packing_calls(size: int, seed: int) -> Calls:
    for patterns in each_width(size, seed):
        plane = (patterns >> (8 * patterns.itemsize - 9)).astype(np.uint8)
        yield (plane, np.zeros(exponents.packed_bytes_max(size), np.uint8)), {}


def split_packing_calls(size: int, seed: int) -> Calls:
    for patterns in each_width(size, seed):
        rest = np.zeros(size * (patterns.itemsize - 1), np.uint8)
        yield (patterns, rest, np.zeros(exponents.packed_bytes_max(size), np.uint8)), {}


def unpacking_calls(size: int, seed: int) -> Calls:
    for (plane, packed), _ in packing_calls(size, seed):
        used = exponents.pack_exponents(plane, packed)
        yield (packed[:used], np.zeros(size, np.uint8)), {}


is_bfloat16 = declare(
    bfloat16.is_bfloat16,
    cpu="bfloat16",
    cuda=(CudaForm("patterns:find_low_halves", {"patterns": ("find_low_halves",)}),),
    examples=float_calls,
)
narrow_into = declare(
    bfloat16.narrow_into,
    cpu="bfloat16",
    cuda=(CudaForm("patterns:narrow_into", {"patterns": ("narrow",)}),),
    examples=narrowing_calls,
)
widen = declare(
    bfloat16.widen,
    cpu="bfloat16",
    cuda=(CudaForm("patterns:widen_into", {"patterns": ("widen",)}),),
    examples=widening_calls,
)
narrow_scaled_into = declare(
    scaled.narrow_scaled_into,
    cpu="scaled",
    cuda=(
        CudaForm(
            "patterns:narrow_scaled_into",
            {"patterns": ("narrow_scaled_bfloat16", "narrow_scaled_float16"), "survivors": ("clear",)},
        ),
        CudaForm("patterns:find_scale", {"patterns": ("find_scale",)}),
        CudaForm("patterns:narrow_found_into", {"patterns": ("narrow_found",)}),
    ),
    examples=narrowing_scaled_calls,
)
widen_scaled = declare(
    scaled.widen_scaled,
    cpu="scaled",
    cuda=(CudaForm("patterns:widen_scaled_into", {"patterns": ("widen_scaled_bfloat16", "widen_scaled_float16")}),),
    examples=widening_scaled_calls,
)
round_bfloat16_into = declare(bfloat16.round_bfloat16_into, cpu="bfloat16", examples=narrowing_calls)
lose_bfloat16 = declare(bfloat16.lose_bfloat16, cpu="bfloat16", examples=losing_calls)
split_exponents = declare(
    planes.split_exponents,
    cpu="planes",
    cuda=(CudaForm("patterns:split_exponents", {"patterns": ("split_exponents_16", "split_exponents_32")}),),
    examples=splitting_calls,
)
join_exponents = declare(
    planes.join_exponents,
    cpu="planes",
    cuda=(CudaForm("patterns:join_exponents", {"patterns": ("join_exponents_16", "join_exponents_32")}),),
    examples=joining_calls,
)
pack_exponents = declare(
    exponents.pack_exponents,
    cpu="exponents",
    cuda=(CudaForm("exponents:pack_exponents", {"exponents": ("pack_exponents",), "survivors": ("clear",)}),),
    examples=packing_calls,
)
split_and_pack_exponents = declare(
    exponents.split_and_pack_exponents, cpu="exponents", examples=split_packing_calls
)  # a GPU runs the two kernels one after the other
unpack_exponents = declare(
    exponents.unpack_exponents,
    cpu="exponents",
    cuda=(CudaForm("exponents:unpack_exponents", {"exponents": ("unpack_exponents",), "survivors": ("clear",)}),),
    examples=unpacking_calls,
)


# Weighted sums.


def accumulating_calls(size: int, seed: int) -> Calls:
    for values in (floats_of(size, seed), bytes_of(2 * size, seed).view(np.uint16)):
        for weight in (0.3, -1e30, 0.0):
            yield (values, weight, floats_of(size, seed + 1)), {}


accumulate = declare(
    averages.accumulate,
    cpu="averages",
    cuda=(CudaForm("averages:accumulate", {"averages": ("accumulate_float32", "accumulate_bfloat16")}),),
    examples=accumulating_calls,
)


# Replays. An optimizer (tiercheck.streams.optimizers) chooses its replay, which is then certified by experiment.
# replay_fused_adam has the bits of torch's CPU kernel, on a GPU, too; replay_gpu_adam those of optimizers on a GPU.

replay_fused_adam = declare(
    adam.replay_fused_adam,
    cpu="replay.adam",
    cuda=(CudaForm("adam:replay_fused_adam", {"adam": ("replay_adam", "replay_adam_sparse")}),),
)
replay_gpu_adam = declare(
    gpu_adam.replay_gpu_adam,
    cpu="replay.gpu_adam",
    cuda=(
        CudaForm(
            "gpu_adam:replay_gpu_adam",
            {
                "gpu_adam": (
                    "replay_explicit_32",
                    "replay_explicit_64",
                    "replay_weighted_32",
                    "replay_weighted_64",
                    "replay_operations",
                ),
                "fast_adam": ("replay_fast",),
            },
        ),
    ),
)
replay_sgd = declare(sgd.replay_sgd, cpu="replay.sgd")


# Many small tensors, by their addresses. While a call runs, the generator holds their memory.


def addressed(size: int, seed: int) -> tuple[list[NDArray[np.float32]], NDArray[np.int64], NDArray[np.int64]]:
    """Memory, and by address and number of elements four tensors in it; bf16 holds two of them."""
    whole = floats_of(size, seed)
    memory = [whole, widen(whole.view(np.uint32).astype(np.uint16)), np.zeros(size, np.float32)]
    sizes = np.array([size, size, size, 0], np.int64)
    return memory, np.array([*(each.ctypes.data for each in memory), 0], np.int64), sizes


def looking_calls(size: int, seed: int) -> Calls:
    memory, addresses, sizes = addressed(size, seed)
    yield (addresses, sizes), {}
    del memory


def gathering_calls(size: int, seed: int) -> Calls:
    memory, addresses, sizes = addressed(size, seed)
    narrowed = np.array([False, True, False, False])
    starts = np.array([0, 4 * size, 8 * size, 12 * size], np.int64)
    yield (addresses, 4 * sizes, narrowed, starts, np.zeros(12 * size, np.uint8)), {}
    del memory


def looking_scaled_calls(size: int, seed: int) -> Calls:
    for values, out in products_of(size, seed):
        addresses = np.array([values.ctypes.data, values[3:].ctypes.data, 0], np.int64)
        yield (addresses, np.array([size, max(0, size - 3), 0], np.int64), SCALE, out.dtype == np.float16), {}


def gathering_scaled_calls(size: int, seed: int) -> Calls:
    for _, out in products_of(size, seed):
        values = scaled.widen_scaled((np.arange(size) % 512 + 0x3C00).astype(np.uint16).view(out.dtype), SCALE)
        addresses, sizes = np.array([values.ctypes.data, 0], np.int64), np.array([size, 0], np.int64)
        starts, room = np.array([64, 0], np.int64), np.zeros(64 + 2 * size, np.uint8)
        yield (addresses, sizes, SCALE, out.dtype == np.float16, starts, room), {}


def hashing_calls(size: int, seed: int) -> Calls:
    data = floats_of(size, seed).view(np.uint8)
    ends = [np.array(each, np.int64) for each in ([0, 0, size, 3 * size], [0, size, 4 * size, 4 * size])]
    yield (data, *ends), {}


are_scaled = declare(scaled.are_scaled, cpu="scaled", examples=looking_scaled_calls)
gather_scaled_into = declare(scaled.gather_scaled_into, cpu="scaled", examples=gathering_scaled_calls)
are_bfloat16 = declare(gathering.are_bfloat16, cpu="gathering", examples=looking_calls)
gather_into = declare(gathering.gather_into, cpu="gathering", examples=gathering_calls)
hash_each = declare(xxh3.hash_each, cpu="xxh3", examples=hashing_calls)
