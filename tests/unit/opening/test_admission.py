"""Admission: what it asks for is what a job comes to hold, however far the durable tier lags behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.training import Training
from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import CommitKey, Key, ShardKey, Stream, parse
from tiercheck.opening.admission import Demand, bases_at_most, differentials_at_most
from tiercheck.policy.observation import Contents, Observation, Role
from tiercheck.policy.placement import Placement
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import Survives

T = TypeVar("T")

ROLES = (Role(0, "shm", Survives.PROCESS), Role(1, "nvme", Survives.RACK))
LINEAGE = Lineage.of([Branch(1, 0, 0, 1, "0" * 16)])


@pytest.mark.parametrize("base_every", [1, 2, 7, 50])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_durable_tier_that_lags_as_far_as_it_may(base_every: int, batch: int) -> None:
    """Each base drains only when training waits for it: then memory holds the most."""
    config = CheckpointConfig(base_every=base_every, batch=batch)
    held: set[Key] = {ShardKey.base(1, 0, 0)}
    durable: set[Key] = set()
    bases = differentials = 0

    def reclaim() -> None:
        contents = tuple(Contents.of((key, 1) for key in keys) for keys in (held, durable))
        seen = Observation(ROLES, contents, 0, 1, 1, LINEAGE)
        held.difference_update(Retention(placement=Placement(batch)).reclaimable(seen)[0])

    for version in range(1, 6 * base_every + 1):
        held.add(ShardKey.differential(1, version, version, 0))
        if version % base_every == 0:
            while len(undrained := sorted(key for key in held - durable if is_base(key))) >= BASES_IN_VOLATILE_TIERS:
                durable |= {undrained[0], CommitKey(1, undrained[0].first)}
                differentials = max(differentials, sum(not is_base(key) for key in held))
                reclaim()
            held.add(ShardKey.base(1, version, 0))
            bases = max(bases, sum(map(is_base, held)))
    assert differentials == 3 * base_every
    assert differentials < differentials_at_most(config)
    assert bases == bases_at_most()


def is_base(key: Key) -> bool:
    return isinstance(key, ShardKey) and key.stream is Stream.BASE


class Lagging(WrappingDriver):
    """Takes a base only once training waits for it to be taken."""

    def __init__(self, inner: TierDriver, training: Training, base_every: int) -> None:
        super().__init__(inner)
        self.training = training
        self.base_every = base_every

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        key = parse(call.key or "")
        if call.operation is Operation.PUT and key is not None and is_base(key):
            assert isinstance(key, ShardKey)
            # The training's thread counts versions, and signals nothing.
            while self.training.checkpointer.version < key.first + 2 * self.base_every:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return await work()


def test_a_tier_as_large_as_admission_asks_for_is_large_enough(tmp_path: Path) -> None:
    base_every = 8
    training = Training()

    def hierarchy(size: int, name: str) -> Hierarchy:
        durable = Tier(
            f"nvme://{tmp_path}/{name}?survives=rack", wrap=lambda driver: Lagging(driver, training, base_every)
        )
        return Hierarchy.of(f"memory://{name}-{tmp_path.name}?size={size}", durable)

    wanted = r"the first tier must hold 3 bases of .* and 29 differentials of"
    with pytest.raises(CapacityExceeded, match=wanted) as small:
        training.attach(hierarchy(1000, "small"), base_every=base_every)
    assert "give it more, or lower base_every (now 8)" in str(small.value)
    roomy = training.attach(hierarchy(1 << 30, "roomy"), base_every=base_every)
    demand = Demand.of(roomy._job.recorder._stream, roomy.config)
    roomy.abort()
    checkpointer = training.attach(hierarchy(demand.nbytes, "enough"), base_every=base_every)
    for version in range(1, 5 * base_every):
        training.step(version)
    assert checkpointer.stats.drain_stall_s > 0
    checkpointer.abort()


class NeverReady(WrappingDriver):
    """Makes memory ready for ever."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner)
        self.asked: list[tuple[int, int]] = []
        self.ended = False

    async def prepare_reservations(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.asked = list(sizes)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


def test_nobody_waits_for_memory_that_is_made_ready(tmp_path: Path) -> None:
    training, drivers = Training(), list[NeverReady]()

    def wrap(driver: TierDriver) -> TierDriver:
        drivers.append(NeverReady(driver))
        return drivers[-1]

    first = Tier(f"memory://ready-{tmp_path.name}?size={1 << 30}", wrap=wrap)
    checkpointer = training.attach(Hierarchy.of(first, f"nvme://{tmp_path}/durable?survives=rack"), base_every=4)
    for version in range(1, 10):
        training.step(version)
    checkpointer.close()
    (driver,) = drivers
    assert driver.ended
    records = differentials_at_most(checkpointer.config)
    assert [count for _, count in driver.asked] == [4, bases_at_most() - 1, records - 4]


def test_bases_are_made_ready_before_anything_else_if_room_is_short() -> None:
    demand = Demand(3, 100, 20, 10, 10, "differentials")
    assert demand.reservations(1000, 5) == [(10, 5), (100, 2), (10, 15)]
    assert demand.reservations(230, 5) == [(10, 3), (100, 2), (10, 0)]
    assert demand.reservations(150, 5) == [(10, 5), (100, 1), (10, 0)]
    assert demand.reservations(0, 5) == [(10, 0), (100, 0), (10, 0)]
