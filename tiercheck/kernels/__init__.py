"""Numeric kernels: arrays in, arrays out. They know nothing of tiers, and import torch and Numba lazily.

:mod:`~tiercheck.kernels.reference` (NumPy) is the specification; :mod:`~tiercheck.kernels.cpu` (Numba) gives the
same bits. Where Numba is installed it runs; ``by="reference"`` or ``by="numba"`` chooses, and a choice that
cannot be had raises :class:`~tiercheck.errors.ConfigurationError`.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import reference
from tiercheck.kernels.adam import AdamStep, reason_not_replayable
from tiercheck.kernels.reference import BLOCK, NONFINITE_CODE, select_threshold
from tiercheck.kernels.replay import Replay, supports

__all__ = [
    "BLOCK",
    "NONFINITE_CODE",
    "AdamStep",
    "Replay",
    "compact",
    "dequantise",
    "is_bfloat16",
    "narrow",
    "narrow_into",
    "quantise",
    "quantise_into",
    "reason_not_replayable",
    "select_threshold",
    "supports",
    "warm_up",
    "widen",
]

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What each implementation of the kernels offers."""

    def compact(
        self, values: NDArray[np.float32], threshold: float
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]: ...
    def quantise_into(
        self, values: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]
    ) -> None: ...
    def dequantise(self, codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]: ...
    def is_bfloat16(self, values: NDArray[np.float32]) -> bool: ...
    def narrow_into(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None: ...
    def widen(self, patterns: NDArray[np.uint16]) -> NDArray[np.float32]: ...


@cache
def backend(by: str | None) -> Backend:
    numba_is_here = importlib.util.find_spec("numba") is not None
    if by == "numba" or (by is None and numba_is_here):
        if not numba_is_here:
            raise ConfigurationError("the numba kernels were asked for, and numba is not installed: pip install numba")
        from tiercheck.kernels import cpu

        return cast(Backend, cpu)
    if by not in (None, "reference"):
        raise ConfigurationError(f"there are no {by!r} kernels: choose numba or reference")
    if by is None:
        logger.warning("numba is not installed: the kernels run in NumPy, several times slower")
    return cast(Backend, reference)


def compact(
    values: NDArray[np.float32], threshold: float, *, by: str | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """See :func:`tiercheck.kernels.reference.compact`."""
    return backend(by).compact(values, threshold)


def quantise(values: NDArray[np.float32], *, by: str | None = None) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes and scales in arrays of their own; see :func:`tiercheck.kernels.reference.quantise_into`."""
    codes, scales = np.empty(values.size, np.int8), np.empty(-(-values.size // BLOCK), np.float32)
    quantise_into(values, codes, scales, by=by)
    return codes, scales


def quantise_into(
    values: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32], *, by: str | None = None
) -> None:
    """See :func:`tiercheck.kernels.reference.quantise_into`. ``ValueError`` where the outputs' sizes are not right."""
    check_blocks(codes, scales)
    if codes.size != values.size:
        raise ValueError(f"{values.size} values do not fit {codes.size} codes")
    backend(by).quantise_into(values, codes, scales)


def check_blocks(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    if scales.size != -(-codes.size // BLOCK):
        raise ValueError(f"{codes.size} codes need {-(-codes.size // BLOCK)} scales, not {scales.size}")


def dequantise(codes: NDArray[np.int8], scales: NDArray[np.float32], *, by: str | None = None) -> NDArray[np.float32]:
    """See :func:`tiercheck.kernels.reference.dequantise`."""
    check_blocks(codes, scales)
    return backend(by).dequantise(codes, scales)


def is_bfloat16(values: NDArray[np.float32], *, by: str | None = None) -> bool:
    """Whether the low 16 bits of every fp32 value are zero, so that bf16 holds it exactly."""
    return backend(by).is_bfloat16(values)


def narrow_into(values: NDArray[np.float32], out: NDArray[np.uint16], *, by: str | None = None) -> None:
    """Write the bf16 patterns of fp32 ``values``; exact where :func:`is_bfloat16`, which the caller has asked."""
    if out.size != values.size:
        raise ValueError(f"{values.size} values do not fit {out.size} patterns")
    backend(by).narrow_into(values, out)


def narrow(values: NDArray[np.float32], *, by: str | None = None) -> NDArray[np.uint16]:
    """The bf16 patterns of fp32 values that are exactly bf16; ``ValueError`` where one is not."""
    if not is_bfloat16(values, by=by):
        raise ValueError("the values are not all exactly bf16; test with is_bfloat16 first")
    out = np.empty(values.size, np.uint16)
    narrow_into(values, out, by=by)
    return out


def widen(patterns: NDArray[np.uint16], *, by: str | None = None) -> NDArray[np.float32]:
    """The fp32 values of bf16 patterns. The inverse of :func:`narrow`."""
    return backend(by).widen(patterns)


def warm_up() -> None:
    """Compile (or load from the cache) every kernel, so that none compiles while training waits."""
    values = np.linspace(-1, 1, 2 * BLOCK, dtype=np.float32)
    dequantise(*quantise(values))
    compact(values, 0.5)
    is_bfloat16(values)
    narrow_into(values, np.empty(values.size, np.uint16))
    widen(np.zeros(8, np.uint16))
    if importlib.util.find_spec("numba") is None:
        return
    from tiercheck.kernels import cpu

    state = [np.zeros(8, np.float32) for _ in range(3)]
    step = AdamStep(step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=False)
    cpu.replay_fused_adam(state[0], state[1], state[2], [values[:8]], [step], contracted=True)
    if importlib.util.find_spec("torch") is not None:
        from tiercheck.kernels import torch_tiles

        torch_tiles.replay_adam_with_numba(state[0], state[1], state[2], [values[:8]], [step], contracted=True)
