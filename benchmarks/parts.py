"""Memory for the parts that a codec writes for one tensor, used again at every step: a tier's, without the tier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.format.container import ALIGNMENT
from tiercheck.streams.codecs import DTYPES, Codec, StoredPart, decode
from tiercheck.types import Buffer

__all__ = ["EncodedTensor", "PartMemory"]


@dataclass(frozen=True)
class MemoryPart:
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


class PartMemory:
    """Room for the parts of one tensor of this dtype and shape. Each encoding begins with :meth:`clear`."""

    def __init__(self, codec: Codec, dtype: str, shape: Sequence[int]) -> None:
        self._memory = np.zeros(sum(aligned(part.nbytes) for part in codec.plan(dtype, shape)), np.uint8)
        self._used = 0
        self._parts: dict[str, StoredPart] = {}

    def clear(self) -> None:
        self._used = 0
        self._parts = {}

    def slot(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
        """Memory for one part: what a codec asks for."""
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        start, self._used = self._used, self._used + aligned(nbytes)
        memory = self._memory.data[start : start + nbytes]
        self._parts[suffix] = MemoryPart(dtype, shape, memory)
        return memory

    @property
    def parts(self) -> Mapping[str, StoredPart]:
        return self._parts

    @property
    def nbytes(self) -> int:
        """Of the parts that were written since it was cleared."""
        return sum(memoryview(part.data).nbytes for part in self._parts.values())


class EncodedTensor:
    """A tensor of this dtype and shape, encoded by ``codec``, over and over, with the residual that the codec needs."""

    def __init__(self, codec: Codec, dtype: str, shape: Sequence[int]) -> None:
        self._codec = codec
        self._dtype = dtype
        self._memory = PartMemory(codec, dtype, shape)
        self._description: dict[str, Any] = {}
        size = codec.residual_size(dtype, shape)
        self.residual = np.zeros(size, np.float32) if size else None
        """What error feedback adds to the next tensor; ``None`` without."""

    def encode(self, array: NDArray[Any], *, seed: int, threads: int = 1) -> None:
        self._memory.clear()
        encoding = self._codec.encode(
            array, self._dtype, seed=seed, slot=self._memory.slot, residual=self.residual, threads=threads
        )
        self._description = encoding.to_object()

    def decode(self, threads: int = 1) -> NDArray[Any]:
        """What a recovery gets; perhaps a view of this memory."""
        return decode(self._description, self._memory.parts, threads=threads)

    @property
    def nbytes(self) -> int:
        """Of the parts that the last encoding wrote."""
        return self._memory.nbytes


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
