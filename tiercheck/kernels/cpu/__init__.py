"""The kernels in Numba. They give the bits of :mod:`tiercheck.kernels.reference`.

Compiled on first use and cached on disk: call :func:`tiercheck.kernels.warm_up` off the critical path. Every
kernel releases the GIL and runs on the calling thread, and on no more than ``threads`` where it takes that.
``fastmath`` is off and ``error_model`` is ``numpy``, without which the check for a zero divisor keeps the loops from
being vectorised.
"""

from __future__ import annotations

from tiercheck.kernels.cpu.adam import replay_fused_adam
from tiercheck.kernels.cpu.bfloat16 import is_bfloat16, lose_bfloat16, narrow_into, round_bfloat16_into, widen
from tiercheck.kernels.cpu.blocks import dequantise, quantise_into
from tiercheck.kernels.cpu.compaction import compact, compact_into, select_threshold
from tiercheck.kernels.cpu.exponents import pack_exponents, split_and_pack_exponents, unpack_exponents
from tiercheck.kernels.cpu.fp16 import from_half, to_half
from tiercheck.kernels.cpu.nf4 import dequantise_nf4, quantise_nf4_into
from tiercheck.kernels.cpu.onebit import dequantise_onebit, quantise_onebit_into
from tiercheck.kernels.cpu.planes import join_exponents, split_exponents
from tiercheck.kernels.cpu.scatter import scatter, scatter_add, settle

__all__ = [
    "compact",
    "compact_into",
    "dequantise",
    "dequantise_nf4",
    "dequantise_onebit",
    "from_half",
    "is_bfloat16",
    "join_exponents",
    "lose_bfloat16",
    "narrow_into",
    "pack_exponents",
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
    "to_half",
    "unpack_exponents",
    "widen",
]
