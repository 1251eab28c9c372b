"""How optimizers on a GPU round a step of Adam: named candidates, and a step's scalars as each of them computes them.

On a GPU all of them compute with IEEE division and square root (except ``FAST``), and the compiler may *contract* a
multiplication and an addition into one fused operation. Which one it contracts is not in the sources: ``a*b + c*d`` is
``fma(a, b, c*d)`` in one kernel and ``fma(c, d, a*b)`` in another. So each placement that a compiler may choose is a
candidate with a name. Which one an optimizer follows, if any, is found by experiment
(:mod:`tiercheck.streams.optimizers.stand_in`).

- ``FUSED``: torch's fused kernel. Its scalars are fp32 in torch 2.13, and were fp64 before (*wide*: a value and a
  scalar are then computed in fp64, and rounded to fp32 when they are stored). Its moments are written as explicit fused
  operations, or as weighted sums. Source: torch, ``aten/src/ATen/native/cuda/fused_adam_utils.cuh``, ``adam_math``.
- ``OPERATIONS``: torch's separate operations, ``foreach`` or one tensor at a time. Source: torch,
  ``torch/optim/adam.py``; ``aten/src/ATen/native/Lerp.h``; ``aten/src/ATen/native/cuda/DeviceAddCmulCdiv.cuh``. With
  one tensor at a time, torch divides by a number by multiplying with its reciprocal, which is taken in fp64
  (``BinaryDivTrueKernel.cu``).
- ``FAST``: DeepSpeed's ``FusedAdam``, compiled with ``--use_fast_math``: divisions and square roots are the device's
  approximations, and denormals are zero. No processor has those approximations, so only a GPU can replay it. Source:
  DeepSpeed, ``csrc/adam/multi_tensor_adam.cu`` and ``op_builder/fused_adam.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError
from tiercheck.kernels.adam import AdamStep, Coefficients
from tiercheck.kernels.division import parts_of

__all__ = ["FAST", "FUSED", "OPERATIONS", "ROUNDINGS", "Fused", "Powers", "Rounding", "Scalars", "Scheme", "scalars_of"]


class Scheme(IntEnum):
    """Which operations a step consists of. The kernels have the same numbers."""

    EXPLICIT = 0
    """One kernel; moments by ``fma(beta, m, fma(-beta, g, g))``."""
    WEIGHTED = 1
    """One kernel; moments by ``beta*m + (1 - beta)*g``."""
    OPERATIONS = 2
    """Separate operations: lerp, multiplication, addcmul, square root, division, addition, addcdiv."""
    FAST = 3
    """One kernel with approximate divisions and roots; moments as ``WEIGHTED``."""


class Fused(IntEnum):
    """Which product of a sum of two is contracted with the addition. The kernels have the same numbers."""

    MOMENT = 0
    """The moment's: ``fma(beta, m, (1 - beta)*g)``. Of addcmul: ``fma(weight, g*g, v)``."""
    GRADIENT = 1
    """The gradient's: ``fma(1 - beta, g, beta*m)``. Of addcmul: ``fma(weight*g, g, v)``."""
    NEITHER = 2


@dataclass(frozen=True)
class Rounding:
    """A candidate. ``first``, ``second``: of the sums that make the first and the second moment. ``wide``: scalars are
    fp64. ``reciprocal``: a division by a number multiplies with its reciprocal."""

    scheme: Scheme
    wide: bool = False
    first: Fused = Fused.MOMENT
    second: Fused = Fused.MOMENT
    reciprocal: bool = False

    @property
    def name(self) -> str:
        """Such as ``fused32``, ``fused64.moment.gradient``, ``operations.reciprocal``, ``fast.gradient.gradient``."""
        placed = f".{self.first.name.lower()}.{self.second.name.lower()}"
        if self.scheme is Scheme.OPERATIONS:
            scaled = ".gradient" if self.second is Fused.GRADIENT else ""
            return f"operations{scaled}{'.reciprocal' if self.reciprocal else ''}"
        if self.scheme is Scheme.FAST:
            return f"fast{placed}"
        return f"fused{64 if self.wide else 32}{placed if self.scheme is Scheme.WEIGHTED else ''}"

    @property
    def contracts(self) -> bool:
        """Whether the compiler contracted at all."""
        return self.first is not Fused.NEITHER

    @property
    def powers(self) -> type[np.float32] | type[np.float64] | None:
        """In which type the device computes the powers of the betas; ``None``: the host does, in fp64."""
        if self.scheme not in (Scheme.EXPLICIT, Scheme.WEIGHTED):
            return None
        return np.float64 if self.wide else np.float32


def placements(scheme: Scheme, *, wide: bool = False) -> list[Rounding]:
    """Every placement, the likeliest first."""
    both = (Fused.MOMENT, Fused.GRADIENT)
    found = [Rounding(scheme, wide, first, second) for first in both for second in both]
    return [*found, Rounding(scheme, wide, Fused.NEITHER, Fused.NEITHER)]


FUSED: tuple[Rounding, ...] = (
    Rounding(Scheme.EXPLICIT),
    *placements(Scheme.WEIGHTED, wide=True),
    Rounding(Scheme.EXPLICIT, wide=True),
    *placements(Scheme.WEIGHTED),
)
OPERATIONS: tuple[Rounding, ...] = tuple(
    Rounding(Scheme.OPERATIONS, second=second, reciprocal=reciprocal)
    for reciprocal in (False, True)
    for second in (Fused.MOMENT, Fused.GRADIENT)
)
FAST: tuple[Rounding, ...] = tuple(placements(Scheme.FAST))

ROUNDINGS: Mapping[str, Rounding] = {each.name: each for each in (*FUSED, *OPERATIONS, *FAST)}
"""Every candidate by its name."""

TABLE_MAX = 1 << 20
"""The most powers of one beta: enough for betas up to .99998."""


@dataclass(frozen=True, eq=False)
class Powers:
    """The powers of betas as a device computes them, which need not be the host's: its ``powf`` is off by up to four
    units in the last place.

    ``tables``: by beta, ``beta**n`` for n = 1, 2, ..., :func:`powers_needed` of them, in the type that the device
    computes them in.
    """

    tables: Mapping[float, NDArray[np.float32] | NDArray[np.float64]] = field(default_factory=dict)

    def power(self, beta: float, count: int) -> np.float32 | np.float64:
        """``beta**count``; behind the table zero, which gives the same correction. Errors: ``ConfigurationError`` for a
        beta without a table."""
        table = self.tables.get(beta)
        if table is None:
            raise ConfigurationError(
                f"the powers of the beta {beta} on the device are not known: those of {sorted(self.tables)} were asked"
            )
        power: np.float32 | np.float64 = table[count - 1] if count <= table.size else table.dtype.type(0)
        return power


def powers_needed(beta: float) -> int:
    """How many powers tell every correction: the next ones are below ``2**-26``, so that ``1 - power`` is 1 in fp32,
    whatever the device's last bits are. Errors: ``ConfigurationError`` for a beta so close to 1 that these are too
    many."""
    if beta <= 0:
        return 1
    needed = math.ceil(-26 / math.log2(beta)) + 1 if beta < 1 else TABLE_MAX + 1
    if needed > TABLE_MAX:
        raise ConfigurationError(f"a beta of {beta} takes {needed} powers until its correction is 1, which is too many")
    return needed


@dataclass(frozen=True)
class Scalars:
    """A step's scalars as a candidate computes them. Those that may be wide are given as fp64, and hold fp32 values if
    the candidate is not wide."""

    multiplier: np.float32
    """The gradient is multiplied by this first: its scale, negative if the step maximizes."""
    coupled: bool
    """Whether ``decay`` times the parameter is added to the gradient (L2)."""
    decays: bool
    """Whether the parameter decays by itself."""
    decay: float
    """``weight_decay``, if coupled or FAST. Else the share that the parameter loses; of OPERATIONS, its factor."""
    beta1: float
    beta2: float
    weight1: float
    """What the gradient is multiplied with. Of OPERATIONS the weight of the lerp's branch."""
    weight2: float
    small: bool
    """Of OPERATIONS: the lerp starts from the moment."""
    eps: float
    step_size: np.float32
    """Of OPERATIONS negative. Of FAST the learning rate."""
    first: np.float32
    """Of FAST: what the first moment is divided by."""
    root: np.float32
    """What the root of the second moment is divided by. Of FAST: what the second moment is divided by."""
    reciprocal: np.float32
    """Of ``root``; of OPERATIONS of the fp64 number that was rounded to it."""


def scalars_of(rounding: Rounding, step: AdamStep, powers: Powers) -> Scalars:
    """Errors: ``ConfigurationError`` if ``powers`` lacks one that the device computes."""
    if rounding.scheme is Scheme.OPERATIONS:
        return of_operations(step)
    if rounding.scheme is Scheme.FAST:
        return of_fast(step)
    return of_fused(rounding, step, powers)


def multiplier_of(step: AdamStep) -> np.float32:
    return np.float32(-step.gradient_scale if step.maximize else step.gradient_scale)


def of_fused(rounding: Rounding, step: AdamStep, powers: Powers) -> Scalars:
    number = np.float64 if rounding.wide else np.float32
    one, lr, weight_decay = number(1), number(step.lr), number(step.weight_decay)
    beta1, beta2 = number(step.beta1), number(step.beta2)
    with np.errstate(all="ignore"):
        first = np.float32(one - number(powers.power(step.beta1, step.step)))
        root = np.float32(np.sqrt(one - number(powers.power(step.beta2, step.step))))
        return Scalars(
            multiplier=multiplier_of(step),
            coupled=step.coupled,
            decays=step.weight_decay != 0 and step.decoupled,
            decay=float(weight_decay if step.coupled else lr * weight_decay),
            beta1=float(beta1),
            beta2=float(beta2),
            weight1=float(one - beta1),
            weight2=float(one - beta2),
            small=True,
            eps=float(number(step.eps)),
            step_size=np.float32(lr / number(first)),
            first=first,
            root=root,
            reciprocal=np.float32(1) / root,
        )


def of_operations(step: AdamStep) -> Scalars:
    c = Coefficients.of(step)
    small = bool(c.weight1 < np.float32(0.5))
    with np.errstate(all="ignore"):
        return Scalars(
            multiplier=c.multiplier,
            coupled=step.coupled,
            decays=c.decays and c.decoupled,
            decay=float(c.decay),
            beta1=float(np.float32(step.beta1)),
            beta2=float(c.beta2),
            weight1=float(c.weight1 if small else c.weight1 - np.float32(1)),
            weight2=float(c.weight2),
            small=small,
            eps=float(c.eps),
            step_size=c.negative_step_size,
            first=np.float32(1),
            root=c.root_correction,
            reciprocal=np.float32(np.float64(1) / (1 - step.beta2 ** float(step.step)) ** 0.5),
        )


def of_fast(step: AdamStep) -> Scalars:
    beta1, beta2 = np.float32(step.beta1), np.float32(step.beta2)
    first = np.float32(1 - float(beta1) ** step.step)
    second = np.float32(1 - float(beta2) ** step.step)
    return Scalars(
        multiplier=multiplier_of(step),
        coupled=not step.decoupled,
        decays=step.decoupled,
        decay=float(np.float32(step.weight_decay)),
        beta1=float(beta1),
        beta2=float(beta2),
        weight1=float(np.float32(1) - beta1),
        weight2=float(np.float32(1) - beta2),
        small=True,
        eps=float(np.float32(step.eps)),
        step_size=np.float32(step.lr),
        first=first,
        root=second,
        reciprocal=np.float32(1) / second,
    )


WIDE = ("decay", "beta1", "beta2", "weight1", "weight2", "eps")
NARROW = ("multiplier", "step_size", "first", "root", "reciprocal")
PARTS = ("high", "low")
"""Of the reciprocal of ``root`` (:mod:`tiercheck.kernels.division`), unless ``DIVIDES``."""
COUPLED, DECAYS, SMALL, DIVIDES = 1, 2, 4, 8
"""Flags of a row. The kernels have the same numbers."""

ROW = np.dtype(
    [*((name, np.float64) for name in WIDE), *((name, np.float32) for name in (*NARROW, *PARTS)), ("flags", np.uint32)],
    align=True,
)
"""The scalars of a step, as the kernels read them."""


def fill(row: np.void, scalars: Scalars) -> None:
    """Write a record of :data:`ROW`."""
    for name in (*WIDE, *NARROW):
        row[name] = getattr(scalars, name)
    row["high"], row["low"], divides = parts_of(scalars.root)
    row["flags"] = COUPLED * scalars.coupled | DECAYS * scalars.decays | SMALL * scalars.small | DIVIDES * divides


@lru_cache(maxsize=16)
def rows_of(rounding: Rounding, steps: tuple[AdamStep, ...], powers: Powers) -> NDArray[np.void]:
    """A record of :data:`ROW` for each step. Read-only and cached, since every tensor takes the same steps. Errors:
    ``ConfigurationError``, as of :func:`scalars_of`."""
    rows = np.zeros(len(steps), ROW)
    for row, step in zip(rows, steps, strict=True):
        fill(row, scalars_of(rounding, step, powers))
    rows.flags.writeable = False
    return rows


def check_steps(rounding: Rounding, steps: Sequence[AdamStep], *, amsgrad: bool) -> None:
    """Errors: ``ConfigurationError`` if the steps do not fit the candidate or the state."""
    if any(step.amsgrad != amsgrad for step in steps):
        raise ConfigurationError("amsgrad steps, and no others, need max_exp_avg_sq")
    if amsgrad and rounding.scheme is Scheme.FAST:
        raise ConfigurationError("DeepSpeed's FusedAdam has no amsgrad")
