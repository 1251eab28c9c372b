"""Weighted sums: as wide arithmetic has them, with nothing fused, and no weight that fp32 cannot hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tiercheck import kernels

FORMS = pytest.mark.parametrize("by", ["reference", "numba"])


def some(seed: int, size: int = 5000) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@FORMS
def test_a_weighted_sum_is_one_call_for_each_tensor(by: str) -> None:
    tensors, weights = [some(at) for at in range(3)], (0.2, 0.5, 0.3)
    total = np.zeros(5000, np.float32)
    for tensor, weight in zip(tensors, weights, strict=True):
        kernels.accumulate.by(by)(tensor, weight, total, threads=2)
    wide = sum(weight * tensor.astype(np.float64) for tensor, weight in zip(tensors, weights, strict=True))
    assert np.abs(total - wide).max() < 1e-6


@FORMS
def test_product_and_sum_are_each_rounded(by: str) -> None:
    values, total = np.array([1 + 2.0**-12], np.float32), np.array([-(1 + 2.0**-11)], np.float32)
    kernels.accumulate.by(by)(values, 1 + 2.0**-12, total)
    assert total[0] == 0, "a fused operation would leave 2**-24"


@FORMS
def test_bf16_patterns_are_their_values(by: str) -> None:
    numbers = some(1).astype(ml_dtypes.bfloat16)
    totals = [some(2), some(2)]
    kernels.accumulate.by(by)(numbers.view(np.uint16), 0.7, totals[0])
    kernels.accumulate.by(by)(numbers.astype(np.float32), 0.7, totals[1])
    assert totals[0].tobytes() == totals[1].tobytes()


@FORMS
def test_a_weight_of_one_copies_and_the_values_are_kept(by: str) -> None:
    values, total = some(3), np.zeros(5000, np.float32)
    before = values.copy()
    kernels.accumulate.by(by)(values, 1.0, total)
    assert total.tobytes() == values.tobytes() == before.tobytes()


@FORMS
@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e39])
def test_a_weight_that_fp32_cannot_hold_is_refused(by: str, weight: float) -> None:
    total = some(4)
    with pytest.raises(ValueError, match="finite fp32"):
        kernels.accumulate.by(by)(some(3), weight, total)
    assert total.tobytes() == some(4).tobytes()
    with pytest.raises(ValueError, match="as many elements"):
        kernels.accumulate.by(by)(some(3, 7), 1.0, total)
