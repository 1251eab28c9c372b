"""What DeepSpeed's compiled Adam keeps outside of torch's state: a restart has it again, however it came about."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.deepspeed.plain_cpu_adam import PlainCPUAdam

pytest.importorskip("deepspeed", reason="needs deepspeed")
from deepspeed.ops.adam import DeepSpeedCPUAdam, cpu_adam

from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.deepspeed.cpu_adam import CPUAdamPowers
from tiercheck.integrations.deepspeed.layouts import Master
from tiercheck.integrations.torch import attach
from tiercheck.streams.tensors.bare_step import bare_step


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_adam, "CPUAdamBuilder", PlainCPUAdam)
        patch.setattr("cpuinfo.get_cpu_info", dict)  # else each of hundreds of optimizers asks the system, for a second
        yield


@dataclass
class Layout:
    """One group of two masters, and one of a third."""

    inner: DeepSpeedCPUAdam

    @classmethod
    def made(cls, betas: tuple[float, float]) -> Any:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        return cls(DeepSpeedCPUAdam([{"params": parameters[:2]}, {"params": parameters[2:]}], betas=betas))

    def groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def masters(self) -> list[Master]:
        pairs = ((group, each) for group, options in enumerate(self.groups()) for each in options["params"])
        return [Master(f"master{index}", each, group) for index, (group, each) in enumerate(pairs)]

    def step(self, left_out: int = -1, betas: tuple[float, float] | None = None) -> None:
        if betas is not None:
            self.groups()[1]["betas"] = betas
        for index, master in enumerate(self.masters()):
            master.tensor.grad = None if index == left_out else torch.full((3,), 0.1 * (index + 1))
        self.inner.step()

    def take(self, other: Any) -> None:
        for mine, theirs in zip(self.masters(), other.masters(), strict=True):
            mine.tensor.data.copy_(theirs.tensor)
            state = other.inner.state[theirs.tensor]
            self.inner.state[mine.tensor] = {
                name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in state.items()
            }
        for mine, theirs in zip(self.groups(), other.groups(), strict=True):
            mine["betas"] = theirs["betas"]

    def bits(self) -> list[bytes]:
        return [master.tensor.detach().numpy().tobytes() for master in self.masters()]


BETAS = st.sampled_from([(0.91, 0.98), (0.9, 0.999), (0.85, 0.99), (0.0, 0.5)])


@given(
    BETAS,
    st.lists(st.tuples(st.integers(-1, 2), st.none() | BETAS), max_size=40),
    st.integers(0, 30),
)
def test_a_new_object_steps_as_the_one_that_was_lost(
    betas: tuple[float, float], steps: list[tuple[int, tuple[float, float] | None]], used: int
) -> None:
    """``used``: the steps that the new one has taken before it was restored."""
    lost, new = Layout.made(betas), Layout.made(betas)
    kept, restored = CPUAdamPowers(lost), CPUAdamPowers(new)
    for step in steps:
        lost.step(*step)
    for _ in range(used):
        new.step()
    new.take(lost)
    options = kept.added_to([{"lr": 0.1}, {}])
    assert restored.taken_from(options) == [{"lr": 0.1}, {}]
    assert CPUAdamPowers(new).added_to([{}, {}])[0] == {key: each for key, each in options[0].items() if key != "lr"}
    for _ in range(3):
        assert new.bits() == lost.bits()
        lost.step()
        new.step()
    assert new.bits() == lost.bits()


def test_it_is_known_in_other_hooks_and_after_a_replay_which_runs_none() -> None:
    """Killed twice: the second base says what the first replay came to."""
    lost, replayed, again = (Layout.made((0.91, 0.98)) for _ in range(3))
    powers = [CPUAdamPowers(each) for each in (lost, replayed, again)]
    said: list[Any] = []
    publishes = lost.inner.register_step_post_hook(lambda *_: said.append(powers[0].added_to([{}, {}])))
    lost.inner._optimizer_step_post_hooks.move_to_end(publishes.id, last=False)
    for step in range(1, 6):
        lost.step()
        assert said[-1][0]["tiercheck.cpu_adam_powers"] == {"betas": [0.91, 0.98], "begun": 0, "step": step}
        for index, master in enumerate(replayed.masters()):
            master.tensor.grad = torch.full((3,), 0.1 * (index + 1))
        bare_step(replayed.inner)
        powers[1].stepped()
    assert replayed.bits() == lost.bits()
    again.take(replayed)
    powers[2].taken_from(powers[1].added_to([{}, {}]))
    for _ in range(3):
        lost.step()
        again.step()
        assert again.bits() == lost.bits()


def test_powers_that_have_vanished_are_not_multiplied() -> None:
    lost, new = Layout.made((0.9, 0.99)), Layout.made((0.9, 0.99))
    kept, restored = CPUAdamPowers(lost), CPUAdamPowers(new)
    for _ in range(2000):
        lost.step()
    new.take(lost)
    calls: list[int] = []
    update = new.inner.ds_opt_adam.adam_update
    new.inner.ds_opt_adam.adam_update = lambda number, step, *rest: (calls.append(step), update(number, step, *rest))
    restored.taken_from(kept.added_to([{}, {}]))
    assert len(calls) < 1900 and calls[-1] == 2000
    assert np.float32(1) - new.inner.ds_opt_adam._made[new.inner.opt_id]["powers"][1] == 1
    for _ in range(3):
        lost.step()
        new.step()
        assert new.bits() == lost.bits()


def test_other_optimizers_keep_nothing() -> None:
    layout: Any = Layout(torch.optim.AdamW([torch.ones(1)]))
    options = [{"lr": 0.1}]
    assert CPUAdamPowers(layout).added_to(options) is options == [{"lr": 0.1}]


def test_under_plain_pytorch_it_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UnsupportedSetup, match="DeepSpeedCPUAdam keeps powers of its betas"):
        attach(model, DeepSpeedCPUAdam(model.parameters()), Hierarchy.of("memory://cpu-adam"))
