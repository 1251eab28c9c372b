"""The kernels for NVIDIA GPUs, on CuPy arrays.

The specification is :mod:`tiercheck.kernels.reference`: integers, codes, indices with their order, and replays have the
same bits. Gradients on a GPU are encoded by some of them (:mod:`tiercheck.streams.device.cuda`), and steps are replayed
there by those that are certified for the optimizer (:mod:`tiercheck.streams.replay.on_device`).

No function waits for the device, and none allocates on it. The caller allocates results and workspace; a result that is
one number is an array of one element on the device. Every function puts its work into the ``stream`` that it is given
(:func:`low_priority_stream` makes one) and returns. The caller keeps the arrays alive, and does not touch them, until
that work is done. :func:`borrow` makes such an array of a torch tensor without a copy.

The first call of a kernel compiles it; :func:`warm_up` compiles all of them. Importing this package imports CuPy.
"""

from __future__ import annotations

from tiercheck.kernels.cuda.adam import MOST_STEPS, SparseOnDevice, replay_fused_adam
from tiercheck.kernels.cuda.averages import accumulate
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
    keep_largest,
    scatter,
    scatter_add,
    select_threshold,
    settle,
    to_half,
)
from tiercheck.kernels.cuda.exponents import exponents_workspace, pack_exponents, unpack_exponents
from tiercheck.kernels.cuda.gpu_adam import replay_gpu_adam
from tiercheck.kernels.cuda.module import borrow, low_priority_stream, torch_stream, warm_up
from tiercheck.kernels.cuda.patterns import (
    find_low_halves,
    find_scale,
    join_exponents,
    narrow_found_into,
    narrow_into,
    narrow_scaled_into,
    split_exponents,
    widen_into,
    widen_scaled_into,
)

__all__ = [
    "MOST_STEPS",
    "SparseOnDevice",
    "accumulate",
    "borrow",
    "compact_into",
    "compact_workspace",
    "dequantise_into",
    "dequantise_nf4_into",
    "dequantise_onebit_into",
    "exponents_workspace",
    "find_low_halves",
    "find_scale",
    "from_half",
    "join_exponents",
    "keep_largest",
    "low_priority_stream",
    "narrow_found_into",
    "narrow_into",
    "narrow_scaled_into",
    "pack_exponents",
    "quantise_into",
    "quantise_nf4_into",
    "quantise_onebit_into",
    "replay_fused_adam",
    "replay_gpu_adam",
    "scatter",
    "scatter_add",
    "select_threshold",
    "settle",
    "split_exponents",
    "to_half",
    "torch_stream",
    "unpack_exponents",
    "warm_up",
    "widen_into",
    "widen_scaled_into",
]
