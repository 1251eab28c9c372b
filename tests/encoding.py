"""Tensors encoded into memory, as a shard would hold them, and values to encode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError
from tiercheck.format.container import checksum_of
from tiercheck.streams.codecs import CODECS, DTYPES, FLOATS, Encoding, codec, decode
from tiercheck.types import Fidelity

__all__ = [
    "APPROXIMATE",
    "EXACT",
    "FEEDBACK",
    "Memory",
    "Stored",
    "as_stored",
    "encode",
    "gradient",
    "hold",
    "raw",
    "read",
    "residual_for",
    "round_trip",
    "supports",
]

EXACT = [name for name in CODECS if CODECS[name].fidelity is Fidelity.EXACT]
FEEDBACK = [name for name in CODECS if CODECS[name].residual_size("F32", (1,))]
APPROXIMATE = [name for name in CODECS if name not in EXACT and name not in FEEDBACK]


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass
class Memory:
    """The parts of one encoded tensor."""

    parts: dict[str, Stored] = field(default_factory=dict)

    def slot(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        assert suffix not in self.parts, "a slot was asked for twice"
        memory = memoryview(bytearray(math.prod(shape) * DTYPES[dtype].itemsize))
        self.parts[suffix] = Stored(dtype, shape, memory)
        return memory


def residual_for(name: str, array: NDArray[Any], dtype: str) -> NDArray[np.float32] | None:
    """A fresh residual where the codec keeps one."""
    size = codec(name).residual_size(dtype, array.shape)
    return np.zeros(size, np.float32) if size else None


def encode(
    name: str,
    array: NDArray[Any],
    dtype: str,
    seed: int = 1,
    *,
    residual: NDArray[np.float32] | None = None,
    threads: int = 1,
) -> tuple[Encoding, dict[str, Stored]]:
    """``residual``: zeros where it is not given and the codec keeps one."""
    memory = Memory()
    residual = residual_for(name, array, dtype) if residual is None else residual
    encoding = codec(name).encode(array, dtype, seed=seed, slot=memory.slot, residual=residual, threads=threads)
    for suffix, checksum in encoding.checksums.items():
        assert checksum == checksum_of(memory.parts[suffix].data), "what a codec hashed is not what it wrote"
    return encoding, memory.parts


def as_stored(encoding: Encoding) -> Any:
    """The description, through a shard's msgpack."""
    return msgpack.unpackb(msgpack.packb(encoding.to_object()))


def round_trip(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    encoding, parts = encode(name, array, dtype)
    return decode(as_stored(encoding), parts)


def supports(name: str, dtype: str) -> bool:
    try:
        return bool(codec(name).plan(dtype, (1,)))
    except ConfigurationError:
        return False


def hold(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """fp32 values as an array that holds ``dtype``; a bf16's lower bits are cut off."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype])


def read(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    assert dtype in FLOATS
    return kernels.widen(array.reshape(-1)).reshape(array.shape) if dtype == "BF16" else array.astype(np.float32)


def raw(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def gradient(size: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * np.float32(1e-3)
