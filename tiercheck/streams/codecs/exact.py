"""The tensor as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import Corruption
from tiercheck.format.container import copy_with_checksum
from tiercheck.kernels import HalfGradient, Kernel
from tiercheck.kernels.reference.scaled import check_scale
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

__all__ = ["SCALE", "Exact", "encode_scaled"]

SCALE = "scale"
"""The scalar of an fp32 tensor that is stored as half-precision numbers: the fp32 pattern of what they are to be
multiplied by."""


class Exact(Codec):
    """The tensor as it is: every bit comes back, the payloads of NaNs included.

    An fp32 tensor whose values are all exactly bf16 (a gradient from bf16 training that was not rescaled) is
    stored as bf16, half the bytes. One whose values are all bf16 or fp16 numbers times one fp32 number, such as a
    clipping coefficient, may be stored as these numbers, if that number is known: its pattern is the scalar ``scale``.
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
        stored = self._stored(encoding, parts)
        return kernels.widened(stored).reshape(encoding.shape) if isinstance(stored, HalfGradient) else stored

    def decode_half(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> HalfGradient | None:
        stored = self._stored(encoding, parts)
        return stored if isinstance(stored, HalfGradient) else None

    def _stored(self, encoding: Encoding, parts: Mapping[str, StoredPart]) -> NDArray[Any] | HalfGradient:
        """Errors: ``Corruption``."""
        scaled = encoding.dtype == "F32" and SCALE in encoding.scalars
        check_description(encoding, DTYPES, (SCALE,) if scaled else ())
        (part,) = check_parts(encoding, parts, ("",))
        if scaled:
            return scaled_halves(encoding, part)
        if encoding.dtype == "F32" and part.dtype == "BF16":
            return HalfGradient(part_array(part, "BF16", encoding.shape).reshape(-1))
        return part_array(part, encoding.dtype, encoding.shape)

    def kernels_used(self) -> tuple[Kernel[..., Any], ...]:
        return kernels.is_bfloat16, kernels.narrow_into, kernels.widen, kernels.widen_scaled


def encode_scaled(values: NDArray[np.float32], fp16: bool, scale: float, codec: Exact, slot: Slot) -> Encoding | None:
    """As half-precision numbers times ``scale``; ``None`` if the values are no such products."""
    flat = flat_array(values, "F32")
    address, size = np.array([flat.ctypes.data], np.int64), np.array([flat.size], np.int64)
    if not kernels.are_scaled(address, size, scale, fp16)[0]:
        return None
    kernels.narrow_scaled_into(flat, scale, slot_array(slot, Part("", "F16" if fp16 else "BF16", values.shape)))
    return Encoding(codec.text, "F32", values.shape, ("",), {SCALE: int(np.float32(scale).view(np.uint32))})


def scaled_halves(encoding: Encoding, part: StoredPart) -> HalfGradient:
    """Errors: ``Corruption`` if what is stored is no half-precision tensor, or its scale no number that a scale is."""
    if part.dtype not in ("BF16", "F16"):
        raise Corruption(f"a tensor with a scale is stored as BF16 or F16, not as {part.dtype!r:.20}")
    halves = part_array(part, part.dtype, encoding.shape).reshape(-1)
    pattern = encoding.scalars[SCALE]
    if not 0 <= pattern < 2**31:
        raise Corruption(f"a scale is the pattern of a positive fp32 number, not {pattern}")
    scale = float(np.uint32(pattern).view(np.float32))
    try:
        check_scale(scale)
    except ValueError as error:
        raise Corruption(f"a tensor's scale is malformed: {error}") from None
    return HalfGradient(halves, scale)
