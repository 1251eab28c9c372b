"""Adam and AdamW on the device, as the optimizers that run there round them: all steps of a launch in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.adam import AdamStep
from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.adam import MOST_STEPS, SHARED, SparseOnDevice, check_arrays, launches, table_of
from tiercheck.kernels.cuda.module import DeviceArray, Stream, grid_for
from tiercheck.kernels.gpu_adam import ROW, Powers, Rounding, Scheme, check_steps, rows_of

__all__ = ["replay_gpu_adam"]

THREADS, TILE = 256, 1024
"""Threads of a block, and the elements that they have under way. The CUDA source has the same numbers."""

TABLE = np.dtype([*SHARED, ("steps", ROW, MOST_STEPS)], align=True)

PLACEMENT = np.dtype([(name, np.uint32) for name in ("first", "second", "reciprocal")])


def replay_gpu_adam(
    param: DeviceArray,
    exp_avg: DeviceArray,
    exp_avg_sq: DeviceArray,
    gradients: Sequence[DeviceArray],
    steps: Sequence[AdamStep],
    *,
    max_exp_avg_sq: DeviceArray | None = None,
    rounding: Rounding,
    powers: Powers,
    stream: Stream,
) -> None:
    """:func:`tiercheck.kernels.replay_gpu_adam` on the device; the scheme ``FAST`` with the device's approximations.

    Every array is 1-D, contiguous and fp32. One launch takes up to :data:`MOST_STEPS` steps: it reads and writes the
    state once, and keeps an element's in registers meanwhile.

    Raises:
        ConfigurationError: the arrays or the steps do not fit together, a gradient is sparse, or ``powers`` lacks one;
            nothing was changed.
    """
    check_steps(rounding, steps, amsgrad=max_exp_avg_sq is not None)
    if any(isinstance(gradient, SparseOnDevice) for gradient in gradients):
        raise ConfigurationError("this replay takes dense gradients: write a sparse one into zeros first")
    state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if max_exp_avg_sq is not None:
        state["max_exp_avg_sq"] = max_exp_avg_sq
    check_arrays(state, gradients, steps)
    rows = rows_of(rounding, tuple(steps), powers)
    size, begin = int(param.size), 0
    source, kernel = entry_of(rounding)
    placed: Any = np.zeros(1, PLACEMENT)
    for name in ("first", "second", "reciprocal"):
        placed[name] = getattr(rounding, name)
    for some, of_some in launches(gradients, steps):
        table = table_of(TABLE, some)
        table["steps"][0, : len(of_some)] = rows[begin : begin + len(of_some)]
        begin += len(of_some)
        arguments = (param, exp_avg, exp_avg_sq, max_exp_avg_sq, np.uint64(size), placed, table)
        module.launch(source, kernel, grid_for(size, TILE), THREADS, arguments, stream)


def entry_of(rounding: Rounding) -> tuple[str, str]:
    """The source and the ``__global__`` function of a candidate."""
    if rounding.scheme is Scheme.FAST:
        return "fast_adam", "replay_fast"
    if rounding.scheme is Scheme.OPERATIONS:
        return "gpu_adam", "replay_operations"
    return "gpu_adam", f"replay_{rounding.scheme.name.lower()}_{64 if rounding.wide else 32}"
