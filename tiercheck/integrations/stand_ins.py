"""Forward passes in which others stand in for the model's tensors.

``torch.func.functional_call`` gives a module other tensors for one call. Within ``grad``, ``jacrev`` and their like,
and within a fake tensor mode, what is made of a tensor has no memory. While ``torch.jit.trace`` runs, sizes are
tensors. Nothing of the model can be saved in such a pass.
"""

from __future__ import annotations

import torch

from tiercheck.integrations.callers import callers

__all__ = ["stand_in"]

CALLERS = frozenset(("torch.nn.utils.stateless", "torch._functorch.eager_transforms", "torch._functorch.vmap"))
"""Of the modules of torch that call a model so, one is on the stack. torch has no public way to ask."""


def stand_in() -> bool:
    """Whether the forward pass that calls this is one of them."""
    if type(torch.empty(0)) is not torch.Tensor:
        return True
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return any(frame.f_globals.get("__name__") in CALLERS for frame in callers())
