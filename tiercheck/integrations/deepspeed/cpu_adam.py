"""What DeepSpeed's compiled Adam on the CPU keeps outside of torch's state: the powers of its betas.

It multiplies them on from step to step in fp32 (``Adam_Optimizer::IncrementStep`` in DeepSpeed's ``cpu_adam.h``), and
computes a power at once when a step does not follow the one before or the betas are others. The two ways differ in the
last bits, so that an optimizer which a restart has made would step otherwise than the one that was lost. A version
therefore says where the multiplication began, and a restart lets the compiled object multiply from there, on one
element. That is bounded: powers that have vanished beside 1 are all alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tiercheck.integrations.deepspeed.layouts import MasterLayout

__all__ = ["CPUAdamPowers"]

POWERS = "tiercheck.cpu_adam_powers"
"""Among the options of the first parameter group."""
VANISHED = 2.0**-26
"""In fp32, 1 less this is 1."""


@dataclass(frozen=True)
class Powers:
    """As the compiled object has them after a step."""

    betas: tuple[float, float]
    begun: int
    """The step whose power was computed at once."""
    step: int

    def after(self, step: int, betas: tuple[float, float]) -> Powers:
        follows = betas == self.betas and step - self.step in (0, 1)
        return Powers(betas, self.begun if follows else step, step)

    @property
    def multiplied(self) -> range:
        """The steps after :attr:`begun`, as far as they matter."""
        return range(self.begun + 1, min(self.step, max(map(_vanishes, self.betas))) + 1)


class CPUAdamPowers:
    """Of the optimizer of one engine; of any other optimizer nothing is kept."""

    def __init__(self, layout: MasterLayout) -> None:
        self._layout = layout
        self._compiled = type(layout.inner) is DeepSpeedCPUAdam
        if self._compiled and layout.inner not in _known:
            self._restore(None)
            layout.inner.register_step_post_hook(lambda *_: self.stepped())

    def stepped(self) -> None:
        """The optimizer has stepped: by each master that has taken one step more. Told once more it does nothing. A
        replay's step runs no hooks, and other hooks ask for the powers before this one runs."""
        if not self._compiled:
            return
        known, steps = _known[self._layout.inner], self._steps()
        for master, before, step in zip(self._layout.masters(), known.steps, steps, strict=True):
            if step != before:
                known.powers = known.powers.after(step, self._betas(master.group))
        known.steps = steps

    def added_to(self, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The options of the parameter groups, with the powers in the first."""
        if self._compiled:
            self.stepped()
            powers = _known[self._layout.inner].powers
            options[0][POWERS] = {"betas": list(powers.betas), "begun": powers.begun, "step": powers.step}
        return options

    def taken_from(self, options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The inverse: the compiled object is brought to what was added. Returns the options."""
        if self._compiled:
            saved = options[0].get(POWERS)
            self._restore(saved and Powers((saved["betas"][0], saved["betas"][1]), saved["begun"], saved["step"]))
        return [{name: value for name, value in each.items() if name != POWERS} for each in options]

    def _restore(self, saved: Powers | None) -> None:
        """If nothing was saved, the powers are computed at once, as after a load of DeepSpeed's own checkpoints: what
        the object has multiplied before cannot be seen."""
        steps = self._steps()
        last = max(steps, default=0)
        wanted = saved or Powers(self._betas(0), last, last)
        known = _known.get(self._layout.inner)
        if known is None or known.powers != wanted:
            self._multiply(wanted)
        _known[self._layout.inner] = _Known(steps, wanted)

    def _multiply(self, wanted: Powers) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # else they meet thousands of times, each for one element
        try:
            self._update(wanted.begun, (wanted.betas[0] / 2 + 0.25, wanted.betas[1]))  # others: the next comes at once
            for step in (wanted.begun, *wanted.multiplied, wanted.step):
                self._update(step, wanted.betas)
        finally:
            torch.set_num_threads(threads)

    def _update(self, step: int, betas: tuple[float, float]) -> None:
        inner: Any = self._layout.inner
        parameter, gradient, average, square = torch.zeros(4, 1, dtype=torch.float32, device="cpu")
        inner.ds_opt_adam.adam_update(
            inner.opt_id, step, 0.0, *betas, 1.0, 0.0, True, parameter, gradient, average, square
        )

    def _steps(self) -> list[int]:
        states = self._layout.inner.state
        return [int(states.get(each.tensor, {}).get("step", 0)) for each in self._layout.masters()]

    def _betas(self, group: int) -> tuple[float, float]:
        one, other = self._layout.groups()[group]["betas"]
        return float(one), float(other)


@dataclass
class _Known:
    steps: list[int]
    """By master, how many it has taken."""
    powers: Powers


_known: WeakKeyDictionary[torch.optim.Optimizer, _Known] = WeakKeyDictionary()
"""What the compiled objects have: they belong to optimizers, of which there may be several providers."""


def _vanishes(beta: float) -> int:
    """The step from which on the power of ``beta`` has vanished."""
    return math.ceil(math.log(VANISHED) / math.log(beta)) if 0 < beta < 1 else 0
