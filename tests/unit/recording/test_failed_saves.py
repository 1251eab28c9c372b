"""Saves that fail or are interrupted half-way, and users who go on: what is recovered is a state that there was."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.failing import Failing
from tests.processes import until
from tests.training import FULL, Training, faulty, memory, recovered
from tests.unit.opening.test_failing_ranks import ranks
from tiercheck.checkpointer import Checkpointer
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, SaveError, Transient, UnsupportedSetup
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.integrations.torch import attach
from tiercheck.integrations.torch.module_provider import ModuleProvider
from tiercheck.runtime.group import SimulatedGroup
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.wrappers.base import Call, Operation
from tiercheck.types import Fidelity


def test_a_differential_that_lost_a_part_is_not_published_without_it() -> None:
    url = memory()
    training = Training()
    provider = ModuleProvider(training.model, training.optimizer)
    # Differential 1 finds no room twice (the second try is after the mover has made some), nor does the next base.
    tier = faulty(url, lambda at: at.call == "reserve" and at.nth in (1, 2, 3, 4))
    checkpointer = Checkpointer(provider, Hierarchy.of(tier), config=CheckpointConfig(on_save_error="warn"))
    training.backward(1)
    gradients = provider.gradients()
    first = next(iter(gradients))
    checkpointer.capture(1, {first: gradients.pop(first)})
    checkpointer.capture(1, gradients)
    training.optimizer.step()
    checkpointer.complete(1)
    assert checkpointer.stats.failed_saves == 2
    checkpointer.abort()
    assert recovered(url) == (0, training.states[0])


def test_whoever_goes_on_after_a_failed_save_recovers_a_state_there_was() -> None:
    url = memory()
    training = Training()
    # The first differential cannot be published, and no base finds room from then on.
    tier = faulty(
        url,
        lambda at: (
            (at.call == "publish" and "000000000001-" in str(at.key))
            or (at.call == "reserve" and "base" in str(at.key) and at.nth > 0)
        ),
    )
    checkpointer = training.attach(Hierarchy.of(tier))
    for version in (1, 2, 3):
        with pytest.raises(SaveError, match=FULL):
            training.step(version)
        assert checkpointer.version == version, "the optimizer has stepped"
    checkpointer.abort()
    version, parameters = recovered(url)
    assert parameters == training.states[version]


def test_an_interrupted_publication_does_not_lend_its_version_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    url = memory()
    training = Training()
    checkpointer = training.attach(Hierarchy.of(url))
    memory_of = checkpointer._job.recorder._memory
    publish = memory_of.publish

    async def interrupted(reservation: Reservation, nbytes: int, what: str) -> None:
        await publish(reservation, nbytes, what)
        if what == "publishing differential 1":
            raise KeyboardInterrupt

    monkeypatch.setattr(memory_of, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.step(1)
    for version in (2, 3):
        training.step(version)
    checkpointer.abort()
    assert recovered(url) == (3, training.states[3])


def test_a_durable_tier_that_takes_nothing_stalls_training_once(tmp_path: Path) -> None:
    plan = FaultPlan.full(after_puts=1)
    durable = Tier(f"nvme://{tmp_path}?survives=rack", wrap=lambda driver: FaultyDriver(driver, plan))
    training = Training()
    hierarchy = Hierarchy.of(memory(), durable)
    checkpointer = training.attach(hierarchy, base_every=2, on_save_error="warn", deadline_s=1.0)
    for version in range(1, 9):
        training.step(version)
    assert checkpointer.stats.failed_saves > 2
    assert 1.0 <= checkpointer.stats.drain_stall_s < 2.0
    checkpointer.abort()


def test_bases_are_made_again_when_the_durable_tier_is_back(tmp_path: Path, name: str) -> None:
    """Whoever has waited for room in vain waits no more, and looks each time. In shared memory that takes a moment."""
    away = threading.Event()

    def refusing(call: Call) -> Exception | None:
        return Transient("away") if away.is_set() and call.operation is Operation.PUT else None

    durable = Tier(f"nvme://{tmp_path}?survives=rack", wrap=lambda driver: Failing(driver, refusing))
    training = Training()
    hierarchy = Hierarchy.of(f"shm://{name}?size=32MiB", durable)
    checkpointer = training.attach(hierarchy, base_every=2, batch=2, on_save_error="warn", deadline_s=1.0)
    away.set()
    version = 0
    while checkpointer.stats.failed_saves < 3:
        version += 1
        training.step(version)
    away.clear()
    until(lambda: not checkpointer.stats.mover.undrained_bases, "the durable tier has all bases")
    failed, bases = checkpointer.stats.failed_saves, checkpointer.stats.bases
    for more in range(1, 7):
        training.step(version + more)
        checkpointer.flush()
    assert checkpointer.stats.failed_saves == failed
    assert checkpointer.stats.bases >= bases + 3
    checkpointer.abort()


def test_ranks_that_go_on_after_failed_saves_need_a_tier_they_share() -> None:
    class OfTwo(SimulatedGroup):
        """Two ranks, of which the other does just the same."""

        def __init__(self) -> None:
            self.rank, self.world_size = 0, 2

        def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
            return [message, message]

    training = Training()
    with pytest.raises(ConfigurationError, match=r"2 ranks needs a tier that all of them share"):
        attach(
            training.model,
            training.optimizer,
            Hierarchy.of(memory()),
            config=CheckpointConfig(on_save_error="warn"),
            group=OfTwo(),
        )


def test_a_gap_on_one_rank_sends_no_rank_back(tmp_path: Path) -> None:
    """Rank 0 cannot record version 3, and something else writes to a parameter of rank 1 before version 5: each has a
    base of its own then, where the other has none. Every rank has every version all the same."""
    urls, reached = [memory(), memory()], 7

    def life(rank: int, group: SimulatedGroup) -> tuple[Training, Checkpointer]:
        training = Training()
        provider = ModuleProvider(training.model, training.optimizer)
        first = faulty(urls[rank], lambda at: at.call == "publish" and "000000000003-" in str(at.key), times=1 - rank)
        config = CheckpointConfig(base_every=50, on_save_error="warn")
        hierarchy = Hierarchy.of(first, f"nvme://{tmp_path}?survives=rack")
        return training, Checkpointer(provider, hierarchy, group=group, config=config)

    def first_life(rank: int, group: SimulatedGroup) -> bytes:
        training, checkpointer = life(rank, group)
        provider = ModuleProvider(training.model, training.optimizer)
        for version in range(1, reached + 1):
            training.backward(version)
            if (rank, version) == (1, 5):
                with torch.no_grad():
                    next(training.model.parameters()).mul_(0.5)
            checkpointer.capture(version, provider.gradients())
            training.optimizer.step()
            checkpointer.complete(version)
        checkpointer.abort()
        assert checkpointer.stats.failed_saves == 1 - rank
        return training.parameters()

    def second_life(rank: int, group: SimulatedGroup) -> tuple[int, int, Fidelity, bytes]:
        training, checkpointer = life(rank, group)
        checkpointer.abort()
        recovery = checkpointer.recovery
        assert recovery is not None
        return recovery.version, recovery.point.anchor, recovery.fidelity, training.parameters()

    trained, ended = ranks(first_life), ranks(second_life)
    assert [ended[rank][:3] for rank in (0, 1)] == [(reached, anchor, Fidelity.EXACT) for anchor in (3, 5)]
    assert [ended[rank][3] for rank in (0, 1)] == [trained[rank] for rank in (0, 1)]


def test_a_second_optimizer_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(UnsupportedSetup, match=r"2 trainable parameters are not updated .*1.weight, 1.bias"):
        attach(model, optimizer, Hierarchy.of(memory()))
    model[1].requires_grad_(False)
    attach(model, optimizer, Hierarchy.of(memory())).abort()
