"""A loop that sets gradients to zero and keeps them steps parameters that an iteration did not use; so does the process
that resumes."""

from __future__ import annotations

import pytest
import torch

from tests.training import Training, life, memory
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.tensors.joint import parts_of

LAST = 8
UNUSED = range(4, 8)


class Branches(Training):
    """A second layer that some iterations leave out. ``drops``: the loop drops its gradients, before the pass or behind
    the iteration's end; else it sets them to zero."""

    def __init__(self, *, drops: bool, behind: bool, says_end: bool, several: bool = False) -> None:
        super().__init__()
        self.says_end, self.drops, self.behind = says_end, drops, behind
        if several:
            first, second = self.model
            self.optimizer = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (first, second)]

    def zero_grad(self) -> None:
        for each in self.optimizer if isinstance(self.optimizer, list) else parts_of(self.optimizer):
            each.zero_grad(set_to_none=self.drops)

    def step(self, version: int) -> None:
        if not self.behind:
            self.zero_grad()
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(version))
        out = self.model[0](batch)
        (out if version in UNUSED or version < 2 else self.model[1](out)).pow(2).mean().backward()
        for each in self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]:
            each.step()
        if self.checkpointer is not None and self.says_end:
            self.checkpointer.end_iteration()
        if self.behind:
            self.zero_grad()
        self.states[version] = self.parameters()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("says_end", "several"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("killed", [3, 5])
def test_a_resumed_loop_steps_the_parameters_that_the_interrupted_one_would_have(
    killed: int, drops: bool, behind: bool, says_end: bool, several: bool
) -> None:
    def make() -> Branches:
        return Branches(drops=drops, behind=behind, says_end=says_end, several=several)

    undisturbed, url = make(), memory()
    for version in range(1, LAST + 1):
        undisturbed.step(version)
    for last in (killed, LAST):
        training = make()
        checkpointer = training.attach(Hierarchy.of(url), base_every=100)
        if last == LAST:
            assert checkpointer.version == killed - (not says_end), "without end_iteration the next pass publishes"
            assert checkpointer.recovery is not None
            assert checkpointer.recovery.fidelity == "exact"
        with life(checkpointer):
            for version in range(checkpointer.version + 1, last + 1):
                training.step(version)
    assert training.states[LAST] == undisturbed.states[LAST]


def test_the_next_process_but_one_keeps_them_too() -> None:
    def make() -> Branches:
        return Branches(drops=False, behind=False, says_end=True)

    undisturbed, url = make(), memory()
    for version in range(1, LAST + 1):
        undisturbed.step(version)
    for last in (4, 4, 5, LAST):
        training = make()
        checkpointer = training.attach(Hierarchy.of(url), base_every=100)
        with life(checkpointer):
            for version in range(checkpointer.version + 1, last + 1):
                training.step(version)
    assert training.states[LAST] == undisturbed.states[LAST]
