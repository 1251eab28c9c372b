"""Replays called with the state argument by argument, and the real optimizer beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.kernels.gradients import Gradient
from tiercheck.streams.optimizers import certification
from tiercheck.streams.optimizers.registry import optimizer_of
from tiercheck.streams.optimizers.replay import Replay, Setting, replay_for

__all__ = ["Positional", "differing_values", "replay_of", "run_optimizer", "run_replay"]

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Positional:
    """A replay of Adam or SGD: ``(param, exp_avg, exp_avg_sq, gradients, steps)``, ``(param, momentum, ...)``."""

    replay: Replay

    @property
    def kind(self) -> str:
        return self.replay.optimizer.kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replay, name)

    def __call__(self, param: Array, *arguments: Any, threads: int = 1, max_exp_avg_sq: Array | None = None) -> None:
        *state, gradients, steps = arguments
        named = dict(zip(self.replay.optimizer.state, [*state, max_exp_avg_sq], strict=False))
        held = {name: array for name, array in named.items() if array is not None}
        self.replay(param, held, gradients, steps, threads=threads)


def replay_of(
    kind: str, implementation: str, choose: str | None = None, *, exact: bool = True, **changed: str
) -> Positional | None:
    version, instruction_set = certification.environment()
    here = {"torch_version": version, "instruction_set": instruction_set, "device": "cpu", **changed}
    found = replay_for(kind, Setting(implementation, **here), choose=choose, exact=exact)
    return None if found is None else Positional(found)


def run_optimizer(
    kind: str, implementation: str, start: Array, gradients: Sequence[Array], options: Any
) -> list[Array]:
    """The parameter and every array of the state after the steps of the real optimizer."""
    _, last = certification.run_optimizer(optimizer_of(kind), implementation, start, gradients, options)
    return list(last.values())


def run_replay(
    replay: Positional, start: Array, gradients: Sequence[Gradient], options: Any, *, threads: int = 1
) -> list[Array]:
    """The same from a replay, which takes the first step, too."""
    optimizer = replay.replay.optimizer
    needed = optimizer.needs(optimizer.step(options, 1))
    held = {"param": start, **{name: np.zeros_like(start) for name in needed}}

    def function(*arguments: Any) -> None:
        replay.replay(*arguments, threads=threads)

    return list(certification.run_replay(function, optimizer, held, gradients, options).values())


def differing_values(actual: Sequence[Array], expected: Sequence[Array]) -> int:
    """Values with other bits; a NaN is a NaN, whatever its payload."""
    pairs = zip(actual, expected, strict=True)
    return sum(certification.differing_values({"": a}, {"": b}) for a, b in pairs)
