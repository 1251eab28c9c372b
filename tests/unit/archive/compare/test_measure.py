"""Norms of differences, over every dtype that a shard holds."""

from __future__ import annotations

import math

import pytest
import torch

from tiercheck.archive.compare import measure as measuring
from tiercheck.archive.compare.measure import Distance, Flat, measure
from tiercheck.format.index.boxes import Copy
from tiercheck.streams.tensors.as_bytes import DTYPES, NAMES


def distance(before: torch.Tensor, after: torch.Tensor, copy: Copy | None = None) -> Distance:
    found = Distance()
    whole = Copy((before.numel(),), 0, (1,), 0, (1,))
    measure(copy or whole, Flat.of(before, NAMES[before.dtype]), Flat.of(after, NAMES[after.dtype]), found)
    return found


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_is_compared(dtype: torch.dtype) -> None:
    before = torch.tensor([0.0, 1.0, 0.0, 1.0]).to(dtype)
    after = torch.tensor([1.0, 1.0, 0.0, 1.0]).to(dtype)
    found = distance(before, after)
    assert (found.changed, found.not_finite, found.max_abs, found.l2) == (1, 0, 1.0, 1.0)
    assert found.relative == pytest.approx(1 / math.sqrt(2))
    assert distance(before, before.clone()) == Distance(found.elements, squares_before=2.0)


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = torch.randn(2, 50, dtype=torch.float64).unbind()
    whole = distance(before, after)
    assert whole.l2 == pytest.approx(float((after - before).norm()))
    assert whole.relative == pytest.approx(float((after - before).norm() / before.norm()))
    assert whole.max_abs == float((after - before).abs().max())
    monkeypatch.setattr(measuring, "ELEMENTS_AT_ONCE", 7)
    parts = distance(before, after)
    assert (parts.elements, parts.changed, parts.max_abs) == (50, 50, whole.max_abs)
    assert parts.l2 == pytest.approx(whole.l2)


def test_strided_elements_are_compared_where_they_lie() -> None:
    before, after = torch.arange(12.0), torch.arange(12.0).view(3, 4).T.flatten().clone()
    transposed = Copy((3, 4), 0, (1, 3), 0, (4, 1))
    assert distance(before, after, transposed).changed == 0
    after[1] += 2  # which is element (1, 0)
    assert distance(before, after, transposed).max_abs == 2


def test_what_is_not_finite_is_counted_and_keeps_out_of_the_norms() -> None:
    nan, inf = math.nan, math.inf
    found = distance(torch.tensor([nan, 1.0, 2.0, inf, 3.0]), torch.tensor([nan, nan, 2.5, inf, 3.0]))
    assert (found.changed, found.not_finite, found.l2, found.max_abs) == (2, 1, 0.5, 0.5)
    assert found.squares_before == 14.0


def test_the_sign_of_a_zero_is_a_change_of_bits_alone() -> None:
    found = distance(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.changed, found.l2, found.relative) == (1, 0.0, 0.0)


def test_another_dtype_is_compared_by_value() -> None:
    found = distance(torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1.0, 2.5, math.nan], dtype=torch.bfloat16))
    assert (found.changed, found.not_finite, found.max_abs) == (1, 0, 0.5)


def test_a_change_from_zero_has_no_relative_norm() -> None:
    assert math.isinf(distance(torch.zeros(2), torch.ones(2)).relative)
