"""Numeric kernels: arrays in, arrays out. They know nothing of tiers, and import torch and Numba lazily.

:mod:`~tiercheck.kernels.reference` (NumPy) is the specification; :mod:`~tiercheck.kernels.cpu` (Numba) gives the
same bits. Where Numba is installed it runs; ``by="reference"`` or ``by="numba"`` chooses, and a choice that
cannot be had raises :class:`~tiercheck.errors.ConfigurationError`.
"""

from __future__ import annotations

from tiercheck.kernels.adam import AdamStep, SparseGradient, reason_not_replayable
from tiercheck.kernels.dispatch import (
    compact,
    compact_into,
    dequantise,
    dequantise_nf4,
    dequantise_onebit,
    from_half,
    is_bfloat16,
    join_exponents,
    lose_bfloat16,
    narrow,
    narrow_into,
    pack_exponents,
    quantise,
    quantise_into,
    quantise_nf4_into,
    quantise_onebit_into,
    round_bfloat16_into,
    scatter,
    scatter_add,
    select_threshold,
    settle,
    split_and_pack_exponents,
    split_exponents,
    to_half,
    unpack_exponents,
    widen,
)
from tiercheck.kernels.reference import (
    BLOCK,
    ELEMENTS_MAX,
    NONFINITE_CODE,
    ONEBIT_BLOCK,
    SAMPLES,
    packed_bytes_max,
)
from tiercheck.kernels.replay import Replay, SgdReplay, supports, supports_sgd
from tiercheck.kernels.sgd import SgdStep, reason_sgd_not_replayable
from tiercheck.kernels.warming import warm_up

__all__ = [
    "BLOCK",
    "ELEMENTS_MAX",
    "NONFINITE_CODE",
    "ONEBIT_BLOCK",
    "SAMPLES",
    "AdamStep",
    "Replay",
    "SgdReplay",
    "SgdStep",
    "SparseGradient",
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
    "packed_bytes_max",
    "quantise",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
    "reason_not_replayable",
    "reason_sgd_not_replayable",
    "round_bfloat16_into",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "split_and_pack_exponents",
    "split_exponents",
    "supports",
    "supports_sgd",
    "to_half",
    "unpack_exponents",
    "warm_up",
    "widen",
]
