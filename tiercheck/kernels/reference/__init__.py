"""The kernels in NumPy: slow, readable, and the specification of every other implementation.

Arrays are 1-D and contiguous.
"""

from __future__ import annotations

from tiercheck.kernels.reference.adam import fma, replay_fused_adam
from tiercheck.kernels.reference.bfloat16 import is_bfloat16, narrow_into, widen
from tiercheck.kernels.reference.blocks import BLOCK, NONFINITE_CODE, dequantise, quantise_into
from tiercheck.kernels.reference.compaction import SAMPLES, compact, select_threshold, threshold_bits

__all__ = [
    "BLOCK",
    "NONFINITE_CODE",
    "SAMPLES",
    "compact",
    "dequantise",
    "fma",
    "is_bfloat16",
    "narrow_into",
    "quantise_into",
    "replay_fused_adam",
    "select_threshold",
    "threshold_bits",
    "widen",
]
