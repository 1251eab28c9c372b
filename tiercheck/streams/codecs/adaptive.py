"""A codec that chooses by the size of the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import Corruption
from tiercheck.kernels import Kernel
from tiercheck.streams.codecs.blocks import Int8
from tiercheck.streams.codecs.encoding import DTYPES, FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.codecs.sparse import Sparse
from tiercheck.types import Fidelity

__all__ = ["Adaptive"]

SMALL, OTHER = Int8(), Exact()


@dataclass(frozen=True)
class Adaptive(Codec):
    """TierCheck's paper: ``int8`` for small tensors, ``sparse`` for all others.

    What neither encodes (integers, doubles) is ``exact``. An encoding names the codec that was chosen.

    - ``small_elements``: tensors of fewer elements are small.
    - ``ratio``: that of ``sparse``.
    """

    name = "adaptive"
    fidelity = Fidelity.APPROXIMATE
    dtypes = DTYPES
    feedback = True
    small_elements: int = 100_000
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if self.small_elements < 0:
            raise ValueError(f"small_elements must be at least 0, not {self.small_elements}")
        Sparse(self.ratio)

    @cached_property
    def _large(self) -> Sparse:
        return Sparse(self.ratio)

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        return self.choose("F32", values.shape).bound(values)

    def choose(self, dtype: str, shape: Sequence[int]) -> Codec:
        if dtype not in FLOATS:
            return OTHER
        return SMALL if math.prod(shape) < self.small_elements else self._large

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        return self.choose(dtype, shape).plan(dtype, shape)

    def encode(
        self,
        array: NDArray[Any],
        dtype: str,
        *,
        seed: int,
        slot: Slot,
        residual: NDArray[np.float32] | None = None,
        threads: int = 1,
    ) -> Encoding:
        chosen = self.choose(dtype, array.shape)
        return chosen.encode(array, dtype, seed=seed, slot=slot, residual=residual, threads=threads)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        raise Corruption("no tensor is encoded by 'adaptive' itself: it names the codec that it chose")

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return tuple(dict.fromkeys(used for each in (SMALL, OTHER, self._large) for used in each.kernels_used()))
