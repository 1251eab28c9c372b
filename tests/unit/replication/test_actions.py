"""What a mover does for a tier, one action at a time: none that fails holds up another."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.moving import base, capture, held, mover_of, record, running, shard
from tiercheck.errors import CapacityExceeded, NotFound, TierError, Transient
from tiercheck.format import container
from tiercheck.format.host_state import pack
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import CommitKey, Key, MarkerKey, ShardKey
from tiercheck.policy.commit import CommitRecord
from tiercheck.policy.placement import Placement
from tiercheck.replication.objects.records import marker_record, read_record
from tiercheck.runtime.backoff import Backoff
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can sit out."""
    monkeypatch.setattr("tiercheck.replication.backoff.RETRY", Backoff(0.005, 0.02))


class Picky(FaultyDriver):
    """Refuses calls on some keys; ``refused`` gives the error."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner, FaultPlan())
        self.refused: Callable[[str, str], Exception | None] = lambda call, key: None
        self.gets: list[str] = []
        self.deletions: list[list[str]] = []
        self.in_flight = self.most_in_flight = 0

    def check(self, call: str, key: str) -> None:
        if error := self.refused(call, key):
            raise error

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self.check("put", key)
        return await super().put(key, payload, mode=mode)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        self.gets.append(key)
        self.check("get", key)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            return await super().get(key, range=range, into=into)
        finally:
            self.in_flight -= 1

    async def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        self.deletions.append(wanted)
        for key in wanted:
            self.check("delete", key)
        await super().delete(wanted)


def picky(tmp_path: Path, *, middle: bool = False) -> tuple[OpenHierarchy, list[Picky]]:
    """A hierarchy of which every tier may refuse."""
    drivers: list[Picky] = []

    def wrap(driver: TierDriver) -> TierDriver:
        drivers.append(Picky(driver))
        return drivers[-1]

    urls = [f"memory://actions-{uuid.uuid4().hex}"]
    urls += [f"nvme://{tmp_path}/middle?survives=node"] if middle else []
    urls += [f"nvme://{tmp_path}/durable?survives=rack"]
    names = ["first", *(["middle"] if middle else []), "durable"]
    tiers = (Tier(url, name=name, wrap=wrap) for url, name in zip(urls, names, strict=True))
    return Hierarchy.of(*tiers).open(), drivers


def only(call: str, keys: Iterable[Key], error: TierError | Exception) -> Callable[[str, str], Exception | None]:
    names = {str(key) for key in keys}
    return lambda asked, key: error if asked == call and key in names else None


async def test_a_base_that_cannot_be_committed_holds_up_nothing_else(tmp_path: Path) -> None:
    hierarchy, _ = picky(tmp_path)
    async with hierarchy:
        await capture(hierarchy, base(0))
        durable = hierarchy.tiers[-1].driver
        await durable.put(str(base(0)), shard(base(0)))
        lie = MarkerKey(CommitKey(1, 0), 0, nbytes=1)
        await durable.put(str(lie), [marker_record(lie)])
        mover = mover_of(hierarchy)
        await mover.cycle()
        assert "its marker says" in mover.status.errors["durable"]
        await capture(hierarchy, record(1), record(2))
        await mover.cycle()
        assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)
        await capture(hierarchy, base(10), record(11), record(12))
        await mover.cycle()
        assert str(ShardKey.differential(1, 11, 12, 0)) in await held(hierarchy)
        assert mover.status.watermark == 10
        assert mover.status.errors == {}, "a base that a newer one supersedes need not be committed"


async def test_a_base_is_not_committed_once_a_newer_one_is(tmp_path: Path) -> None:
    """Its shards may be on their way out, on other ranks too."""
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        durable, mover = drivers[-1], mover_of(hierarchy)
        durable.refused = only("put", [CommitKey(1, 0)], Transient("no answer"))
        await capture(hierarchy, base(0))
        await mover.cycle()
        await capture(hierarchy, base(10))
        await mover.cycle()
        durable.refused = lambda call, key: None
        assert mover.status.watermark == 10
        await durable.put(str(base(0)), shard(base(0)))
        await mover._actions.mark(hierarchy.tiers[-1], base(0))
        await mover._actions.commit(hierarchy.tiers[-1], CommitKey(1, 0))
        assert str(CommitKey(1, 0)) not in await held(hierarchy)


@pytest.mark.parametrize("error", [CapacityExceeded("it does not fit"), Transient("no answer")], ids=repr)
async def test_a_base_that_does_not_get_to_the_neighbour_keeps_no_differential_from_it(
    tmp_path: Path, error: TierError
) -> None:
    hierarchy, drivers = picky(tmp_path, middle=True)
    async with hierarchy:
        drivers[1].refused = only("put", [base(0)], error)
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0))
        await mover.cycle()
        await capture(hierarchy, *(record(version) for version in (1, 2, 3, 4)))
        await mover.cycle()
        assert await held(hierarchy, 1) == [str(record(version)) for version in (1, 2, 3, 4)]
        assert f"copying base {base(0)}: {error}" in mover.status.errors["middle"]
        assert mover.status.watermark == 0


@pytest.mark.parametrize("error", [TierError("a directory"), Transient("no answer"), OSError("odd")], ids=repr)
async def test_an_object_that_cannot_be_deleted_holds_up_no_other(tmp_path: Path, error: Exception) -> None:
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        mover = mover_of(hierarchy)
        stuck = record(3)
        drivers[0].refused = only("delete", [stuck], error)
        for first in (0, 10, 20, 30):
            await capture(hierarchy, base(first), *(record(version) for version in range(first + 1, first + 10)))
            await mover.drain(10, closing=True) if first < 10 else await settle(mover.cycle)
        left = await held(hierarchy, 0)
        assert str(stuck) in left
        assert [key for key in left if key < str(base(20)) and key != str(stuck)] == []
        assert mover.status.watermark == 30
        assert str(error) in mover.status.errors["first"]
        assert str(stuck) in mover.status.errors["first"]
        drivers[0].refused = lambda call, key: None
        await mover.drain(10, closing=True)
        assert str(stuck) not in await held(hierarchy, 0)
        assert mover.status.errors == {}


async def settle(cycle: Callable[[], object]) -> None:
    """So many looks as it takes, with the pauses between them."""
    for _ in range(12):
        await cycle()  # type: ignore[misc]
        await asyncio.sleep(0.01)


async def test_a_base_whose_commit_record_cannot_be_deleted_stays_whole(tmp_path: Path) -> None:
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        mover = mover_of(hierarchy)
        drivers[1].refused = only("delete", [CommitKey(1, 0)], Transient("no answer"))
        await capture(hierarchy, *(base(version) for version in (0, 10, 20, 30)))
        await settle(mover.cycle)
        kept = [CommitKey(1, 0), base(0)]
        assert set(map(str, kept)) <= set(await held(hierarchy))
        assert str(base(10)) not in await held(hierarchy), "the next base goes all the same"
        drivers[1].refused = lambda call, key: None
        await mover.drain(10, closing=True)
        assert not set(map(str, kept)) & set(await held(hierarchy))


async def test_a_store_that_deletes_nothing_is_asked_few_times_a_look(tmp_path: Path) -> None:
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        drivers[0].refused = lambda call, key: Transient("no answer") if call == "delete" else None
        mover = mover_of(hierarchy)
        for first in (0, 10, 20):
            await capture(hierarchy, base(first), *(record(version) for version in range(first + 1, first + 10)))
        await mover.cycle()
        assert len(drivers[0].deletions) <= 3
        assert mover.status.watermark == 20


async def test_a_source_that_is_listed_and_not_there_is_not_asked_for_again_and_again(tmp_path: Path) -> None:
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        drivers[0].refused = only("get", [base(0)], NotFound("a directory"))
        await capture(hierarchy, base(0))
        mover = mover_of(hierarchy)
        assert not await mover.cycle()
        assert drivers[0].gets.count(str(base(0))) < 10
        assert "its source is listed, and is not there" in mover.status.errors["durable"]


async def test_a_source_that_was_deleted_meanwhile_is_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        await capture(hierarchy, base(0))
        driver = hierarchy.first.driver

        def deleted(call: str, key: str) -> Exception | None:
            if call == "get" and key == str(base(0)):
                assert isinstance(driver.inner, MemoryDriver)
                driver.inner.store.objects.pop(key)
                return NotFound("no such object")
            return None

        assert isinstance(driver, Picky)
        drivers[0].refused = deleted
        mover = mover_of(hierarchy)
        assert await mover.cycle()
        assert (mover.status.errors, caplog.records) == ({}, [])


async def test_sources_that_cannot_be_read_are_no_trouble_of_their_target(tmp_path: Path) -> None:
    hierarchy, drivers = picky(tmp_path)
    async with hierarchy:
        versions = range(1, 9)
        drivers[0].refused = only("get", map(record, versions), Transient("no answer"))
        await capture(hierarchy, base(0), *map(record, versions))
        mover = mover_of(hierarchy)
        await mover.cycle()
        assert "its source cannot be read: no answer" in mover.status.errors["durable"]
        await capture(hierarchy, base(10), record(11), record(12))
        await mover.cycle()
        assert mover.status.watermark == 10
        assert str(ShardKey.differential(1, 11, 12, 0)) in await held(hierarchy)


async def test_a_batch_whose_header_is_too_large_becomes_several_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy, _ = picky(tmp_path)
    async with hierarchy:
        mover = mover_of(hierarchy, placement=Placement(5))
        await capture(hierarchy, base(0), *(record(version) for version in range(1, 6)))
        pair = await merged_header_nbytes([record(1), record(2)])
        monkeypatch.setattr("tiercheck.format.header.HEADER_NBYTES_MAX", pair)
        await mover.drain(10, closing=True)
        batches = [key for key in await held(hierarchy) if "differential" in key]
        expected = [ShardKey.differential(1, first, last, 0) for first, last in ((1, 2), (3, 3), (4, 5))]
        assert batches == list(map(str, expected))
        assert mover.status.errors == {}
        before = mover.status.copied_objects
        await mover.drain(10, closing=True)
        assert mover.status.copied_objects == before, "the parts are the batch"


async def merged_header_nbytes(keys: list[ShardKey]) -> int:
    from tiercheck.streams.records.merge import as_stored, merge

    found = [as_stored(container.parse(b"".join(map(bytes, shard(key))))) for key in keys]
    header, *_ = merge(found, ShardKey.differential(1, keys[0].first, keys[-1].last, 0))
    return len(header)


async def test_an_action_that_fails_for_a_reason_nobody_foresaw_ends_no_mover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy, _ = picky(tmp_path)
    async with hierarchy:
        mover = mover_of(hierarchy)

        def fails(*_: object) -> None:
            raise ValueError("not foreseen")

        monkeypatch.setattr("tiercheck.replication.actions.merge", fails)
        await capture(hierarchy, base(0), record(1), record(2))
        await mover.cycle()
        assert mover.status.watermark == 0
        batch = ShardKey.differential(1, 1, 2, 0)
        assert f"copying {batch}: ValueError: not foreseen" in mover.status.errors["durable"]
        monkeypatch.undo()
        await mover.drain(10, closing=True)
        assert mover.status.errors == {}


class Slow(Picky):
    """A store outside the nodes that counts the round trips that checks take."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner)
        self.rounds = self.asked = 0
        self.prompt = 10**9
        """So many requests are answered; the others wait for the gate."""
        self.gate, self.waiting, self.brought = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, survives=Survives.RACK, mappable=False)

    async def in_turn(self) -> None:
        """What is asked at the same time costs one round trip together."""
        self.asked += 1
        before = self.rounds
        if self.asked > self.prompt:
            self.waiting.set()
            await self.gate.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        self.rounds = max(self.rounds, before + 1)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        info = await super().put(key, payload, mode=mode)
        if "/differential/" in key:
            self.brought.set()
        return info

    async def stat(self, key: str) -> ObjectInfo:
        await self.in_turn()
        return await super().stat(key)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        await self.in_turn()
        return await super().get(key, range=range, into=into)


async def marked_elsewhere(durable: TierDriver, world_size: int, objects: Mapping[str, object] | None = None) -> None:
    """All ranks but the first have brought base 0, and marked it."""
    for rank in range(1, world_size):
        content = b"".join(map(bytes, shard(base(0, rank), world_size=world_size, objects=objects)))
        await durable.put(str(base(0, rank)), [content])
        nbytes = container.header_length(content)
        marker = MarkerKey.of(base(0, rank), len(content), nbytes, container.checksum_of(content[:nbytes]), "")
        await durable.put(str(marker), [marker_record(marker)])


def slow() -> tuple[OpenHierarchy, list[Slow]]:
    drivers: list[Slow] = []

    def wrap(driver: TierDriver) -> TierDriver:
        drivers.append(Slow(driver))
        return drivers[-1]

    durable = Tier(f"memory://actions-{uuid.uuid4().hex}", name="durable", wrap=wrap)
    return Hierarchy.of(f"memory://actions-{uuid.uuid4().hex}", durable).open(), drivers


async def test_a_commit_of_many_ranks_takes_few_round_trips() -> None:
    hierarchy, drivers = slow()
    world_size = 600
    async with hierarchy:
        (driver,) = drivers
        await capture(hierarchy, base(0))
        await marked_elsewhere(driver, world_size)
        mover = mover_of(hierarchy, world_size=world_size)
        await mover.cycle()
        assert mover.status.watermark == 0
        assert driver.asked == 2 + 2 * world_size, "the marker of its own, and of each rank a size and a header"
        assert 8 <= driver.most_in_flight <= 128
        assert driver.rounds <= 2 + 2 * -(-world_size // 128)


@pytest.mark.parametrize("indexes", [("its own", "another"), ("its own", None)])
async def test_a_commit_record_says_how_many_ranks_there_are_and_how_they_are_laid_out(
    tmp_path: Path, indexes: tuple[str, str | None]
) -> None:
    async with Hierarchy.of(f"memory://actions-{uuid.uuid4().hex}", f"nvme://{tmp_path}?survives=rack").open() as tiers:
        own, other = ({"index": index} if index else None for index in indexes)
        await tiers.first.driver.put(str(base(0)), shard(base(0), objects=own))
        await marked_elsewhere(tiers.tiers[-1].driver, 2, other)
        await mover_of(tiers, world_size=2).cycle()
        record = await read_record(tiers.tiers[-1].driver, CommitKey(1, 0), CommitRecord)
    assert record.world_size == 2
    checksums = [container.checksum_of(pack(index)) for index in indexes if index]
    assert record.layout == (container.checksum_of("".join(checksums).encode()) if len(checksums) == 2 else "")


async def test_copies_do_not_wait_for_a_commit_under_way() -> None:
    hierarchy, drivers = slow()
    async with hierarchy:
        (driver,) = drivers
        await capture(hierarchy, base(0))
        await marked_elsewhere(driver, 3)
        mover = mover_of(hierarchy, world_size=3)
        driver.prompt = 2  # those of the marker of its own
        async with running(mover):
            await driver.waiting.wait()
            await capture(hierarchy, record(1), record(2))
            mover.nudge()
            await driver.brought.wait()
            assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)
            assert mover.status.watermark is None, "the commit is still under way"
            driver.gate.set()
        await mover.drain(10, closing=True)
        assert mover.status.watermark == 0
