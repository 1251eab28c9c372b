"""torch's SGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import SgdStep, replay_sgd
from tiercheck.kernels.gradients import Gradient
from tiercheck.streams.optimizers.optimizer import (
    FUSED,
    SEPARATE,
    X86,
    Array,
    Form,
    Function,
    ReplayableOptimizer,
    State,
)

__all__ = ["Sgd"]


def form(name: str, implementation: str, instruction_set: str) -> Function:
    replay = partial(replay_sgd.by(name), fused=implementation == "fused", contracted=instruction_set != "DEFAULT")

    def function(param: Array, state: State, gradients: Sequence[Gradient], steps: Sequence[SgdStep]) -> None:
        if any(step.first for step in steps[1:]):
            raise ConfigurationError("only the first of the steps can start the momentum buffer")
        replay(param, state.get("momentum_buffer"), gradients, steps)

    return function


class Sgd(ReplayableOptimizer[SgdStep]):
    """SGD on a CPU, with or without momentum."""

    kind = "torch.optim.sgd.SGD"
    state = ("momentum_buffer",)
    forms = (
        Form("numba_sgd", partial(form, "numba"), SEPARATE | FUSED, X86, "numba"),
        Form("reference_sgd", partial(form, "reference"), SEPARATE | FUSED, X86, automatic=False),
    )

    def reason_not_replayable(self, options: Mapping[str, Any]) -> str | None:
        if options.get("differentiable"):
            return "differentiable is on"
        needed = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        missing = [name for name in needed if name not in options]
        return f"its options lack {', '.join(missing)}" if missing else None

    def step(self, options: Mapping[str, Any], count: int) -> SgdStep:
        self.check_replayable(options)
        return SgdStep(
            lr=float(options["lr"]),
            momentum=float(options["momentum"]),
            dampening=float(options["dampening"]),
            weight_decay=float(options["weight_decay"]),
            nesterov=bool(options["nesterov"] and options["momentum"]),  # as torch's step: without, it is none
            first=count == 1,
            maximize=bool(options.get("maximize", False)),
        )

    def needs(self, step: SgdStep) -> tuple[str, ...]:
        return self.state if step.momentum else ()

    def variants(self) -> Iterator[dict[str, Any]]:
        for momentum, dampening, nesterov in (
            (0.0, 0.0, False),
            (0.9, 0.0, False),
            (0.9, 0.3, False),
            (0.8, 0.0, True),
        ):
            for weight_decay, maximize in ((0.0, False), (0.1, True)):
                yield {
                    "lr": 0.013,
                    "momentum": momentum,
                    "dampening": dampening,
                    "nesterov": nesterov,
                    "weight_decay": weight_decay,
                    "maximize": maximize,
                }

    def arguments(self, implementation: str) -> dict[str, Any]:
        return {"foreach": implementation == "foreach", "fused": implementation == "fused"}
