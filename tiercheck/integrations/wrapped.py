"""The optimizer behind its wrappers."""

from __future__ import annotations

from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup

__all__ = ["bare_optimizer"]

WRAPPERS_MAX = 8


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step changes the parameters: Hugging Face Accelerate, for one, wraps it in another one.

    A wrapper that shows the groups and the state of the optimizer in it as its own adds nothing that has to be saved.
    Errors: ``UnsupportedSetup`` for a wrapper that holds more than that, and for what is no torch optimizer.
    """
    for _ in range(WRAPPERS_MAX):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        if optimizer.param_groups is not inner.param_groups or optimizer.state is not inner.state:
            raise UnsupportedSetup(
                f"{type(optimizer).__name__} wraps {type(inner).__name__} and holds groups or state of its own, which "
                "would not be saved: attach a torch optimizer whose step does all that changes"
            )
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedSetup(
            f"optimizer= must be a torch.optim.Optimizer, not {type(optimizer).__name__} (for a DeepSpeed engine use "
            "tiercheck.integrations.deepspeed)"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UnsupportedSetup(
            f"{type(optimizer).__name__} has no step hooks, through which every step is seen: its __init__ must call "
            "that of torch.optim.Optimizer (for a DeepSpeed engine, also one that Accelerate drives, use "
            "tiercheck.integrations.deepspeed)"
        )
    return optimizer
