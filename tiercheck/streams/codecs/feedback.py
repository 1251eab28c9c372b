"""Error feedback: what an encoding loses is encoded with the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import Corruption
from tiercheck.kernels import Kernel
from tiercheck.named import format_text, options_of
from tiercheck.streams.codecs.encoding import FLOATS, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.types import Fidelity

__all__ = ["SUFFIX", "Feedback"]

SUFFIX = "+feedback"


@dataclass(frozen=True)
class Feedback(Codec):
    """An approximate codec with error feedback.

    Its name is the codec's with ``+feedback``, its options are the codec's, and the encodings are the codec's own. The
    caller keeps a ``residual`` of :meth:`residual_size` elements for each tensor, zero at first.

    Source: Seide et al., *1-bit stochastic gradient descent* (2014); Karimireddy et al., *Error feedback fixes
    SignSGD* (2019).
    """

    codec: Codec
    fidelity = Fidelity.APPROXIMATE

    @property
    def name(self) -> str:  # type: ignore[override]  # the one codec whose name is not that of its class
        return self.codec.name + SUFFIX

    @property
    def text(self) -> str:
        return format_text(self.name, options_of(self.codec, f"codec {self.name!r}"))

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        return self.codec.bound(values)

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        return self.codec.plan(dtype, shape)

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
        return self.codec.encode(array, dtype, seed=seed, slot=slot, residual=residual, threads=threads)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        raise Corruption(f"no tensor is encoded by {self.name!r} itself: it names {self.codec.name!r}")

    def residual_size(self, dtype: str, shape: Sequence[int]) -> int:
        return math.prod(shape) if dtype in FLOATS and dtype in self.codec.dtypes else 0

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return self.codec.kernels_used()
