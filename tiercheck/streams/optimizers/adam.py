"""torch's Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from tiercheck.errors import ConfigurationError
from tiercheck.kernels import AdamStep, gpu_adam, replay_fused_adam, replay_gpu_adam
from tiercheck.kernels.gpu_adam import Powers, Rounding
from tiercheck.kernels.gradients import Gradient
from tiercheck.kernels.registry import has_numba, load_numba
from tiercheck.streams.optimizers.adam_trials import adam_trials
from tiercheck.streams.optimizers.optimizer import (
    FUSED,
    SEPARATE,
    X86,
    Array,
    Candidate,
    Form,
    Function,
    OnDevice,
    ReplayableOptimizer,
    State,
    Trial,
)

__all__ = ["Adam"]

CLOSED_FORM = "numba_closed_form"


def on_state(replay: Callable[..., None]) -> Function:
    """A kernel of Adam's, which takes its state argument by argument."""

    def function(param: Array, state: State, gradients: Sequence[Gradient], steps: Sequence[AdamStep]) -> None:
        largest = state.get("max_exp_avg_sq")
        replay(param, state["exp_avg"], state["exp_avg_sq"], gradients, steps, max_exp_avg_sq=largest)

    return function


def fused(form: str, implementation: str, instruction_set: str) -> Function:
    return on_state(partial(replay_fused_adam.by(form), contracted=instruction_set != "DEFAULT"))


def numba_tiles(implementation: str, instruction_set: str) -> Function:
    from tiercheck.kernels.torch_tiles import replay_adam_with_numba

    return on_state(partial(replay_adam_with_numba, contracted=instruction_set != "DEFAULT"))


def torch_tiles(implementation: str, instruction_set: str) -> Function:
    from tiercheck.kernels.torch_tiles import replay_adam

    return on_state(replay_adam)


def gpu_on_host(rounding: Rounding, powers: Powers) -> Function:
    return on_state(partial(replay_gpu_adam, rounding=rounding, powers=powers))


def gpu_on_device(rounding: Rounding, powers: Powers) -> OnDevice:
    replay = replay_gpu_adam.by("cuda")

    def function(param: Any, state: Mapping[str, Any], gradients: Any, steps: Any, *, stream: Any) -> None:
        largest, moments = state.get("max_exp_avg_sq"), (state["exp_avg"], state["exp_avg_sq"])
        how: Any = {"rounding": rounding, "powers": powers, "stream": stream}
        replay(param, *moments, gradients, steps, max_exp_avg_sq=largest, **how)

    return function


def candidates_of(roundings: Sequence[Rounding], implementations: frozenset[str]) -> Iterator[Candidate]:
    for each in roundings:
        on_host, on_device = partial(gpu_on_host, each), partial(gpu_on_device, each)
        yield Candidate(each.name, implementations, each.powers, on_host, on_device)


class Adam(ReplayableOptimizer[AdamStep]):
    """Adam: fused, foreach and one tensor at a time; amsgrad and maximize; on a CPU, and by candidates on a GPU."""

    kind = "torch.optim.adam.Adam"
    state = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counter = "step"
    decoupled: ClassVar[bool] = False
    """Whether weight decay is decoupled if the options do not say (AdamW), or L2 (Adam)."""
    forms = (
        Form("numba", partial(fused, "numba"), FUSED, X86, "numba"),
        Form("numba_tiles", numba_tiles, SEPARATE, X86, "numba"),
        Form("torch_tiles", torch_tiles, SEPARATE, None, "torch"),
        Form("reference", partial(fused, "reference"), FUSED, X86, automatic=False),
    )
    candidates = (*candidates_of(gpu_adam.FUSED, FUSED), *candidates_of(gpu_adam.OPERATIONS, SEPARATE))

    def reason_not_replayable(self, options: Mapping[str, Any]) -> str | None:
        for variant in ("differentiable", "capturable"):
            if options.get(variant):
                return f"{variant} is on"
        missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in options]
        if missing:
            return f"its options lack {', '.join(missing)}"
        if np.float32(1 - options["betas"][0]) == 1:
            # torch's ``lerp`` then adds a zero to the gradient. Behind a whole vector that zero has the other sign, and
            # a gradient of -0.0 takes it over. Where vectors end depends on torch's threads.
            return "beta1 is 0, and which sign a zero gets then depends on torch's threads"
        return None

    def step(self, options: Mapping[str, Any], count: int) -> AdamStep:
        self.check_replayable(options)
        beta1, beta2 = options["betas"]
        return AdamStep(
            step=count,
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            decoupled=bool(options.get("decoupled_weight_decay", self.decoupled)),
            amsgrad=bool(options.get("amsgrad", False)),
            maximize=bool(options.get("maximize", False)),
        )

    def needs(self, step: AdamStep) -> tuple[str, ...]:
        return self.state if step.amsgrad else self.state[:2]

    def moments(self, options: Mapping[str, Any]) -> Mapping[str, float]:
        """Of its gradients and of their squares; with amsgrad it keeps a maximum besides."""
        return {} if options.get("amsgrad") else dict(zip(self.state[:2], options["betas"], strict=True))

    def variants(self) -> Iterator[dict[str, Any]]:
        """Both ways to lerp, decay, and the variants."""
        for beta1, weight_decay in ((0.9, 0.1), (0.4, 0.01), (0.95, 0.0)):
            for amsgrad, maximize in ((False, False), (True, False), (False, True)):
                yield {
                    "lr": 1e-3,
                    "betas": (beta1, 0.95),
                    "eps": 1e-8,
                    "weight_decay": weight_decay,
                    "amsgrad": amsgrad,
                    "maximize": maximize,
                }

    def trials(self) -> Iterator[Trial]:
        return adam_trials(list(self.variants()))

    def betas(self, options: Mapping[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = options["betas"]
        return float(beta1), float(beta2)

    def arguments(self, implementation: str) -> dict[str, Any]:
        return {"foreach": implementation == "foreach", "fused": implementation == "fused"}

    def approximation(self) -> tuple[str, Function]:
        """The closed form over runs without a gradient: the same arithmetic whatever torch rounds."""
        if not has_numba():
            raise ConfigurationError("the closed form needs numba, which is not installed: pip install numba")
        from tiercheck.kernels import accuracy

        load_numba()
        from tiercheck.kernels.cpu.replay.closed_form import replay_sparse_adam

        error = accuracy.movement_error(replay_sparse_adam)
        if not error <= accuracy.ERROR_MAX:
            raise ConfigurationError(
                f"the closed form's self-test is off by {error:.1e} of the movement, more than {accuracy.ERROR_MAX:.0e}"
            )
        return CLOSED_FORM, on_state(replay_sparse_adam)
