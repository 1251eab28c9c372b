"""Gradients that codecs have failed on, and what a codec makes of them: what the kit for codecs works with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

import tiercheck.testing.plugin  # noqa: F401  (registers the kit's assertions for rewriting)
from tiercheck import kernels
from tiercheck.format.container import checksum_of
from tiercheck.streams.codecs import DTYPES, FLOATS, Codec, Encoding

__all__ = ["EDGES", "Memory", "Stored", "as_stored", "encoded", "gradient", "hold", "raw", "read", "tensors"]


@dataclass(frozen=True)
class Stored:
    """A part as a shard holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass
class Memory:
    """The parts of one encoded tensor, in memory of exactly their sizes."""

    parts: dict[str, Stored] = field(default_factory=dict)

    def slot(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        assert suffix not in self.parts, f"the slot {suffix!r} was asked for twice"
        memory = memoryview(bytearray(math.prod(shape) * DTYPES[dtype].itemsize))
        self.parts[suffix] = Stored(dtype, tuple(shape), memory)
        return memory


def encoded(
    made: Codec,
    array: NDArray[Any],
    dtype: str,
    *,
    seed: int = 1,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> tuple[Encoding, dict[str, Stored]]:
    """``residual``: zeros if it is not given and the codec keeps one."""
    memory = Memory()
    if residual is None and (size := made.residual_size(dtype, array.shape)):
        residual = np.zeros(size, np.float32)
    encoding = made.encode(array, dtype, seed=seed, slot=memory.slot, residual=residual, threads=threads)
    for suffix, checksum in encoding.checksums.items():
        assert checksum == checksum_of(memory.parts[suffix].data), "what a codec hashed is not what it wrote"
    return encoding, memory.parts


def as_stored(encoding: Encoding) -> Any:
    """The description, through a shard's msgpack."""
    return msgpack.unpackb(msgpack.packb(encoding.to_object()))


def hold(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """fp32 values as an array that holds ``dtype``; the lower bits of a bf16 are cut off."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype])


def read(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The values of an array that holds a ``dtype`` of ``FLOATS``."""
    assert dtype in FLOATS
    if dtype == "BF16":
        return kernels.widen(np.ascontiguousarray(array).reshape(-1)).reshape(array.shape)
    return array.astype(np.float32)


def raw(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def gradient(size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * np.float32(1e-3)


EDGES: Mapping[str, NDArray[np.float32]] = {
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.full((), -2.5, np.float32),
    "one": np.array([1e-3], np.float32),
    "odd": gradient(257),
    "matrix": gradient(12 * 34).reshape(12, 34),
    "row": gradient(300).reshape(1, 300),
    "column": gradient(300).reshape(300, 1),
    "cube": gradient(5 * 6 * 7).reshape(5, 6, 7),
    "transposed": gradient(12 * 34).reshape(12, 34).T,
    "strided": gradient(1000)[::3],
    "reversed": gradient(100)[::-1],
    "constant": np.full(1000, 0.125, np.float32),
    "zero": np.zeros(1000, np.float32),
    "denormal": (np.arange(1, 500) * 2.0**-149).astype(np.float32),
    "sparse": np.where(np.arange(5000) % 97 == 3, gradient(5000), np.float32(0)),
    "negative zeros": np.where(np.arange(999) % 50 == 0, np.float32(-0.0), np.float32(0)),
    "huge": np.full(300, -3.4e38, np.float32),
}
"""Shapes, strides and values on which codecs have failed."""


@st.composite
def tensors(draw: st.DrawFn) -> NDArray[np.float32]:
    """Any patterns, many of them special, of up to 700 elements; some are mostly zeros, some exactly bf16."""
    size, seed = draw(st.integers(0, 700)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, size, dtype=np.uint32)
    match draw(st.sampled_from(["any", "finite", "near", "denormal", "bf16"])):
        case "finite":
            bits = np.where(bits & 0x7F800000 == 0x7F800000, bits & 0xBFFFFFFF, bits).astype(np.uint32)
        case "near":
            bits = generator.standard_normal(size, dtype=np.float32).view(np.uint32)
        case "denormal":
            bits &= np.uint32(0x807FFFFF)
        case "bf16":
            bits &= np.uint32(0xFFFF0000)
    bits[generator.random(size) < draw(st.sampled_from([0, 0, 0.5, 0.99]))] = 0
    values = bits.view(np.float32).copy()
    if size:
        values[draw(st.lists(st.integers(0, size - 1), max_size=3))] = draw(
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3.4028235e38])
        )
    return values
