"""An optimizer's step as a replay makes it: its own arithmetic, and nothing that stands around it."""

from __future__ import annotations

from typing import Any

from tiercheck.streams.tensors.joint import AnyOptimizer, parts_of

__all__ = ["bare_step"]


def bare_step(optimizer: AnyOptimizer) -> None:
    """The step of the optimizer's class. Neither hooks nor a ``step`` that was put in its place come into it: what they
    did to the gradients before the step is in those that were recorded, and what they did after it was seen.

    torch wraps the ``step`` of each class to call the hooks. What is wrapped may call the step of a base class, whose
    hooks run as they did: nothing was recorded between the two.
    """
    for part in parts_of(optimizer):
        step: Any = type(part).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(part)
