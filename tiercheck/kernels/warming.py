"""Compiling every kernel before training waits for one."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels import dispatch
from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.gradients import Gradient, SparseGradient
from tiercheck.kernels.reference import BLOCK, ONEBIT_BLOCK, SAMPLES, packed_bytes_max
from tiercheck.kernels.sgd import SgdStep

__all__ = ["warm_up"]

BLOCKS = 2

SIZE = BLOCKS * BLOCK


def warm_up() -> None:
    """Compile (or load from the cache) every kernel, so that none compiles while training waits.

    Whatever a codec may call is called here: with each dtype it takes, with and without a residual. What is
    compiled does not depend on the number of threads.
    """
    values = np.linspace(-1, 1, SIZE, dtype=np.float32)
    for residual in (None, np.zeros(SIZE, np.float32)):
        warm_up_blocks(values, residual)
        for source in (values, values.astype(np.float16), values.view(np.uint16)[:SIZE]):
            dispatch.select_threshold(source, 0.5, 0, residual=residual)
            dispatch.compact(source, 0.5, residual=residual)
            indices, survivors = np.empty(SIZE, np.uint32), np.empty(SIZE, np.float32)
            dispatch.compact_into(source, 0.5, indices, survivors, residual=residual)
    dispatch.select_threshold(np.zeros(SAMPLES + 1, np.float32), 0.5, 0)  # more than are looked at: positions are drawn
    warm_up_survivors(values)
    warm_up_patterns(values)
    warm_up_replay(values)


def warm_up_blocks(values: NDArray[np.float32], residual: NDArray[np.float32] | None) -> None:
    codes, scales = np.empty(SIZE, np.int8), np.empty(BLOCKS, np.float32)
    dispatch.quantise_into(values, codes, scales, residual=residual)
    dispatch.dequantise(codes, scales)
    nibbles = np.empty(SIZE // 2, np.uint8)
    dispatch.quantise_nf4_into(values, nibbles, scales, residual=residual)
    dispatch.dequantise_nf4(nibbles, scales, SIZE)
    bits, patterns = np.empty(SIZE // 8, np.uint8), np.empty(SIZE // ONEBIT_BLOCK, np.uint16)
    dispatch.quantise_onebit_into(values, bits, patterns, residual=residual)
    dispatch.dequantise_onebit(bits, patterns, SIZE)


def warm_up_survivors(values: NDArray[np.float32]) -> None:
    indices, halves = np.arange(SIZE, dtype=np.uint32), np.empty(SIZE, np.float16)
    decoded = dispatch.from_half(halves, dispatch.to_half(values, halves))
    out = np.empty(SIZE, np.float32)
    dispatch.scatter(indices, values, out)
    dispatch.scatter_add(indices, values, out)
    dispatch.settle(out, indices, values, decoded)


def warm_up_patterns(values: NDArray[np.float32]) -> None:
    dispatch.is_bfloat16(values)
    narrowed = np.empty(SIZE, np.uint16)
    dispatch.narrow_into(values, narrowed)
    dispatch.widen(narrowed)
    dispatch.round_bfloat16_into(values, narrowed)
    dispatch.lose_bfloat16(values, np.zeros(SIZE, np.float32))
    packed = np.empty(packed_bytes_max(SIZE), np.uint8)
    for patterns in (narrowed, values.view(np.uint32)):
        exponents, rest = np.empty(SIZE, np.uint8), np.empty(SIZE * (patterns.itemsize - 1), np.uint8)
        dispatch.split_exponents(patterns, exponents, rest)
        dispatch.join_exponents(exponents, rest, np.empty_like(patterns))
        dispatch.split_and_pack_exponents(patterns, rest, packed)
    dispatch.unpack_exponents(packed[: dispatch.pack_exponents(exponents, packed)], exponents)


def warm_up_replay(values: NDArray[np.float32]) -> None:
    if importlib.util.find_spec("numba") is None:
        return
    from tiercheck.kernels import cpu
    from tiercheck.kernels.cpu import closed_form, sgd

    size = 8
    p, m, v = (np.zeros(size, np.float32) for _ in range(3))
    gradients: list[Gradient] = [values[:size], SparseGradient(np.arange(1, dtype=np.uint32), values[:1])]
    steps = [
        AdamStep(step, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True) for step in (1, 2)
    ]
    cpu.replay_fused_adam(p, m, v, gradients, steps, contracted=True)
    closed_form.replay_sparse_adam(p, m, v, gradients, steps)
    sgd.replay_sgd(p, m, gradients, [SgdStep(lr=1e-3, momentum=0.9)] * 2, fused=True, contracted=True)
    if importlib.util.find_spec("torch") is not None:
        from tiercheck.kernels import torch_tiles

        torch_tiles.replay_adam_with_numba(
            p, m, v, gradients, [replace(each, decoupled=False) for each in steps], contracted=True
        )
