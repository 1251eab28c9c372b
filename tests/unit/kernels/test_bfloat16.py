"""fp32 rounded to bf16, and what that loses: the reference against another library, and Numba against the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tiercheck import kernels

BACKENDS = ("reference", "numba")
SETTINGS = settings(max_examples=80)
patterns = hnp.arrays(np.uint32, st.integers(0, 700), elements=st.integers(0, 2**32 - 1))
near_ties = st.builds(
    lambda upper, lower: np.array([(high << 16) + low for high, low in zip(upper, lower, strict=False)], np.uint32),
    st.lists(st.integers(0, 0xFFFF), max_size=50),
    st.lists(st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]), max_size=50),
)


def rounded(values: NDArray[np.float32], by: str, threads: int = 1) -> NDArray[np.uint16]:
    out = np.empty(values.size, np.uint16)
    kernels.round_bfloat16_into.by(by)(values, out, threads=threads)
    return out


@given(patterns | near_ties)
@SETTINGS
def test_the_nearest_of_two_the_even_one(bits: NDArray[np.uint32]) -> None:
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    expected[np.isnan(values)] = 0x7FC0
    for by in BACKENDS:
        assert rounded(values, by).tolist() == expected.tolist()


@given(patterns | near_ties, st.integers(0, 2**32 - 1))
@SETTINGS
def test_what_is_lost_is_added_to_the_residual(bits: NDArray[np.uint32], seed: int) -> None:
    values = bits.view(np.float32)
    owed = np.random.default_rng(seed).standard_normal(values.size, dtype=np.float32)
    held = kernels.widen(rounded(values, "reference"))
    with np.errstate(all="ignore"):
        expected = np.where(np.isfinite(held), owed + (values - held), np.float32(0))
    for by in BACKENDS:
        residual = owed.copy()
        kernels.lose_bfloat16.by(by)(values, residual)
        assert residual.tobytes() == expected.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_makes_no_difference(threads: int) -> None:
    for size in (0, 1, 4095, 4096, 4097, 200_003):
        values = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
        assert np.array_equal(rounded(values, "numba", threads), rounded(values, "reference")), size
        residuals = [np.ones(size, np.float32) for _ in BACKENDS]
        for residual, by in zip(residuals, BACKENDS, strict=True):
            kernels.lose_bfloat16.by(by)(values, residual, threads=threads)
        assert np.array_equal(*residuals), size


@pytest.mark.parametrize("by", BACKENDS)
def test_arrays_of_other_sizes_are_refused(by: str) -> None:
    with pytest.raises(ValueError, match="4 values"):
        kernels.round_bfloat16_into.by(by)(np.zeros(4, np.float32), np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match="4 values"):
        kernels.lose_bfloat16.by(by)(np.zeros(4, np.float32), np.zeros(5, np.float32))
