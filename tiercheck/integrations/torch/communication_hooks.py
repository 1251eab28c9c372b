"""DDP's communication hooks that keep something from one step to the next, such as what a compression has left over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tiercheck.errors import UnsupportedSetup
from tiercheck.integrations.torch.all_reduce import Compression

__all__ = ["BY_NUMBER", "LaterHooks", "carries_over", "hook_name", "hooks_of", "unsaved_states"]

BY_NUMBER = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
"""Hooks without a state that treat each number of a bucket for itself, and leave each rank with the same bits."""


def hooks_of(ddp: DistributedDataParallel) -> Sequence[tuple[Any, Any]]:
    """Each hook that was registered with it, and the hook's state."""
    return getattr(ddp, "_comm_hooks", ())


def hook_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


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
        for hook, state in hooks_of(each)
        if id(state) not in saved and carries_over(state)
    ]
    return [
        f"the state of DDP's communication hook {hook_name(hook)} "
        f"({type(state).__name__}) is in no version, and begins anew: pass it in stateful=, with state_dict and "
        "load_state_dict"
        for hook, state in hooks
    ]


class LaterHooks:
    """The communication hooks that a model gets after it was attached: they were not there when a recovery gave DDP its
    layout, nor when it was worked out what versions lack."""

    def __init__(self, model: torch.nn.Module) -> None:
        wrapped = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._attached = [(each, len(hooks_of(each))) for each in wrapped]

    def refuse(self) -> None:
        """Errors: ``UnsupportedSetup`` if there is one that may keep something, or look at a bucket as a whole."""
        for ddp, count in self._attached:
            for hook, _ in hooks_of(ddp)[count:]:
                if hook not in BY_NUMBER:
                    raise UnsupportedSetup(
                        f"DDP's communication hook {hook_name(hook)} was registered after attach(), which has to know "
                        "of it: call register_comm_hook() before attach()"
                    )
