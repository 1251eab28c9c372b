"""A kill at every point at which a save talks to a tier: whatever had returned is there, and nothing half-written is
taken for whole.

The places are those of every call to either tier, the mover's included: before it, at a suspension in it, and after
it when its caller does not know yet.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.jobs import Job, uninterrupted
from tests.training import Training, memory, recovered
from tiercheck.errors import TierCheckError
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.streams.records.base import BaseCapture
from tiercheck.testing.faults import Fault, FaultPlan, FaultyDriver, Killed, Moment, Point
from tiercheck.tiers.driver import TierDriver

LAST = 5
BASE_EVERY = 2


class Tiers:
    """A memory and a durable tier whose processes die together; the memory outlives them, as shared memory does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / uuid.uuid4().hex
        self.memory = f"memory://killed-{uuid.uuid4().hex}"
        self.durable = f"nvme://{self.directory}?survives=rack"

    def under(self, plan: FaultPlan) -> Hierarchy:
        def faulty(driver: TierDriver) -> TierDriver:
            return FaultyDriver(driver, plan)

        return Hierarchy.of(Tier(self.memory, wrap=faulty), Tier(self.durable, wrap=faulty))

    def without_memory(self) -> Tiers:
        """The durable tier as it is now, and an empty memory."""
        left = Tiers(self.root)
        if self.directory.exists():
            shutil.copytree(self.directory, left.directory)
        return left


def live(tiers: Tiers, plan: FaultPlan, last: int = LAST) -> Job:
    """One life of the job: to its end, or to where the plan kills it."""
    job = Job()
    try:
        job.attach(tiers.under(plan), base_every=BASE_EVERY)
        job.train(last)
        job.checkpointer.close()
    except (Killed, TierCheckError):
        assert plan.dead, "only a kill ends this job"
    finally:
        if job.checkpointer is not None:
            job.checkpointer.abort()
    return job


Place = tuple[str, str | None, Moment]
"""Where a kill strikes: the call, its key, and before it, inside it or after it."""


def places(root: Path) -> list[Place]:
    """Every place that a life without a kill passes."""
    plan = FaultPlan()
    live(Tiers(root), plan)
    return sorted({place(point) for point in plan.points}, key=str)


def place(point: Point) -> Place:
    return point.call, point.key, point.moment


def kill_at(target: Place) -> FaultPlan:
    return FaultPlan((Fault(lambda point: place(point) == target, Killed),))


@pytest.fixture(scope="module")
def reference() -> Job:
    return uninterrupted(LAST)


def check(tiers: Tiers, killed: Job, reference: Job, least: int, most: int) -> None:
    job = live(tiers, FaultPlan())
    recovered = job.checkpointer.recovery.version if job.checkpointer.recovery else 0
    assert least <= recovered <= most
    losses = {version: loss for version, loss in killed.losses.items() if version <= recovered} | job.losses
    assert losses == reference.losses
    assert job.state() == reference.state()


def committed(tiers: Tiers) -> int:
    """The newest base whose commit record is in the durable tier."""
    return max((int(record.name) for record in tiers.directory.glob("job/commits/g*/*")), default=0)


def test_a_kill_anywhere_costs_nothing_that_had_returned(tmp_path: Path, reference: Job) -> None:
    """If the memory survives; and if it is lost, from the newest committed base on. At every sixth place: the
    others are struck in tests/simulation/test_kills_in_a_life.py, in virtual time."""
    targets = places(tmp_path)[::6]
    assert len(targets) > 20
    struck = 0
    for target in targets:
        tiers = Tiers(tmp_path)
        killed = live(tiers, plan := kill_at(target))
        struck += plan.dead
        without_memory = tiers.without_memory()
        # The version in whose step the kill struck may have been published before, or may not.
        check(tiers, killed, reference, killed.stepped, killed.stepped + 1)
        check(without_memory, killed, reference, committed(without_memory), killed.stepped + 1)
    # The mover runs beside the training: a batch it sends in one life may go in two parts in another.
    assert struck > 0.8 * len(targets)


def test_no_iteration_ends_before_the_base_that_its_generation_opens_with_is_there(
    tmp_path: Path, reference: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing leads to its version before. Here the process dies after the base was copied, while it is hashed."""
    tiers = Tiers(tmp_path)
    first = Job()
    first.attach(tiers.under(FaultPlan()), base_every=50)
    first.train(2)
    first.checkpointer.abort()
    ended = threading.Event()

    def dies(self: BaseCapture) -> int:
        ended.wait(0.3)  # as long as that, for an iteration that does not wait for it
        raise Killed

    second = Job()
    with monkeypatch.context() as patched:
        patched.setattr(BaseCapture, "finish", dies)
        second.attach(tiers.under(FaultPlan()), base_every=50)
        with suppress(Killed):
            second.train(3)
            ended.set()
        second.checkpointer.abort()
    second.losses |= first.losses
    check(tiers, second, reference, max(2, second.stepped), 3)


def test_a_generation_whose_opening_base_was_written_to_gets_another_before_its_first_iteration_ends() -> None:
    """As where DDP broadcasts parameters after attach."""
    url = memory()
    training = Training()
    checkpointer = training.attach(Hierarchy.of(url))
    with torch.no_grad():
        training.model[0].weight.add_(1.0)
    training.step(1)
    checkpointer.abort()
    assert recovered(url) == (1, training.states[1])
