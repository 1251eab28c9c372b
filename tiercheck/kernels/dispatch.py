"""The kernels by name, whichever implementation runs: arrays are checked here where an implementation trusts them.

Each function is specified by the one of the same name in :mod:`tiercheck.kernels.reference`. ``threads`` is the most
threads that may run, the caller's included; no result depends on it.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import reference
from tiercheck.kernels.reference import BLOCK
from tiercheck.kernels.reference.compaction import Values

__all__ = [
    "Backend",
    "backend",
    "compact",
    "compact_into",
    "dequantise",
    "dequantise_nf4",
    "dequantise_onebit",
    "from_half",
    "is_bfloat16",
    "join_exponents",
    "lose_bfloat16",
    "narrow",
    "narrow_into",
    "pack_exponents",
    "quantise",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
    "round_bfloat16_into",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "split_and_pack_exponents",
    "split_exponents",
    "to_half",
    "unpack_exponents",
    "widen",
]

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]
MaybeFloats = NDArray[np.float32] | None


class Backend(Protocol):
    """What each implementation of the kernels offers."""

    def select_threshold(
        self, values: Values, ratio: float, seed: int, *, residual: MaybeFloats = None, threads: int = 1
    ) -> float: ...
    def compact(
        self, values: Values, threshold: float, *, residual: MaybeFloats = None, threads: int = 1
    ) -> tuple[NDArray[np.uint32], Floats]: ...
    def compact_into(
        self,
        values: Values,
        threshold: float,
        indices: NDArray[np.uint32],
        survivors: Floats,
        *,
        residual: MaybeFloats = None,
        threads: int = 1,
    ) -> int: ...
    def to_half(self, survivors: Floats, out: NDArray[np.float16]) -> int: ...
    def from_half(self, halves: NDArray[np.float16], exponent: int) -> Floats: ...
    def settle(self, residual: Floats, indices: NDArray[np.uint32], survivors: Floats, decoded: Floats) -> None: ...
    def scatter(self, indices: NDArray[np.uint32], values: Floats, out: Floats) -> None: ...
    def scatter_add(self, indices: NDArray[np.uint32], values: Floats, out: Floats) -> None: ...
    def quantise_into(
        self,
        values: Floats,
        codes: NDArray[np.int8],
        scales: Floats,
        *,
        before: MaybeFloats = None,
        rooted: bool = False,
        residual: MaybeFloats = None,
        threads: int = 1,
    ) -> bool: ...
    def dequantise(self, codes: NDArray[np.int8], scales: Floats, *, threads: int = 1) -> Floats: ...
    def quantise_nf4_into(
        self,
        values: Floats,
        codes: NDArray[np.uint8],
        scales: Floats,
        *,
        before: MaybeFloats = None,
        rooted: bool = False,
        residual: MaybeFloats = None,
        threads: int = 1,
    ) -> bool: ...
    def dequantise_nf4(self, codes: NDArray[np.uint8], scales: Floats, size: int, *, threads: int = 1) -> Floats: ...
    def quantise_onebit_into(
        self,
        values: Floats,
        bits: NDArray[np.uint8],
        scales: NDArray[np.uint16],
        *,
        before: MaybeFloats = None,
        rooted: bool = False,
        residual: MaybeFloats = None,
        threads: int = 1,
    ) -> bool: ...
    def dequantise_onebit(
        self, bits: NDArray[np.uint8], scales: NDArray[np.uint16], size: int, *, threads: int = 1
    ) -> Floats: ...
    def split_exponents(
        self, patterns: NDArray[Any], exponents: NDArray[np.uint8], rest: NDArray[np.uint8], *, threads: int = 1
    ) -> None: ...
    def join_exponents(
        self, exponents: NDArray[np.uint8], rest: NDArray[np.uint8], patterns: NDArray[Any], *, threads: int = 1
    ) -> None: ...
    def pack_exponents(self, exponents: NDArray[np.uint8], packed: NDArray[np.uint8]) -> int: ...
    def split_and_pack_exponents(
        self, patterns: NDArray[Any], rest: NDArray[np.uint8], packed: NDArray[np.uint8]
    ) -> int: ...
    def unpack_exponents(self, packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> None: ...
    def is_bfloat16(self, values: Floats) -> bool: ...
    def narrow_into(self, values: Floats, out: NDArray[np.uint16]) -> None: ...
    def widen(self, patterns: NDArray[np.uint16]) -> Floats: ...
    def round_bfloat16_into(self, values: Floats, out: NDArray[np.uint16], *, threads: int = 1) -> None: ...
    def lose_bfloat16(self, values: Floats, residual: Floats, *, threads: int = 1) -> None: ...


@cache
def backend(by: str | None) -> Backend:
    """The implementation of this name, or for ``None`` the fastest that is installed."""
    numba_is_here = importlib.util.find_spec("numba") is not None
    if by == "numba" or (by is None and numba_is_here):
        if not numba_is_here:
            raise ConfigurationError("the numba kernels were asked for, and numba is not installed: pip install numba")
        from tiercheck.kernels import cpu

        return cast(Backend, cpu)
    if by not in (None, "reference"):
        raise ConfigurationError(f"there are no {by!r} kernels for arrays in host memory: choose numba or reference")
    if by is None:
        logger.warning("numba is not installed: the kernels run in NumPy, several times slower")
    return cast(Backend, reference)


def implementation(array: object, by: str | None) -> Backend:
    """Where the array is decides. Errors: ``ConfigurationError`` for one on a GPU."""
    if hasattr(array, "__cuda_array_interface__"):
        raise ConfigurationError(
            "the array is on a GPU, where a kernel needs a stream and the caller's buffers: call tiercheck.kernels.cuda"
        )
    return backend(by)


def select_threshold(
    values: Values,
    ratio: float,
    seed: int,
    *,
    residual: MaybeFloats = None,
    threads: int = 1,
    by: str | None = None,
) -> float:
    return implementation(values, by).select_threshold(values, ratio, seed, residual=residual, threads=threads)


def compact(
    values: Values, threshold: float, *, residual: MaybeFloats = None, threads: int = 1, by: str | None = None
) -> tuple[NDArray[np.uint32], Floats]:
    return implementation(values, by).compact(values, threshold, residual=residual, threads=threads)


def compact_into(
    values: Values,
    threshold: float,
    indices: NDArray[np.uint32],
    survivors: Floats,
    *,
    residual: MaybeFloats = None,
    threads: int = 1,
    by: str | None = None,
) -> int:
    return implementation(values, by).compact_into(
        values, threshold, indices, survivors, residual=residual, threads=threads
    )


def to_half(survivors: Floats, out: NDArray[np.float16], *, by: str | None = None) -> int:
    return implementation(survivors, by).to_half(survivors, out)


def from_half(halves: NDArray[np.float16], exponent: int, *, by: str | None = None) -> Floats:
    return implementation(halves, by).from_half(halves, exponent)


def settle(
    residual: Floats, indices: NDArray[np.uint32], survivors: Floats, decoded: Floats, *, by: str | None = None
) -> None:
    implementation(residual, by).settle(residual, indices, survivors, decoded)


def scatter(indices: NDArray[np.uint32], values: Floats, out: Floats, *, by: str | None = None) -> None:
    implementation(indices, by).scatter(indices, values, out)


def scatter_add(indices: NDArray[np.uint32], values: Floats, out: Floats, *, by: str | None = None) -> None:
    implementation(indices, by).scatter_add(indices, values, out)


def quantise(values: Floats, *, threads: int = 1, by: str | None = None) -> tuple[NDArray[np.int8], Floats]:
    """Codes and scales in arrays of their own; see :func:`tiercheck.kernels.reference.quantise_into`."""
    codes, scales = np.empty(values.size, np.int8), np.empty(-(-values.size // BLOCK), np.float32)
    quantise_into(values, codes, scales, threads=threads, by=by)
    return codes, scales


def quantise_into(
    values: Floats,
    codes: NDArray[np.int8],
    scales: Floats,
    *,
    before: MaybeFloats = None,
    rooted: bool = False,
    residual: MaybeFloats = None,
    threads: int = 1,
    by: str | None = None,
) -> bool:
    return implementation(values, by).quantise_into(
        values, codes, scales, before=before, rooted=rooted, residual=residual, threads=threads
    )


def dequantise(codes: NDArray[np.int8], scales: Floats, *, threads: int = 1, by: str | None = None) -> Floats:
    return implementation(codes, by).dequantise(codes, scales, threads=threads)


def quantise_nf4_into(
    values: Floats,
    codes: NDArray[np.uint8],
    scales: Floats,
    *,
    before: MaybeFloats = None,
    rooted: bool = False,
    residual: MaybeFloats = None,
    threads: int = 1,
    by: str | None = None,
) -> bool:
    return implementation(values, by).quantise_nf4_into(
        values, codes, scales, before=before, rooted=rooted, residual=residual, threads=threads
    )


def dequantise_nf4(
    codes: NDArray[np.uint8], scales: Floats, size: int, *, threads: int = 1, by: str | None = None
) -> Floats:
    return implementation(codes, by).dequantise_nf4(codes, scales, size, threads=threads)


def quantise_onebit_into(
    values: Floats,
    bits: NDArray[np.uint8],
    scales: NDArray[np.uint16],
    *,
    before: MaybeFloats = None,
    rooted: bool = False,
    residual: MaybeFloats = None,
    threads: int = 1,
    by: str | None = None,
) -> bool:
    return implementation(values, by).quantise_onebit_into(
        values, bits, scales, before=before, rooted=rooted, residual=residual, threads=threads
    )


def dequantise_onebit(
    bits: NDArray[np.uint8], scales: NDArray[np.uint16], size: int, *, threads: int = 1, by: str | None = None
) -> Floats:
    return implementation(bits, by).dequantise_onebit(bits, scales, size, threads=threads)


def split_exponents(
    patterns: NDArray[Any],
    exponents: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    *,
    threads: int = 1,
    by: str | None = None,
) -> None:
    implementation(patterns, by).split_exponents(patterns, exponents, rest, threads=threads)


def join_exponents(
    exponents: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    patterns: NDArray[Any],
    *,
    threads: int = 1,
    by: str | None = None,
) -> None:
    implementation(exponents, by).join_exponents(exponents, rest, patterns, threads=threads)


def pack_exponents(exponents: NDArray[np.uint8], packed: NDArray[np.uint8], *, by: str | None = None) -> int:
    return implementation(exponents, by).pack_exponents(exponents, packed)


def split_and_pack_exponents(
    patterns: NDArray[Any], rest: NDArray[np.uint8], packed: NDArray[np.uint8], *, by: str | None = None
) -> int:
    return implementation(patterns, by).split_and_pack_exponents(patterns, rest, packed)


def unpack_exponents(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], *, by: str | None = None) -> None:
    implementation(packed, by).unpack_exponents(packed, exponents)


def is_bfloat16(values: Floats, *, by: str | None = None) -> bool:
    """Whether the low 16 bits of every fp32 value are zero, so that bf16 holds it exactly."""
    return implementation(values, by).is_bfloat16(values)


def narrow_into(values: Floats, out: NDArray[np.uint16], *, by: str | None = None) -> None:
    """Write the bf16 patterns of fp32 ``values``; exact where :func:`is_bfloat16`, which the caller has asked."""
    if out.size != values.size:
        raise ValueError(f"{values.size} values do not fit {out.size} patterns")
    implementation(values, by).narrow_into(values, out)


def narrow(values: Floats, *, by: str | None = None) -> NDArray[np.uint16]:
    """The bf16 patterns of fp32 values that are exactly bf16; ``ValueError`` where one is not."""
    if not is_bfloat16(values, by=by):
        raise ValueError("the values are not all exactly bf16; test with is_bfloat16 first")
    out = np.empty(values.size, np.uint16)
    narrow_into(values, out, by=by)
    return out


def widen(patterns: NDArray[np.uint16], *, by: str | None = None) -> Floats:
    """The fp32 values of bf16 patterns. The inverse of :func:`narrow`."""
    return implementation(patterns, by).widen(patterns)


def round_bfloat16_into(values: Floats, out: NDArray[np.uint16], *, threads: int = 1, by: str | None = None) -> None:
    implementation(values, by).round_bfloat16_into(values, out, threads=threads)


def lose_bfloat16(values: Floats, residual: Floats, *, threads: int = 1, by: str | None = None) -> None:
    implementation(values, by).lose_bfloat16(values, residual, threads=threads)
