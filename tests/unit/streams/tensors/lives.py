"""A training with an optimizer of a test's own, that ends as by a crash, life after life."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

__all__ = ["Optimizers", "life"]

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


def life(url: str, last: int, make: Callable[[torch.nn.Module], Optimizers], *, base_every: int) -> list[bytes]:
    """The bytes of the parameters at its end. What it recovers must be exact."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    made = make(model)
    config = CheckpointConfig(base_every=base_every, batch=1, deadline_s=30)
    checkpointer = attach(model, made, Hierarchy.of(url), config=config)
    try:
        assert checkpointer.recovery is None or checkpointer.recovery.fidelity == "exact"
        while checkpointer.version < last:
            model.zero_grad()
            model(torch.full((1, 3), float(checkpointer.version))).sin().sum().backward()
            for each in made if isinstance(made, list) else [made]:
                each.step()
            checkpointer.end_iteration()
        checkpointer.flush()
    finally:
        checkpointer.abort()
    return [each.detach().numpy().tobytes() for each in model.parameters()]
