"""Tensors of the model, put together from what all ranks would store, by their indexes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tiercheck.format.index.assemble import Holdings, assemble
from tiercheck.format.index.boxes import copy_elements
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.index.message import plain_index, read_index
from tiercheck.streams.tensors.provider import StateProvider, extras_of

__all__ = ["assembled"]


def assembled(provider: StateProvider, kept: str = "") -> tuple[dict[tuple[str, str], torch.Tensor], Holdings]:
    """Every tensor of the model, by its key. ``kept``: in place of the masters, what the optimizer keeps for them under
    that name. Collective."""
    index = provider.index()
    masters = provider.masters()
    if kept:
        masters = {name: held[kept] for name, held in provider.optimizer_state().items()}
    stored = {f"master/{name}": tensor for name, tensor in masters.items()}
    stored |= {f"extra/{name}": tensor for name, tensor in extras_of(provider).items()}
    index.check({name: tuple(tensor.shape) for name, tensor in stored.items()})
    mine = {name: tensor.float().flatten().numpy() for name, tensor in stored.items()}
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (plain_index(index), mine))
    holdings = Holdings({rank: read_index(plain) for rank, (plain, _) in enumerate(ranks)})
    found = {}
    for tensor in holdings.tensors:
        plan = assemble(LogicalIndex.of_whole([tensor]), holdings, rank=torch.distributed.get_rank())
        assert not plan.missing, [*map(str, plan.missing)]
        whole = np.full(tensor.elements, np.nan, np.float32)
        for each in plan.transfers:
            copy_elements([each.copy], ranks[each.rank][1][each.source], whole)
        found[tensor.key] = torch.from_numpy(whole).view(tensor.shape)
    return found, holdings
