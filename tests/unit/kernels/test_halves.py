"""Gradients in half precision, as fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tiercheck import kernels
from tiercheck.errors import ConfigurationError
from tiercheck.kernels import HalfGradient, widened
from tiercheck.kernels.reference.scaled import SCALE_MAX

PATTERNS = np.arange(1 << 16, dtype=np.uint16)
BACKENDS = ("reference", "numba")


def test_every_bf16_pattern_becomes_its_fp32_number() -> None:
    expected = PATTERNS.astype(np.uint32) << 16
    room = np.ones(PATTERNS.size, np.float32)
    for found in (widened(HalfGradient(PATTERNS)), widened(HalfGradient(PATTERNS), room)):
        assert found.view(np.uint32).tolist() == expected.tolist()
    assert widened(HalfGradient(PATTERNS), room) is room


@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
@pytest.mark.parametrize("scale", [float(np.float32(0.7)), 3.0, 2.0**-20])
@pytest.mark.parametrize("by", BACKENDS)
def test_a_scale_multiplies_each(dtype: Any, scale: float, by: str) -> None:
    halves = PATTERNS.view(dtype)
    expected = kernels.widen_scaled.by("reference")(halves, scale)
    room = np.zeros(PATTERNS.size, np.float32)
    for found in (kernels.widen_scaled.by(by)(halves, scale), kernels.widen_scaled.by(by)(halves, scale, room)):
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)) or same_numbers(found, expected)
    piece = HalfGradient(halves, scale).piece(100, 30_000)
    assert same_numbers(widened(piece), expected[100:30_000])
    assert np.shares_memory(piece.halves, halves)


def same_numbers(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Arithmetic does not keep the payload of a NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


@pytest.mark.parametrize("by", BACKENDS)
def test_memory_of_another_length_is_refused(by: str) -> None:
    for out in (np.zeros(3, np.float32), np.zeros(5, np.float32)):
        with pytest.raises(ValueError, match="4"):
            kernels.widen.by(by)(PATTERNS[:4], out)
        with pytest.raises(ValueError, match="4"):
            kernels.widen_scaled.by(by)(PATTERNS[:4], 0.5, out)
    with pytest.raises(ValueError, match="scale"):
        kernels.widen_scaled.by(by)(PATTERNS[:4], 4 * SCALE_MAX)


@pytest.mark.parametrize(
    ("halves", "scale", "message"),
    [
        (np.zeros(4, np.float32), None, "1-D float32"),
        (np.zeros(4, np.float16), None, "1-D float16"),
        (np.zeros((2, 2), np.uint16), None, "2-D uint16"),
        (np.zeros(8, np.uint16)[::2], None, "contiguous"),
        (np.zeros(9, np.uint8)[1:].view(np.uint16), 0.5, "aligned"),
    ],
)
def test_other_arrays_are_refused(halves: NDArray[Any], scale: float | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HalfGradient(halves, scale)
