"""Models that become others in mid-training: what can be saved is saved, and what a restart needs is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.training import Training, memory, recovered
from tiercheck.errors import Mismatch, SaveError, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy


def registered(training: Training) -> None:
    training.model.register_buffer("seen", torch.arange(3.0))


def reshaped(training: Training) -> None:
    training.model.seen = torch.arange(3.0)


def resized(training: Training) -> None:
    """As the observers of ``torch.ao.quantization`` do in their first forward pass."""
    training.model.seen.resize_(3).copy_(torch.arange(3.0))


@pytest.mark.parametrize("change", [registered, reshaped, resized])
@pytest.mark.parametrize("killed_at", [2, 3, 5])
def test_a_buffer_of_another_form_is_there_after_a_restart_that_makes_it_first(
    change: Callable[[Training], None], killed_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    url, training = memory(), Training()
    if change is not registered:
        training.model.register_buffer("seen", torch.zeros(0))
    checkpointer = training.attach(Hierarchy.of(url), base_every=100)
    training.step(1)
    change(training)
    for version in range(2, killed_at + 1):
        training.model.seen += 1
        training.step(version)
    assert (checkpointer.stats.bases, checkpointer.stats.differentials) == (2, killed_at - 1)
    checkpointer.abort()
    assert "to (3,) torch.float32: its version gets a base" in caplog.text
    with pytest.raises(Mismatch, match=r"seen was .*, and is not there here"):
        Training().attach(Hierarchy.of(url))
    after = Training()
    after.model.register_buffer("seen", torch.zeros(3))
    again = after.attach(Hierarchy.of(url))
    again.abort()
    assert (again.version, after.parameters()) == (killed_at, training.states[killed_at])
    assert again.recovery is not None and again.recovery.fidelity == "exact"
    assert torch.equal(after.model.seen, torch.arange(3.0) + killed_at - 1)


def test_other_parameters_than_were_attached_are_told_with_the_next_base(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with training.attach(Hierarchy.of(memory()), base_every=2) as checkpointer:
        training.step(1)
        training.model.append(torch.nn.Linear(1, 1).requires_grad_(False))
        training.step(2)
        checkpointer.flush()
    assert "has other parameters than when it was attached (2.bias, 2.weight)" in caplog.text


def test_a_model_of_another_dtype_is_told_what_to_do() -> None:
    training = Training(torch.optim.SGD)
    training.model = torch.nn.Linear(64, 64)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    url = memory()

    def step() -> None:
        kind = training.model.weight.dtype
        training.model(torch.ones(2, 64, dtype=kind)).sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    checkpointer = training.attach(Hierarchy.of(url))
    step()
    checkpointer.end_iteration()
    training.model.double()
    with pytest.raises(SaveError, match="change it before it is attached"):
        for _ in range(3):
            step()
            checkpointer.end_iteration()
    checkpointer.abort()


def test_a_parameter_that_the_optimizer_does_not_know_has_taken_a_name() -> None:
    training = Training()
    checkpointer = training.attach(Hierarchy.of(memory()), base_every=1)
    training.step(1)
    training.model[1].weight = torch.nn.Parameter(torch.zeros(1, 4))
    with pytest.raises(UnsupportedSetup, match=r"1\.weight: if another tensor has taken the place"):
        for version in (2, 3):
            training.step(version)
    checkpointer.abort()


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_version_whose_saving_an_interrupt_broke_off_is_saved_when_the_loop_says_its_end_again(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    url, training = memory(), Training()
    checkpointer = training.attach(Hierarchy.of(url), base_every=100)
    for version in range(1, at):
        training.step(version)
    recorder = checkpointer._job.recorder
    original = recorder._close

    async def interrupted(*arguments: object, **options: object) -> dict[str, int]:
        recorder._close = original
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.step(at)
    checkpointer.end_iteration()
    state = training.parameters()
    bases = checkpointer.stats.bases
    checkpointer.end_iteration()
    assert checkpointer.stats.bases == bases, "once is enough"
    checkpointer.abort()
    assert recovered(url) == (at, state)
