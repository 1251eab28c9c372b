"""A block is what torch gives a rank of a tensor."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from tiercheck.integrations.fsdp.blocks import HeldBlock, block_of


@pytest.mark.parametrize("shape", [(7,), (3, 4), (8, 2), (1, 5), (0, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_shard_is_a_chunk(shape: tuple[int, ...], ranks: int) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for dimension in range(len(shape)):
        chunks = [*torch.chunk(whole, ranks, dimension), *[whole.narrow(dimension, 0, 0)] * ranks][:ranks]
        blocks = [block_of(shape, (ranks,), (rank,), (dimension,)) for rank in range(ranks)]
        assert [taken(whole, each).tolist() for each in blocks] == [each.tolist() for each in chunks]


def test_blocks_of_all_ranks_cover_a_tensor_once() -> None:
    whole = torch.zeros(5, 6)
    for coordinate in product(range(2), range(3)):
        taken(whole, block_of((5, 6), (2, 3), coordinate, (0, 1))).add_(1)
    assert torch.equal(whole, torch.ones(5, 6))


def test_replicas_hold_the_same_and_are_told_apart() -> None:
    assert [block_of((5, 2), (2, 2), at, (None, 0)) for at in product(range(2), range(2))] == [
        HeldBlock((5, 2), (0, 0), (3, 2), 0, 2),
        HeldBlock((5, 2), (3, 0), (2, 2), 0, 2),
        HeldBlock((5, 2), (0, 0), (3, 2), 1, 2),
        HeldBlock((5, 2), (3, 0), (2, 2), 1, 2),
    ]


def test_a_dimension_that_is_divided_twice_is_divided_in_turn() -> None:
    assert block_of((8,), (2, 2), (1, 0), (0, 0)) == HeldBlock((8,), (4,), (2,))
    assert block_of((8,), (2, 2), (0, 1), (0, 0)) == HeldBlock((8,), (2,), (2,))


def taken(whole: torch.Tensor, block: HeldBlock) -> torch.Tensor:
    for dimension, (offset, length) in enumerate(zip(block.offsets, block.lengths, strict=True)):
        whole = whole.narrow(dimension, offset, length)
    return whole
