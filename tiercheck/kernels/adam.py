"""The scalars of one step of Adam or AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.gradients import SparseGradient

__all__ = ["STEP_MAX", "AdamStep", "Coefficients", "SparseGradient"]

STEP_MAX = 1 << 24
"""torch counts steps in fp32, which cannot count further than this."""


@dataclass(frozen=True)
class AdamStep:
    """One step's scalars, as an optimizer's options state them.

    ``step`` is the optimizer's count *after* the step: 1 for the first step.

    Source: Kingma and Ba, *Adam* (2015), algorithm 1; Loshchilov and Hutter, *Decoupled Weight Decay
    Regularization* (2019), algorithm 2 (``decoupled``; if false, weight decay is L2); Reddi et al., *On the
    Convergence of Adam and Beyond* (2018), algorithm 2 (``amsgrad``, with torch's bias correction).

    ``gradient_scale`` is a clipping coefficient, or the inverse of a loss scale. It is rounded to fp32; the gradient is
    multiplied by it first, and rounded once more, as torch's clipping does in place. ``maximize`` then negates the
    gradient, which is exact. A scale of 1 changes no bit.

    Errors: ``ConfigurationError`` for a step count or a beta out of range.
    """

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool = False
    maximize: bool = False
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.step < STEP_MAX:
            raise ConfigurationError(f"an Adam step count must be in 1..{STEP_MAX - 1}, not {self.step}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigurationError(f"Adam's {name} must be in [0, 1), not {getattr(self, name)}")

    @property
    def coupled(self) -> bool:
        """Whether weight decay is added to the gradient (L2)."""
        return self.weight_decay != 0 and not self.decoupled


@dataclass(frozen=True)
class Coefficients:
    """The scalars of an :class:`AdamStep` as torch's kernels use them: computed in fp64, then rounded to fp32."""

    decay: np.float32
    """``1 - lr * weight_decay`` if decoupled, else ``weight_decay``."""
    decoupled: bool
    decays: bool
    weight1: np.float32
    weight2: np.float32
    beta2: np.float32
    root_correction: np.float32
    eps: np.float32
    negative_step_size: np.float32
    multiplier: np.float32
    """The gradient is multiplied by this first: its scale, negative if the step maximizes."""

    @classmethod
    def of(cls, step: AdamStep) -> Coefficients:
        correction1 = 1 - step.beta1 ** float(step.step)
        correction2 = 1 - step.beta2 ** float(step.step)
        return cls(
            decay=np.float32(1 - step.lr * step.weight_decay if step.decoupled else step.weight_decay),
            decoupled=step.decoupled,
            decays=step.weight_decay != 0,
            weight1=np.float32(1 - step.beta1),
            weight2=np.float32(1 - step.beta2),
            beta2=np.float32(step.beta2),
            root_correction=np.float32(correction2**0.5),
            eps=np.float32(step.eps),
            negative_step_size=np.float32(-(step.lr / correction1)),
            multiplier=np.float32(-step.gradient_scale if step.maximize else step.gradient_scale),
        )
