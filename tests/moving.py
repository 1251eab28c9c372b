"""Movers over small tiers, for tests of what they do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import CommitKey, MarkerKey, ShardKey, parse
from tiercheck.policy.placement import Placement
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.replication.mover import Mover
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ObjectInfo, Payload, PutMode

WORLD = 2


def shard(
    key: ShardKey, *, world_size: int = WORLD, token: str = "", objects: Mapping[str, object] | None = None
) -> list[bytes | bytearray | memoryview]:
    metadata = ShardMetadata.of(key, world_size, token)
    name = f"{key.first}/x"
    return list(container.payload(metadata, [TensorEntry(name, "U8", (64,), bytes(range(64)))], objects))


def tiers(tmp_path: Path, *, durable: FaultPlan | None = None, middle: FaultPlan | None = None) -> OpenHierarchy:
    def under(plan: FaultPlan | None, url: str) -> Tier:
        return Tier(url, wrap=(lambda driver: FaultyDriver(driver, plan)) if plan else None)

    urls = [Tier(f"memory://mover-{uuid.uuid4().hex}")]
    if middle is not None:
        urls.append(under(middle, f"nvme://{tmp_path}/middle"))
    return Hierarchy.of(*urls, under(durable, f"nvme://{tmp_path}/durable?survives=rack")).open()


FIRST = Lineage(((1, None),))


def mover_of(
    hierarchy: OpenHierarchy,
    *,
    rank: int = 0,
    world_size: int = 1,
    lineage: Lineage = FIRST,
    placement: Placement | None = None,
    retention: Retention | None = None,
) -> Mover:
    return Mover(
        hierarchy,
        rank=rank,
        world_size=world_size,
        generation=1,
        placement=placement or Placement(2),
        retention=retention or Retention(),
        lineage=lineage,
    )


async def capture(hierarchy: OpenHierarchy, *keys: ShardKey) -> None:
    for key in keys:
        await hierarchy.first.driver.put(str(key), shard(key))


def base(version: int, rank: int = 0) -> ShardKey:
    return ShardKey.base(1, version, rank)


def record(version: int) -> ShardKey:
    return ShardKey.differential(1, version, version, 0)


async def held(hierarchy: OpenHierarchy, index: int = -1) -> list[str]:
    """What a mover moves, marks and commits; neither the lineage nor reports."""
    names = [info.key async for info in hierarchy.tiers[index].driver.list()]
    return [name for name in names if isinstance(parse(name), ShardKey | MarkerKey | CommitKey)]


class Watched(FaultyDriver):
    """Counts listings of everything, and holds up puts while ``gate`` is closed."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner, FaultPlan())
        self.listings = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.listings += not prefix
        async for info in super().list(prefix):
            yield info

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await self.gate.wait()
        return await super().put(key, payload, mode=mode)


@asynccontextmanager
async def running(mover: Mover) -> AsyncIterator[None]:
    life = asyncio.create_task(mover.run())
    try:
        yield
    finally:
        life.cancel()
        await asyncio.wait({life})


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await what():  # noqa: ASYNC110
            await asyncio.sleep(0.002)  # there is nothing to wait on past the driver
