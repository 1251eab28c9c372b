"""The optimizer behind its wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tiercheck.errors import UnsupportedSetup

__all__ = ["bare_optimizer"]

WRAPPERS_MAX = 8


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step changes the parameters: Hugging Face Accelerate, for one, wraps it in another one.

    A wrapper that shows the groups and the state of the optimizer in it as its own adds nothing that has to be saved.
    Errors: ``UnsupportedSetup`` for a wrapper that holds more than that, for an optimizer that holds another one with a
    state of its own, and for what is no torch optimizer.
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
    for name, inner in held_by(optimizer):
        if inner.state is not optimizer.state:
            raise UnsupportedSetup(
                f"{type(optimizer).__name__} holds {type(inner).__name__} as {name!r}, whose state is its own and "
                "would not be saved: attach one that keeps what it knows of a parameter in its own state (to shard an "
                "optimizer's state, use fully_shard or DeepSpeed)"
            )
    return optimizer


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that are attributes of this one, or in a list or dictionary that is."""
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for each in held if name != "param_groups" else ():
            if isinstance(each, torch.optim.Optimizer):
                yield name, each
