"""What gradients do not tell of: a version that they cannot lead to is saved otherwise, or refused."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import Forks
from tests.training import Training, faulty, memory, recovered
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import UnsupportedSetup
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.streams.records.base import BaseCapture
from tiercheck.tiers.shm.namespaces import remove_namespace


@pytest.mark.parametrize("base_every", [1, 2, 50])
@pytest.mark.parametrize("through", ["no_grad", "data"])
def test_parameters_written_to_after_the_step_are_in_the_version(
    base_every: int, through: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = memory()
    training = Training()

    def clamp() -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                (parameter.data if through == "data" else parameter).clamp_(-0.05, 0.05)

    training.after_step = clamp
    checkpointer = training.attach(Hierarchy.of(url), base_every=base_every)
    for version in range(1, 5):
        training.step(version)
    checkpointer.abort()
    assert caplog.text.count("something other than the attached optimizer's step wrote") == 1
    assert "versions from here on are approximate" not in caplog.text
    after = Training()
    resumed = after.attach(Hierarchy.of(url))
    resumed.abort()
    assert (resumed.version, resumed.recovery.fidelity, after.parameters()) == (4, "exact", training.states[4])


def test_a_version_with_new_frozen_parameters_is_a_base_or_nothing() -> None:
    """An average of the trained parameters, as of a teacher; none of its bases comes to be published but the first."""

    def make() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"student": torch.nn.Linear(4, 1), "teacher": torch.nn.Linear(4, 1)})
        model["teacher"].requires_grad_(False)
        return model, torch.optim.AdamW(model["student"].parameters(), lr=0.1)

    def published(tier: str | Tier, steps: int) -> tuple[Checkpointer, list[bytes], list[bytes]]:
        """The checkpointer, the state it found, and the one it leaves."""
        model, optimizer = make()
        config = CheckpointConfig(on_save_error="warn", deadline_s=10.0)
        checkpointer = attach(model, optimizer, Hierarchy.of(tier), config=config)
        found = [each.numpy().tobytes() for each in model.state_dict().values()]
        for _ in range(steps):
            optimizer.zero_grad()
            model["student"](torch.ones(2, 4)).sum().backward()
            optimizer.step()
            model["teacher"].weight.data.lerp_(model["student"].weight.data, 0.1)
            checkpointer.end_iteration()
        checkpointer.abort()
        return checkpointer, found, [each.numpy().tobytes() for each in model.state_dict().values()]

    url = memory()
    fails = faulty(url, lambda at: at.call == "publish" and "base" in str(at.key) and at.nth > 0)
    published(fails, 3)
    first, _, left = published(url, 3)
    assert first.recovery is not None
    assert first.recovery.version == 0
    again, found, _ = published(url, 0)
    assert (again.version, again.recovery.fidelity, found) == (3, "exact", left)  # type: ignore[union-attr]


def test_a_base_that_was_written_to_during_its_copy_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    url = memory()
    training = Training()
    copy = BaseCapture.copy

    def disturbed(self: BaseCapture, buffer: memoryview) -> None:
        with torch.no_grad():
            training.model[0].weight.add_(1.0)
        copy(self, buffer)

    checkpointer = training.attach(Hierarchy.of(url), base_every=2)
    training.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(BaseCapture, "copy", disturbed)
        training.step(2)
        checkpointer._job.recorder._bases.in_flight.published.result(timeout=10)
    training.step(3)
    assert checkpointer.stats.bases == 2, "those of versions 0 and 3"
    checkpointer.abort()
    assert recovered(url) == (3, training.states[3])


def test_a_fused_optimizer_under_a_scaler_is_refused() -> None:
    training = Training(fused=True)
    scaler = torch.amp.GradScaler("cpu")
    checkpointer = training.attach(Hierarchy.of(memory()), scaler=scaler)
    scaler.scale(training.model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(UnsupportedSetup, match="fused=False"):
        scaler.step(training.optimizer)
    checkpointer.abort()


class Sampler:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.scale = torch.tensor([1.5], dtype=torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [{"generator": self.generator.get_state(), "scale": self.scale}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (nested,) = state["nested"]
        self.generator.set_state(nested["generator"])
        self.scale = nested["scale"]


def test_state_with_tensors_comes_back_as_tensors() -> None:
    url = memory()
    training, sampler = Training(), Sampler()
    checkpointer = training.attach(Hierarchy.of(url), stateful={"sampler": sampler})
    torch.rand(3, generator=sampler.generator)
    sampler.scale = torch.tensor([2.5], dtype=torch.bfloat16)
    training.step(1)
    checkpointer.abort()
    again = Sampler()
    Training().attach(Hierarchy.of(url), stateful={"sampler": again}).abort()
    assert torch.equal(again.generator.get_state(), sampler.generator.get_state())
    assert torch.equal(again.scale, sampler.scale)


IN_PLACE = """
import sys, torch
from tiercheck.config import CheckpointConfig
from tiercheck.hierarchy import Hierarchy
from tiercheck.integrations.torch import attach

class Centred(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.data.sub_(parameter.grad.data.mean())
        return super().step(closure)

for _ in range(2):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 40000)
    optimizer = Centred(model.parameters(), lr=0.1)
    checkpointer = attach(model, optimizer, Hierarchy.of(sys.argv[1]), config=CheckpointConfig(base_every=4))
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    checkpointer.end_iteration()
    checkpointer.abort()
    print("version", checkpointer.version)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    remove_namespace(name)


def test_an_optimizer_that_writes_to_gradients_is_replayed(name: str, tmp_path: Path, forks: Forks) -> None:
    """In a process of its own, which a write to memory that is mapped read-only would kill."""
    code, printed = forks.run_script(IN_PLACE, f"shm://{name}?size=64MiB", folder=tmp_path)
    versions = [line for line in printed.splitlines() if line.startswith("version")]
    assert (code, versions) == (0, ["version 1", "version 2"]), printed
