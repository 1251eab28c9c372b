"""Whatever loop trains, and wherever its processes fail, one after the other: every iteration has the bits of a run
that did not fail."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training import memory
from tests.unit.integrations.torch.test_first_forward import MOMENTS, Failed, Run
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.iterations import Iterations
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch import attaching as integration
from tiercheck.types import Fidelity

LAST = 14
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
}


@dataclass(frozen=True)
class Loop:
    """How a loop is written, and how it saves."""

    says_end: bool
    in_step: bool
    """Its framework's step does everything, as DeepSpeed's, and the loop says where its iterations end all the same."""
    validates: bool
    closes: bool
    """Gives the step a closure."""
    scheduled: bool
    optimizer: str
    config: dict[str, Any]


class Process(Run):
    """From its start to where it fails."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(says_end=loop.says_end or loop.in_step, validates=loop.validates)
        self.loop = loop
        self.optimizer = OPTIMIZERS[loop.optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20) if loop.scheduled else None

    def start(self, url: str) -> Checkpointer:
        config = CheckpointConfig(deadline_s=30, bases="capture", **self.loop.config)
        iterations = partial(Iterations, in_step=self.loop.in_step)
        with patch.object(integration, "Iterations", iterations):
            checkpointer = attach(
                self.model, self.optimizer, Hierarchy.of(url), config=config, scheduler=self.scheduler
            )
        assert checkpointer.recovery is None or checkpointer.recovery.fidelity is Fidelity.EXACT
        self.checkpointer = checkpointer
        return checkpointer

    def step(self, loss: torch.Tensor) -> None:
        if self.loop.closes:
            self.optimizer.step(loss.backward)
        else:
            super().step(loss)
        if self.scheduler is not None:
            self.scheduler.step()


def is_known(loop: Loop, version: int, moment: str, *, first: bool) -> bool:
    """Whether what is saved when it fails there says where the generators go on. ADR 14 has the exception: of a loop
    that says where its iterations end, the job's first two iterations, before anybody has seen what it does between
    them, and that it says so."""
    if not loop.says_end and not loop.in_step:
        return True
    newest = version if moment == MOMENTS[4] else version - 1
    return not (first and (newest == 1 or (newest == 0 and loop.in_step and moment in MOMENTS[2:])))


loops = st.builds(
    Loop,
    says_end=st.booleans(),
    in_step=st.booleans(),
    validates=st.booleans(),
    closes=st.booleans(),
    scheduled=st.booleans(),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    config=st.fixed_dictionaries(
        {
            "base_every": st.sampled_from([1, 2, 4, 7]),
            "batch": st.integers(1, 3),
            "codec": st.sampled_from(["exact", "exact+entropy"]),
        }
    ),
)
failures = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(MOMENTS)), min_size=1, max_size=6)


@settings(max_examples=15, deadline=None)
@given(loops, failures)
def test_every_iteration_has_the_bits_of_a_run_that_did_not_fail(loop: Loop, fails: list[tuple[int, str]]) -> None:
    url, losses, seen = memory(), dict[int, str](), False
    for ahead, moment in fails:
        process = Process(loop)
        checkpointer = process.start(url)
        if checkpointer.version >= LAST - 1:
            checkpointer.abort()
            break
        version = min(checkpointer.version + ahead, LAST)
        while not is_known(loop, version, moment, first=not seen):
            version += 1
        process.fails_at = version, moment
        with suppress(Failed):
            process.train(LAST)
        checkpointer.abort()
        losses |= process.losses
        seen = seen or version > 2
    process = Process(loop)
    checkpointer = process.start(url)
    process.train(LAST)
    checkpointer.abort()
    undisturbed = Process(loop)
    undisturbed.train(LAST)
    assert losses | process.losses == undisturbed.losses
