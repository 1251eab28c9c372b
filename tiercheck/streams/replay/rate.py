"""How fast this machine replays the steps of an optimizer, by replaying some on a state that is made up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tiercheck.errors import TierCheckError
from tiercheck.streams.rebuilding.stored import StoredState, check_replayable
from tiercheck.streams.replay.fidelity import Tally
from tiercheck.streams.replay.kernel_selection import kernel_for
from tiercheck.streams.replay.replay import STEPS_AT_ONCE, Replayer, threads_granted
from tiercheck.streams.replay.runs import Run, Step
from tiercheck.streams.state import ReplayRate
from tiercheck.streams.tensors.provider import Identity

__all__ = ["replay_rate"]

ELEMENTS_MAX = 1 << 20
REPEATS = 3
NAME = "made up"


def replay_rate(
    identity: Identity,
    options: Sequence[Mapping[str, Any]],
    elements: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayRate:
    """``options``: of the parameter groups; ``elements``: of the tensors that are trained."""
    try:
        check_replayable(identity)
        state = StoredState(identity, {NAME: 0})
        groups = [dict(each) for each in options]
        count = max(1, min(elements, ELEMENTS_MAX))
        state.load(
            masters={NAME: torch.zeros(count, dtype=torch.float32)},
            optimizer_state={},
            extras={},
            hyperparameters=groups,
        )
        replayer = Replayer(state, threads=max(1, threads_granted(None) // 2))
        gradient = torch.linspace(-1, 1, count, dtype=torch.float32)
        steps = tuple(Step(each + 1, groups, {NAME: gradient}) for each in range(STEPS_AT_ONCE))
        run = Run(1, STEPS_AT_ONCE, steps, {}, {}, Tally())
        replayer.apply(run)  # this makes the optimizer's state, and kernels ready
        replayer.apply(run)
        seconds = []
        for _ in range(REPEATS):
            began = clock()
            replayer.apply(run)
            seconds.append(max(clock() - began, 1e-9))
        moved = count * STEPS_AT_ONCE
        return ReplayRate((moved / max(seconds), moved / min(seconds)), kernel_for(state, steps) is not None)
    except (TierCheckError, ValueError, TypeError, RuntimeError) as error:
        return ReplayRate(None, False, f"{error}")
