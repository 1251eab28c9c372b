"""The kernels in NumPy: slow, readable, and the specification of every other implementation.

Arrays are 1-D, contiguous and aligned. ``threads`` is taken as everywhere, and nothing runs on another thread.
"""

from __future__ import annotations

from tiercheck.kernels.reference.adam import fma, replay_fused_adam
from tiercheck.kernels.reference.bfloat16 import is_bfloat16, lose_bfloat16, narrow_into, round_bfloat16_into, widen
from tiercheck.kernels.reference.blocks import BLOCK, NONFINITE_CODE, dequantise, quantise_into
from tiercheck.kernels.reference.compaction import (
    ELEMENTS_MAX,
    SAMPLES,
    compact,
    compact_into,
    select_threshold,
    threshold_bits,
)
from tiercheck.kernels.reference.exponents import (
    pack_exponents,
    packed_bytes_max,
    split_and_pack_exponents,
    unpack_exponents,
)
from tiercheck.kernels.reference.fp16 import from_half, to_half
from tiercheck.kernels.reference.nf4 import dequantise_nf4, quantise_nf4_into
from tiercheck.kernels.reference.onebit import ONEBIT_BLOCK, dequantise_onebit, quantise_onebit_into
from tiercheck.kernels.reference.planes import join_exponents, split_exponents
from tiercheck.kernels.reference.scatter import scatter, scatter_add, settle

__all__ = [
    "BLOCK",
    "ELEMENTS_MAX",
    "NONFINITE_CODE",
    "ONEBIT_BLOCK",
    "SAMPLES",
    "compact",
    "compact_into",
    "dequantise",
    "dequantise_nf4",
    "dequantise_onebit",
    "fma",
    "from_half",
    "is_bfloat16",
    "join_exponents",
    "lose_bfloat16",
    "narrow_into",
    "pack_exponents",
    "packed_bytes_max",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
    "replay_fused_adam",
    "round_bfloat16_into",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "split_and_pack_exponents",
    "split_exponents",
    "threshold_bits",
    "to_half",
    "unpack_exponents",
    "widen",
]
