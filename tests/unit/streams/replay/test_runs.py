"""Gradients as they are stored, on their way to an optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiercheck.kernels import HalfGradient, widened
from tiercheck.streams.replay.runs import wide

PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(np.uint16, None), (np.uint16, 0.7), (np.float16, 0.7), (np.float16, 1.5)]
)
def test_torch_makes_the_numbers_that_kernels_make(dtype: Any, scale: float | None) -> None:
    gradient = HalfGradient(PATTERNS.view(dtype), None if scale is None else float(np.float32(scale)))
    ours, kernels = wide(gradient).numpy(), widened(gradient)
    if scale is None:
        assert ours.view(np.uint32).tolist() == kernels.view(np.uint32).tolist()
    same = (ours.view(np.uint32) == kernels.view(np.uint32)) | (np.isnan(ours) & np.isnan(kernels))
    assert same.all()


def test_what_is_stored_is_not_changed() -> None:
    halves = PATTERNS.copy()
    halves.flags.writeable = False
    wide(HalfGradient(halves, 0.5))
    wide(HalfGradient(halves))
    assert halves.tolist() == PATTERNS.tolist()
