"""What a loop holds beside model and optimizer, when it resumes with other things than it was saved with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training import Training, memory
from tiercheck.errors import Mismatch, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.streams.tensors.beside import Beside
from tiercheck.types import Fidelity


class Counter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_what_is_attached_later_begins_as_it_is_and_the_recovery_is_not_called_exact() -> None:
    hierarchy = Hierarchy.of(memory())
    training = Training()
    checkpointer = training.attach(hierarchy, stateful={"sampler": Counter(5)})
    training.step(1)
    checkpointer.close()
    ours = {"sampler": Counter(), "ema": Counter(7)}
    training = Training()
    checkpointer = training.attach(hierarchy, stateful=ours)
    assert {name: each.value for name, each in ours.items()} == {"sampler": 5, "ema": 7}
    assert checkpointer.recovery is not None
    assert checkpointer.recovery.fidelity is Fidelity.APPROXIMATE
    assert checkpointer.recovery.notes == ("the checkpoint holds no state of ema, which begins as it is",)
    training.step(2)
    checkpointer.close()
    after = Training().attach(hierarchy, stateful={"sampler": Counter(), "ema": Counter()})
    after.abort()
    assert after.recovery is not None
    assert after.recovery.fidelity is Fidelity.EXACT, "from here on it is saved"


def test_what_is_no_longer_attached_is_not_lost_in_silence() -> None:
    hierarchy = Hierarchy.of(memory())
    training = Training()
    checkpointer = training.attach(hierarchy, stateful={"sampler": Counter(5), "ema": Counter()})
    training.step(1)
    checkpointer.close()
    with pytest.raises(Mismatch, match=r"state of sampler, which this job does not attach.*\(attached: ema\): pass it"):
        Training().attach(hierarchy, stateful={"ema": Counter()})
    with pytest.raises(Mismatch, match=r"state of ema, sampler, which this job does not attach.*\(attached: none\)"):
        Training().attach(hierarchy)


class Loader(Counter):
    """Does not say what it was given before it has given a batch itself, as some do."""

    given: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value} if self.given is None else {"value": -1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state

    def draw(self) -> None:
        self.value, self.given = (self.value if self.given is None else self.given["value"]) + 1, None


def test_what_a_loader_was_given_is_known_to_the_start_after_one_that_failed_before_a_step() -> None:
    hierarchy = Hierarchy.of(memory())
    training, loader = Training(), Loader()
    checkpointer = training.attach(hierarchy, stateful={"loader": loader})
    loader.draw()
    training.step(1)
    checkpointer.flush()
    checkpointer.abort()
    for _ in range(2):
        loader = Loader()
        Training().attach(hierarchy, stateful={"loader": loader}).abort()
        assert loader.given == {"value": 1}
    training, loader = Training(), Loader()
    checkpointer = training.attach(hierarchy, stateful={"loader": loader})
    loader.draw()
    training.step(2)
    checkpointer.abort()
    after = Loader()
    Training().attach(hierarchy, stateful={"loader": after}).abort()
    assert after.given == {"value": 2}, "training has begun: the loader speaks for itself"


class WithoutState:
    """As Accelerate's loader: what it asks for its state may have none."""

    def state_dict(self) -> dict[str, object]:
        raise AttributeError("'DataLoader' object has no attribute 'dl_state_dict'")

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def test_an_object_that_cannot_say_its_state_is_named() -> None:
    with pytest.raises(
        UnsupportedSetup, match=r"^loader \(WithoutState\) cannot be saved: its state_dict\(\) raised Attr"
    ):
        Beside(stateful={"loader": WithoutState()}).host_state()
