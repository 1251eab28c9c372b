"""Numeric kernels: arrays in, arrays out. They know nothing of tiers, and import torch and Numba on first use.

:mod:`~tiercheck.kernels.catalogue` declares each kernel once. :mod:`~tiercheck.kernels.reference` (NumPy) is the
specification; :mod:`~tiercheck.kernels.cpu` (Numba) and :mod:`~tiercheck.kernels.cuda` (CuPy) give the same bits.

A call takes arrays in host memory and runs the Numba form, or the reference if Numba is not installed.
``kernels.compact.by("reference")`` chooses a form by its name; a form that cannot run here raises
:class:`~tiercheck.errors.ConfigurationError`. The CUDA forms are called by :mod:`tiercheck.streams.device.cuda` and
:mod:`tiercheck.streams.replay.on_device`.
"""

from __future__ import annotations

from tiercheck.kernels import catalogue
from tiercheck.kernels.adam import AdamStep, SparseGradient
from tiercheck.kernels.catalogue import *  # noqa: F403  its __all__ is the only list of the kernels
from tiercheck.kernels.gradients import HalfGradient
from tiercheck.kernels.halves import widened
from tiercheck.kernels.reference.blocks import BLOCK, NONFINITE_CODE
from tiercheck.kernels.reference.compaction import ELEMENTS_MAX, SAMPLES, largest_of
from tiercheck.kernels.reference.exponents import packed_bytes_max
from tiercheck.kernels.reference.onebit import ONEBIT_BLOCK
from tiercheck.kernels.registry import KERNELS, Kernel, warm_up
from tiercheck.kernels.sgd import SgdStep

__all__ = [
    "BLOCK",
    "ELEMENTS_MAX",
    "KERNELS",
    "NONFINITE_CODE",
    "ONEBIT_BLOCK",
    "SAMPLES",
    "AdamStep",
    "HalfGradient",
    "Kernel",
    "SgdStep",
    "SparseGradient",
    "largest_of",
    "packed_bytes_max",
    "warm_up",
    "widened",
]
__all__ += catalogue.__all__
