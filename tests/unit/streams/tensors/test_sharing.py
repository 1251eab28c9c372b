"""What some ranks are to hold alike is brought from its owner to the others, bit for bit, and compared."""

from __future__ import annotations

import pytest
import torch

from tests.unit.runtime.test_group import on_all_ranks
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.streams.tensors import sharing
from tiercheck.streams.tensors.sharing import bring, fingerprints, sum_of_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn]


def tensors(seed: int) -> list[list[torch.Tensor]]:
    """By owner: of all dtypes and forms, and of one rank nothing."""
    torch.manual_seed(seed)
    flat = [(torch.randn(30) * 40).to(dtype) for dtype in DTYPES]
    formed = [torch.randn(3, 4).T, torch.tensor(float(seed)), torch.empty(0, 2), torch.randn(2000)[::3]]
    return [flat, [], formed]


def test_every_rank_gets_what_each_owner_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds that end in the middle of tensors, and of elements."""
    monkeypatch.setattr(sharing, "ROUND_NBYTES", 3)
    monkeypatch.setattr(sharing, "GIVEN_NBYTES_MIN", 101)
    held = [tensors(seed) for seed in range(3)]
    wanted = [[each.clone() for each in held[rank][rank]] for rank in range(3)]

    def act(group: SimulatedGroup) -> None:
        bring(held[group.rank], group, what="bringing", deadline_s=30)

    assert on_all_ranks(3, act) == [None] * 3
    for rank in range(3):
        for owner in range(3):
            for here, there in zip(held[rank][owner], wanted[owner], strict=True):
                assert fingerprints({"": here}) == fingerprints({"": there})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bit_makes_another_fingerprint(dtype: torch.dtype) -> None:
    one = torch.ones(5, dtype=dtype)
    other = one.clone()
    other.view(torch.uint8)[-1] ^= 1
    assert fingerprints({"a": one}) != fingerprints({"a": other})
    assert sum_of_bits(one) != sum_of_bits(other)
    assert fingerprints({"a": one}) == fingerprints({"a": one.clone()})
