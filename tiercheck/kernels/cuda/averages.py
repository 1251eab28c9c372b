"""Weighted sums of tensors on the device, with the bits of :mod:`tiercheck.kernels.reference`."""

from __future__ import annotations

import numpy as np

from tiercheck.kernels.cuda import module
from tiercheck.kernels.cuda.module import DeviceArray, Stream, check, grid_for
from tiercheck.kernels.reference.averages import check_weight

__all__ = ["accumulate"]

THREADS = 256


def accumulate(values: DeviceArray, weight: float, total: DeviceArray, *, stream: Stream) -> None:
    """The reference's ``accumulate``: puts its work into ``stream`` and returns. Errors: ``ValueError`` for a weight
    that fp32 cannot hold, or an array of the wrong dtype or size."""
    check_weight(weight)
    check("total", total, np.float32)
    bfloat16 = values.dtype == np.uint16
    check("values", values, np.uint16 if bfloat16 else np.float32, total.size)
    kernel = "accumulate_bfloat16" if bfloat16 else "accumulate_float32"
    arguments = (values, np.uint64(total.size), np.float32(weight), total)
    module.launch("averages", kernel, grid_for(total.size, THREADS), THREADS, arguments, stream)
