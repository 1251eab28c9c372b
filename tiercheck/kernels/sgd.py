"""The scalars of one step of SGD.

Steps are replayed one after the other. Without momentum, decay or a schedule, one step with the sum of the gradients
would be less work. But ``p - lr * (g1 + g2)`` and ``(p - lr * g1) - lr * g2`` round differently, so it is not exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercheck.errors import ConfigurationError

__all__ = ["SgdCoefficients", "SgdStep"]


@dataclass(frozen=True)
class SgdStep:
    """One step's scalars. ``first``: the tensor's first step with momentum, which sets the buffer to the gradient.

    ``gradient_scale`` and ``maximize`` are as in :class:`~tiercheck.kernels.adam.AdamStep`.

    Source: Sutskever et al., *On the importance of initialization and momentum in deep learning* (2013), with
    torch's changes, which the documentation of ``torch.optim.SGD`` states.

    Errors: ``ConfigurationError`` for Nesterov's step without momentum.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first: bool = False
    maximize: bool = False
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigurationError("Nesterov's step needs momentum")


@dataclass(frozen=True)
class SgdCoefficients:
    """The scalars of an :class:`SgdStep` as torch's kernels use them: computed in fp64, then rounded to fp32."""

    multiplier: np.float32
    decay: np.float32
    momentum: np.float32
    weight: np.float32
    """``1 - dampening``."""
    negative_lr: np.float32

    @classmethod
    def of(cls, step: SgdStep) -> SgdCoefficients:
        return cls(
            multiplier=np.float32(-step.gradient_scale if step.maximize else step.gradient_scale),
            decay=np.float32(step.weight_decay),
            momentum=np.float32(step.momentum),
            weight=np.float32(1 - step.dampening),
            negative_lr=np.float32(-step.lr),
        )
