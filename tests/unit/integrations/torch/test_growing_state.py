"""What a loop holds beside the model may grow by more in one iteration than a record has room for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training import Training, life, memory
from tiercheck.hierarchy import Hierarchy

GROWN = 1 << 20


class Packing:
    """Samples that wait to be packed into a batch."""

    def __init__(self) -> None:
        self.waiting = b""

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": self.waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = state["waiting"]


class Remembering(torch.optim.SGD):
    """Keeps something large of its own from its first step on."""

    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("past", {"losses": [0.5] * (GROWN // 9)})
        return super().step(closure)


@pytest.mark.parametrize("last", [3, 4])
@pytest.mark.parametrize("codec", ["exact", "nf4", "snapshot"])
def test_a_host_state_that_grows_at_once_is_in_the_version(codec: str, last: int) -> None:
    url = memory()
    options = {"codec": codec, "base_every": 100}
    packing = Packing()
    training = Training()
    with life(training.attach(Hierarchy.of(url), stateful={"packing": packing}, **options)):
        for version in range(1, last + 1):
            packing.waiting = bytes(GROWN * version if version % 2 else 7)
            training.step(version)
            assert training.checkpointer is not None
            assert training.checkpointer.version == version
    packing, after = Packing(), Training()
    checkpointer = after.attach(Hierarchy.of(url), stateful={"packing": packing}, **options)
    assert (checkpointer.version, len(packing.waiting)) == (last, 3 * GROWN if last == 3 else 7)
    checkpointer.abort()


def test_what_an_optimizer_begins_to_keep_is_in_the_version() -> None:
    url = memory()
    training = Training(Remembering)
    with life(training.attach(Hierarchy.of(url), base_every=100)):
        for version in range(1, 4):
            training.step(version)
    after = Training(Remembering)
    checkpointer = after.attach(Hierarchy.of(url), base_every=100)
    assert checkpointer.version == 3
    assert len(after.optimizer.state["past"]["losses"]) == GROWN // 9
    assert after.parameters() == training.states[3]
    checkpointer.abort()
