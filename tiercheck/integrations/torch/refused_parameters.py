"""Parameters whose steps no replay would repeat as they were: refused at attach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup

__all__ = ["refuse_parameters"]


def refuse_parameters(
    masters: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], groups: Iterable[Mapping[str, Any]]
) -> None:
    """``local``: what this rank holds of each. Errors: ``UnsupportedSetup`` naming the parameters."""
    names = {id(each): name for name, each in masters.items()}
    for group in groups:
        counts = Counter(map(id, group["params"]))
        if twice := [names[each] for each, count in counts.items() if count > 1]:
            raise UnsupportedSetup(
                f"the optimizer has {twice[0]} twice in one parameter group, so that each step updates it twice: give "
                "it once, as for a weight that is tied"
            )
    for name, each in masters.items():
        if getattr(each, "grad_dtype", each.dtype) != each.dtype:
            raise UnsupportedSetup(
                f"{name} is {each.dtype} and takes gradients of another dtype (grad_dtype): supported are gradients of "
                "the parameter's own"
            )
    if overlapping := first_overlap(local):
        one, other = overlapping
        raise UnsupportedSetup(
            f"{one} and {other} are two parameters in one memory, so that each step updates it twice: make them one "
            "parameter (other.weight = one.weight), and give that to the optimizer once"
        )


def first_overlap(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Two of the dense ones that lie in the same memory."""
    places = sorted(
        (str(each.device), each.data_ptr(), each.data_ptr() + each.numel() * each.element_size(), name)
        for name, each in tensors.items()
        if each.numel() and is_dense(each)
    )
    for (device, _, stop, name), (next_device, start, _, next_name) in pairwise(places):
        if device == next_device and start < stop:
            return name, next_name
    return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill the memory from the first to the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()
