"""The kernels in Numba. They give the bits of :mod:`tiercheck.kernels.reference`.

Compiled on first use and cached on disk: call :func:`tiercheck.kernels.warm_up` off the critical path. Every
kernel releases the GIL and runs on the calling thread. ``fastmath`` is off and ``error_model`` is ``numpy``, without
which the check for a zero divisor keeps the loops from being vectorised.
"""

from __future__ import annotations

from tiercheck.kernels.cpu.adam import replay_fused_adam
from tiercheck.kernels.cpu.bfloat16 import is_bfloat16, narrow_into, widen
from tiercheck.kernels.cpu.blocks import dequantise, quantise_into
from tiercheck.kernels.cpu.compaction import compact

__all__ = ["compact", "dequantise", "is_bfloat16", "narrow_into", "quantise_into", "replay_fused_adam", "widen"]
