"""The tensor as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.format.container import copy_with_checksum
from tiercheck.kernels import Kernel
from tiercheck.streams.codecs.checks import (
    check_description,
    check_dtype,
    check_parts,
    flat_array,
    part_array,
    refuse_residual,
    slot_array,
)
from tiercheck.streams.codecs.encoding import DTYPES, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.types import Fidelity

__all__ = ["Exact"]


class Exact(Codec):
    """The tensor as it is: every bit comes back, the payloads of NaNs included.

    An fp32 tensor whose values are all exactly bf16 (a gradient from bf16 training that was not rescaled) is
    stored as bf16, half the bytes.
    """

    name = "exact"
    fidelity = Fidelity.EXACT
    dtypes = DTYPES

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, DTYPES, self.name)
        return (Part("", dtype, tuple(shape)),)

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
        check_dtype(dtype, DTYPES, self.name)
        refuse_residual(residual, self.name)
        flat, shape = flat_array(array, dtype), tuple(array.shape)
        if dtype == "F32" and flat.size and kernels.is_bfloat16(flat):
            kernels.narrow_into(flat, slot_array(slot, Part("", "BF16", shape)))
            return Encoding(self.text, dtype, shape, ("",))
        memory = slot_array(slot, Part("", dtype, shape)).view(np.uint8).data
        checksum = copy_with_checksum(memory, flat.view(np.uint8).data)
        return Encoding(self.text, dtype, shape, ("",), checksums={"": checksum})

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        check_description(encoding, DTYPES, ())
        (part,) = check_parts(encoding, parts, ("",))
        narrowed = encoding.dtype == "F32" and part.dtype == "BF16"
        patterns = part_array(part, "BF16" if narrowed else encoding.dtype, encoding.shape)
        return kernels.widen(patterns.reshape(-1)).reshape(encoding.shape) if narrowed else patterns

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return kernels.is_bfloat16, kernels.narrow_into, kernels.widen
