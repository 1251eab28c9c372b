"""The kernels for NVIDIA GPUs, on CuPy arrays.

The specification is :mod:`tiercheck.kernels.reference`: integers, codes, indices and their order, and the replay are
the same to the bit. What differs is who waits and who allocates: nobody. Results go to arrays that the caller has
allocated, workspace included; what the host would have to wait for stays on the device, in arrays of one element; and
every function puts its work into the ``stream`` it is given (:func:`low_priority_stream` makes one) and returns.
Arrays must live, and be left alone, until that work is done. :func:`borrow` turns a torch tensor into such an array
without copying it.

The first call of a kernel compiles it; :func:`warm_up` does so for all. Importing this package imports CuPy.
"""

from __future__ import annotations

from tiercheck.kernels.cuda.adam import (
    MOST_STEPS,
    TORCH_FORMS,
    SparseOnDevice,
    replay_fused_adam,
    replay_torch_fused_adam,
)
from tiercheck.kernels.cuda.blocks import (
    dequantise_into,
    dequantise_nf4_into,
    dequantise_onebit_into,
    quantise_into,
    quantise_nf4_into,
    quantise_onebit_into,
)
from tiercheck.kernels.cuda.compaction import (
    compact_into,
    compact_workspace,
    from_half,
    scatter,
    scatter_add,
    select_threshold,
    settle,
    to_half,
)
from tiercheck.kernels.cuda.exponents import exponents_workspace, pack_exponents, unpack_exponents
from tiercheck.kernels.cuda.module import borrow, low_priority_stream, warm_up
from tiercheck.kernels.cuda.patterns import find_low_halves, join_exponents, narrow_into, split_exponents, widen_into

__all__ = [
    "MOST_STEPS",
    "TORCH_FORMS",
    "SparseOnDevice",
    "borrow",
    "compact_into",
    "compact_workspace",
    "dequantise_into",
    "dequantise_nf4_into",
    "dequantise_onebit_into",
    "exponents_workspace",
    "find_low_halves",
    "from_half",
    "join_exponents",
    "low_priority_stream",
    "narrow_into",
    "pack_exponents",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
    "replay_fused_adam",
    "replay_torch_fused_adam",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "split_exponents",
    "to_half",
    "unpack_exponents",
    "warm_up",
    "widen_into",
]
