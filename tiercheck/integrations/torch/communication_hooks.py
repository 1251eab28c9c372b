"""DDP's communication hooks that keep something from one step to the next, such as what a compression has left over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiercheck.integrations.torch.all_reduce import Compression

__all__ = ["carries_over", "unsaved_states"]


def carries_over(state: Any) -> bool:
    """Whether the state of a hook may be another one after a step."""
    if isinstance(state, Compression):
        return state.has_residuals
    return state is not None and not isinstance(state, dist.ProcessGroup)  # what torch's plain hooks have


def unsaved_states(model: torch.nn.Module, given: Iterable[Any]) -> list[str]:
    """Why what follows a recovery has not the bits of an uninterrupted run: one line for each hook whose state is none
    of ``given``, which is what versions hold beside the model."""
    saved = {id(each) for each in given}
    hooks = [
        (hook, state)
        for each in model.modules()
        if isinstance(each, DistributedDataParallel)
        for hook, state in getattr(each, "_comm_hooks", ())
        if id(state) not in saved and carries_over(state)
    ]
    return [
        f"the state of DDP's communication hook {getattr(hook, '__qualname__', type(hook).__name__)} "
        f"({type(state).__name__}) is in no version, and begins anew: pass it in stateful=, with state_dict and "
        "load_state_dict"
        for hook, state in hooks
    ]
