"""Codecs that choose, and codecs that remember: each hands the work to another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import Corruption
from tiercheck.streams.codecs.encoding import FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.types import Fidelity

__all__ = ["Adaptive", "Feedback"]


class Adaptive(Codec):
    """TierCheck's paper: ``int8`` for tensors of fewer than 100,000 elements, ``sparse`` from there on.

    What neither encodes (integers, doubles) is ``exact``. An encoding names the codec that was chosen.
    """

    name = "adaptive"
    fidelity = Fidelity.APPROXIMATE
    small_elements = 100_000

    def __init__(self, *, small: Codec, large: Codec, other: Codec) -> None:
        self._small = small
        self._large = large
        self._other = other

    def choose(self, dtype: str, shape: Sequence[int]) -> Codec:
        if dtype not in FLOATS:
            return self._other
        return self._small if math.prod(shape) < self.small_elements else self._large

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


class Feedback(Codec):
    """An approximate codec with error feedback: what an encoding loses is encoded with the next one.

    The name is the codec's with ``+feedback``, and the encodings are the codec's own. The caller keeps a ``residual``
    of :meth:`residual_size` elements for each tensor, zero at first.

    Source: Seide et al., *1-bit stochastic gradient descent* (2014); Karimireddy et al., *Error feedback fixes
    SignSGD* (2019).
    """

    fidelity = Fidelity.APPROXIMATE

    def __init__(self, codec: Codec) -> None:
        self.name = f"{codec.name}+feedback"
        self._codec = codec

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        return self._codec.plan(dtype, shape)

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
        if residual is None and self.residual_size(dtype, array.shape):
            raise ValueError(f"the codec {self.name!r} needs a residual of {array.size} elements, and was given none")
        return self._codec.encode(array, dtype, seed=seed, slot=slot, residual=residual, threads=threads)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        raise Corruption(f"no tensor is encoded by {self.name!r} itself: it names {self._codec.name!r}")

    def residual_size(self, dtype: str, shape: Sequence[int]) -> int:
        return math.prod(shape) if dtype in FLOATS else 0
