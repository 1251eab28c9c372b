"""fp32 without its lowest bytes: a codec of a few lines, ``truncated[?kept=2]``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.streams.codecs import DTYPES, Codec, Encoding, Part, Slot, StoredPart
from tiercheck.streams.codecs.checks import (
    check_description,
    check_dtype,
    check_parts,
    check_residual,
    flat_array,
    part_array,
    slot_array,
)
from tiercheck.types import Fidelity

QUIET_NAN = np.uint32(0x00400000)


@dataclass(frozen=True)
class Truncated(Codec):
    """Of each fp32, the highest bytes.

    - ``kept``: how many of its four bytes, 2 or 3.
    """

    name = "truncated"
    fidelity = Fidelity.APPROXIMATE
    dtypes = MappingProxyType({"F32": DTYPES["F32"]})
    feedback = True
    kept: int = 3

    def __post_init__(self) -> None:
        if self.kept not in (2, 3):
            raise ValueError(f"kept must be 2 or 3, not {self.kept}")

    def bound(self, values: NDArray[np.float32]) -> NDArray[np.float64]:
        relative, least = 2.0 ** (9 - 8 * self.kept), 2.0 ** (8 * (4 - self.kept) - 149)
        return np.where(np.isfinite(values), np.abs(values.astype(np.float64)) * relative + least, 0.0)

    def plan(self, dtype: str, shape: Sequence[int]) -> tuple[Part, ...]:
        check_dtype(dtype, self.dtypes, self.name)
        return (Part("bytes", "U8", (math.prod(shape), self.kept)),)

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
        (part,) = self.plan(dtype, array.shape)
        check_residual(residual, array.size)
        with np.errstate(all="ignore"):
            values = flat_array(array, dtype) if residual is None else flat_array(array, dtype) + residual
        bits = np.where(np.isnan(values), values.view(np.uint32) | QUIET_NAN, values.view(np.uint32)).astype("<u4")
        highest = bits.view(np.uint8).reshape(-1, 4)[:, 4 - self.kept :]
        slot_array(slot, part)[:] = highest.reshape(-1)
        decoded = self.widened(highest)
        if residual is not None:
            with np.errstate(all="ignore"):
                lost = values - decoded
            residual[:] = np.where(np.isfinite(lost), lost, np.float32(0))
        scalars = {"nonfinite": int(np.count_nonzero(~np.isfinite(decoded)))}
        return Encoding(self.text, dtype, tuple(array.shape), ("bytes",), scalars)

    def decode(self, encoding: Encoding, parts: Mapping[str, StoredPart], *, threads: int = 1) -> NDArray[Any]:
        check_description(encoding, self.dtypes, ("nonfinite",))
        (stored,) = check_parts(encoding, parts, ("bytes",))
        highest = part_array(stored, "U8", (math.prod(encoding.shape), self.kept))
        return self.widened(highest).reshape(encoding.shape)

    def widened(self, highest: NDArray[np.uint8]) -> NDArray[np.float32]:
        whole = np.zeros((len(highest), 4), np.uint8)
        whole[:, 4 - self.kept :] = highest
        return whole.reshape(-1).view("<f4")
