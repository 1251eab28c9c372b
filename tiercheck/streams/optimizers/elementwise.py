"""Which optimizers do the same with each element, whatever the others are."""

from __future__ import annotations

from tiercheck.streams.optimizers.registry import find_optimizer

__all__ = ["is_elementwise"]

NAMES = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
ELEMENTWISE = frozenset(f"torch.optim.{name.lower()}.{name}" for name in NAMES)


def is_elementwise(kind: type) -> bool:
    """Others, such as Adafactor, LAMB and Muon, sum over tensors, or multiply them."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name in ELEMENTWISE or find_optimizer(name) is not None
