"""A mover and a durable tier that is full for a while."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.moving import base, capture, held, mover_of, record
from tiercheck.errors import CapacityExceeded
from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import CommitKey, ShardKey
from tiercheck.policy.placement import Placement
from tiercheck.runtime.backoff import Backoff
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.types import ObjectInfo, Payload, PutMode


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can sit out."""
    monkeypatch.setattr("tiercheck.replication.backoff.RETRY", Backoff(0.005, 0.02))


async def test_when_there_is_room_again_bases_come_first_and_nothing_that_leads_nowhere(tmp_path: Path) -> None:
    order: list[str] = []

    class Store(FaultyDriver):
        full = False

        async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
            if self.full:
                raise CapacityExceeded("the file system is full", tier="nvme", key=key)
            order.append(key)
            return await super().put(key, payload, mode=mode)

    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=lambda driver: Store(driver, FaultPlan()))
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", durable).open() as hierarchy:
        store = hierarchy.tiers[-1].driver
        assert isinstance(store, Store)
        mover = mover_of(hierarchy, placement=Placement(2, interval=4))
        await capture(hierarchy, base(0), record(1), record(2))
        assert await mover.cycle()
        store.full = True
        for version in range(3, 13):
            await capture(hierarchy, record(version))
            await mover.cycle()
        await hierarchy.first.driver.delete([str(record(5))])  # a save that has failed
        await capture(hierarchy, base(12))
        assert not await mover.cycle()
        store.full = False
        order.clear()
        await capture(hierarchy, *map(record, range(13, 19)))
        with pytest.raises(CapacityExceeded, match=r"versions from 17 on wait for the next base"):
            await mover.drain(10, closing=False)
        batches = [str(ShardKey.differential(1, first, first + 1, 0)) for first in (3, 13, 15)]
        shards = [key for key in order if key.startswith("r")]
        assert shards[0] == str(base(12))
        assert sorted(shards[1:]) == batches
        assert str(CommitKey(1, 12)) in await held(hierarchy)
        await mover.drain(10, closing=True)
        assert order[-1] == str(ShardKey.differential(1, 17, 18, 0)), "no base is to come that needs the room"
        await capture(hierarchy, base(18))
        await mover.drain(10, closing=True)
        assert mover.status.watermark == 18
