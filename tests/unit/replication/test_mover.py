"""The mover by itself: level-triggered, honest about trouble, and harmless once it is superseded."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from tests.moving import Watched, base, capture, held, mover_of, record, running, shard, tiers, until
from tiercheck.errors import CapacityExceeded, Corruption, DeadlineExceeded, JobConflict, SaveError, Transient
from tiercheck.format import container
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import CommitKey, LineageKey, MarkerKey, ShardKey, parse
from tiercheck.policy.placement import Placement
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.replication import backoff
from tiercheck.replication.objects.records import marker_record
from tiercheck.runtime.backoff import Backoff
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ObjectInfo, Payload, PutMode


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can sit out."""
    monkeypatch.setattr("tiercheck.replication.backoff.RETRY", Backoff(0.005, 0.02))


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[OpenHierarchy]:
    async with tiers(tmp_path) as hierarchy:
        yield hierarchy


async def test_one_look_is_enough_without_any_notification(plain: OpenHierarchy) -> None:
    await capture(plain, base(0), record(1), record(2), record(3))
    mover = mover_of(plain)
    assert await mover.cycle()
    merged = ShardKey.differential(1, 1, 2, 0)
    assert await held(plain) == [str(CommitKey(1, 0)), str(base(0)), str(merged)], "what is committed needs no marker"
    assert (mover.status.watermark, mover.status.undrained_bases, mover.status.idle) == (0, 0, True)
    content = await plain.tiers[-1].driver.get(str(merged))
    parsed = container.parse(content, key=str(merged))
    parsed.verify()
    assert parsed.names == ("1/x", "2/x")


async def test_a_second_look_does_nothing(plain: OpenHierarchy) -> None:
    await capture(plain, base(0), record(1), record(2))
    mover = mover_of(plain)
    await mover.cycle()
    before = mover.status
    await mover.cycle()
    assert mover.status == before


async def test_trouble_is_shown_and_passes(tmp_path: Path) -> None:
    plan = FaultPlan.fail_call("put", lambda: Transient("the store is away"), times=3)
    async with tiers(tmp_path, durable=plan) as hierarchy:
        await capture(hierarchy, base(0))
        mover = mover_of(hierarchy)
        assert not await mover.cycle()
        assert "the store is away" in mover.status.errors["nvme"]
        assert not mover.status.idle
        await mover.drain(10, closing=True)
        assert mover.status.errors == {}
        assert mover.status.watermark == 0


async def test_a_store_that_comes_back_before_the_deadline_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has been away for long, so that it is asked now and then."""
    plan = FaultPlan.fail_call("put", lambda: Transient("the store is away"), times=1)
    async with tiers(tmp_path, durable=plan) as hierarchy:
        await capture(hierarchy, base(0))
        mover = mover_of(hierarchy)
        with monkeypatch.context() as patched:
            patched.setattr(backoff, "RETRY", Backoff(60.0, 60.0))  # not tried again in this cycle, however slow it is
            assert not await mover.cycle()
        await mover.drain(8, closing=True)
        assert mover.status.watermark == 0


async def test_a_wait_that_ends_names_the_tier_and_its_error(tmp_path: Path) -> None:
    async with tiers(tmp_path, durable=FaultPlan.full()) as hierarchy:
        await capture(hierarchy, base(0), base(10))
        mover = mover_of(hierarchy)
        await mover.cycle()
        with pytest.raises(DeadlineExceeded, match=r"2 bases have not reached .* within 0.1 s \(nvme: .*full"):
            await mover.room_for_base(0.1)
        with pytest.raises(DeadlineExceeded, match=r"not everything captured .*\(nvme: .*full"):
            await mover.drain(0.1, closing=True)


async def test_a_tier_in_trouble_does_not_stop_the_others(tmp_path: Path) -> None:
    failing = FaultPlan.fail_call("put", lambda: CapacityExceeded("no room"), times=10**9)
    async with tiers(tmp_path, middle=failing) as hierarchy:
        await capture(hierarchy, base(0))
        mover = mover_of(hierarchy)
        await mover.cycle()
        assert str(CommitKey(1, 0)) in await held(hierarchy)
        assert mover.status.watermark == 0
        assert "no room" in mover.status.errors["nvme"]


async def test_a_tier_that_cannot_be_listed_gets_no_work_and_loses_nothing(tmp_path: Path) -> None:
    plan = FaultPlan.fail_call("list", lambda: Transient("cannot list"), nth=2, times=1)
    async with tiers(tmp_path, durable=plan) as hierarchy:
        await capture(hierarchy, base(0), base(10), base(20))
        mover = mover_of(hierarchy)
        await mover.cycle()
        await mover.drain(10, closing=True)
        assert str(base(20)) in await held(hierarchy)


async def capture_damaged(hierarchy: OpenHierarchy, key: ShardKey) -> bytes:
    content = bytearray(b"".join(shard(key)))
    content[-1] ^= 1
    await hierarchy.first.driver.put(str(key), [content])
    return bytes(content)


async def test_a_damaged_source_is_not_copied_on(plain: OpenHierarchy) -> None:
    await capture(plain, base(0), record(1), record(2), record(3), record(4))
    content = await capture_damaged(plain, record(2))
    mover = mover_of(plain)
    await mover.cycle()
    assert str(ShardKey.differential(1, 1, 1, 0)) in await held(plain), "what is sound still goes"
    assert str(ShardKey.differential(1, 3, 4, 0)) in await held(plain)
    assert not any("000000000002" in key for key in await held(plain))
    assert bytes(await plain.first.driver.get(str(record(2)))) == content, "it is left for a recovery to report"


async def test_a_damaged_copy_goes_when_a_sound_one_would(plain: OpenHierarchy) -> None:
    await capture(plain, base(0), record(1))
    await capture_damaged(plain, record(2))
    mover = mover_of(plain)
    for version in (3, 6):
        await capture(plain, base(version))
        assert str(record(2)) in await held(plain, 0), "one base after it would not let a sound one go"
        await mover.cycle()
    assert await held(plain, 0) == [str(base(6))]


@pytest.mark.parametrize("failures", [0, 1], ids=["the older one has gone", "the older one is there still"])
async def test_a_damaged_base_takes_the_room_of_no_sound_one(tmp_path: Path, failures: int) -> None:
    """Admission has counted two bases that stay, and the one that is captured."""
    nbytes = 3 * sum(map(len, shard(base(0))))
    plan = FaultPlan.fail_call("delete", lambda: Transient("not now"), times=failures)
    first = Tier(f"memory://mover-{uuid.uuid4().hex}?size={nbytes}", wrap=lambda driver: FaultyDriver(driver, plan))
    async with Hierarchy.of(first, f"nvme://{tmp_path}/durable?survives=rack").open() as hierarchy:
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0), base(10))
        await mover.cycle()
        await capture_damaged(hierarchy, base(20))
        with pytest.raises(Corruption, match="versions from 20 on"):
            await mover.drain(10, closing=True)
        assert await held(hierarchy, 0) == [str(base(10)), str(base(20))]
        assert mover.status.has_room
        assert mover.status.base_needed_after == 20, "it is known as long as it matters"
        for version in (30, 40):
            await capture(hierarchy, base(version))
            await mover.drain(10, closing=True)
            assert (mover.status.watermark, mover.status.base_needed_after) == (version, None)
        assert mover._observer.damaged == set()


async def test_the_last_base_stays_though_it_is_damaged(plain: OpenHierarchy) -> None:
    """It tells the next start that this is no new job."""
    await capture_damaged(plain, base(5))
    mover = mover_of(plain)
    await mover.cycle()
    assert await held(plain, 0) == [str(base(5))]
    await capture(plain, base(6))
    await mover.drain(10, closing=True)


async def test_a_damaged_copy_of_which_another_tier_has_a_sound_one_is_no_loss(tmp_path: Path) -> None:
    """Also where no tier is shared, so that nothing is ever committed."""
    urls = [f"memory://mover-{uuid.uuid4().hex}", f"nvme://{tmp_path}/node", f"nvme://{tmp_path}/other"]
    async with Hierarchy.of(*urls).open() as hierarchy:
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0))
        await capture_damaged(hierarchy, record(1))
        await hierarchy.tiers[1].driver.put(str(record(1)), shard(record(1)))
        await mover.drain(10, closing=True)
        assert str(record(1)) in await held(hierarchy)


async def test_a_flush_says_what_was_damaged_before_it_was_copied(plain: OpenHierarchy) -> None:
    await capture(plain, base(0), record(1))
    await capture_damaged(plain, record(2))
    mover = mover_of(plain)
    with pytest.raises(Corruption, match=r"1 captured objects were damaged .* versions from 2 on"):
        await mover.drain(10, closing=True)
    await capture(plain, base(3))
    await mover.drain(10, closing=True)


async def test_a_marker_that_lies_is_not_committed(plain: OpenHierarchy) -> None:
    await capture(plain, base(0))
    driver = plain.tiers[-1].driver
    await driver.put(str(base(0)), shard(base(0)))
    lie = MarkerKey(CommitKey(1, 0), 0, nbytes=1)
    await driver.put(str(lie), [marker_record(lie)])
    mover = mover_of(plain)
    await mover.cycle()
    assert str(CommitKey(1, 0)) not in await held(plain)
    assert "its marker says" in mover.status.errors["nvme"]


async def test_the_coordinator_waits_for_every_rank(plain: OpenHierarchy) -> None:
    driver = plain.tiers[-1].driver
    await capture(plain, base(0))
    first, second = mover_of(plain, world_size=2), mover_of(plain, rank=1, world_size=2)
    await first.cycle()
    assert str(CommitKey(1, 0)) not in await held(plain)
    await driver.put(str(base(0, rank=1)), shard(base(0, rank=1)))
    await second.cycle()
    await first.cycle()
    assert str(CommitKey(1, 0)) in await held(plain)


async def test_a_superseded_mover_touches_nothing(plain: OpenHierarchy) -> None:
    await capture(plain, *(base(version) for version in (0, 10, 20)))
    mover = mover_of(plain)
    await plain.tiers[-1].driver.put(str(LineageKey(2)), [b"whatever"])
    with pytest.raises(JobConflict, match="generation 2 of this job has opened"):
        await mover.cycle()
    assert await held(plain) == []
    assert len(await held(plain, 0)) == 3


async def test_keys_of_others_are_left_alone(plain: OpenHierarchy) -> None:
    await plain.first.driver.put("notes.txt", [b"mine"])
    await plain.first.driver.put("g000001/base/elsewhere", [b"mine"])
    await capture(plain, *(base(version) for version in (0, 10, 20)))
    await mover_of(plain).cycle()
    assert bytes(await plain.first.driver.get("notes.txt")) == b"mine"
    assert bytes(await plain.first.driver.get("g000001/base/elsewhere")) == b"mine"


async def test_a_store_is_not_listed_for_each_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.replication.observer.RELIST", Backoff(1000.0, 1000.0))
    opened: list[Watched] = []

    def watch(driver: TierDriver) -> TierDriver:
        opened.append(Watched(driver))
        return opened[-1]

    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=watch)
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", durable).open() as hierarchy:
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0))
        async with running(mover):

            async def committed() -> bool:
                return mover.status.watermark == 0

            await until(committed)
            before = opened[0].listings
            for version in range(1, 41):
                await capture(hierarchy, record(version))
                mover.nudge()

            async def copied() -> bool:
                return mover.status.copied_objects >= 21

            await until(copied)
            assert opened[0].listings == before
    assert before <= 3


async def test_a_slow_tier_holds_up_none_of_the_others(tmp_path: Path) -> None:
    slow: list[Watched] = []

    def watch(driver: TierDriver) -> TierDriver:
        slow.append(Watched(driver))
        slow[-1].gate.clear()
        return slow[-1]

    middle, durable = f"nvme://{tmp_path}/middle?survives=node", f"nvme://{tmp_path}/durable?survives=rack"
    async with Hierarchy.of(
        f"memory://mover-{uuid.uuid4().hex}", middle, Tier(durable, wrap=watch)
    ).open() as hierarchy:
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0), record(1))
        async with running(mover):

            async def next_door() -> bool:
                return await held(hierarchy, 1) == [str(base(0)), str(record(1)), str(record(2))]

            await capture(hierarchy, record(2))
            mover.nudge()
            await until(next_door)
            assert await held(hierarchy) == []
            slow[0].gate.set()
            await mover.drain(10, closing=True)
            assert str(ShardKey.differential(1, 1, 2, 0)) in await held(hierarchy)


async def test_a_generation_that_opens_between_two_commits_stops_the_second(tmp_path: Path) -> None:
    class Superseding(FaultyDriver):
        async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
            info = await super().put(key, payload, mode=mode)
            if isinstance(parse(key), CommitKey):
                await super().put(str(LineageKey(2)), [b"whatever"])
            return info

    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=lambda driver: Superseding(driver, FaultPlan()))
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", durable).open() as hierarchy:
        for version in (0, 10):
            await hierarchy.tiers[-1].driver.put(str(base(version)), shard(base(version)))
        with pytest.raises(JobConflict):
            await mover_of(hierarchy).cycle()
        commits = [key for key in await held(hierarchy) if isinstance(parse(key), CommitKey)]
        assert commits == [str(CommitKey(1, 0))]


async def test_a_full_tier_is_made_room_in_before_anything_is_copied_to_it(tmp_path: Path) -> None:
    calls: list[str] = []

    class Noting(FaultyDriver):
        async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
            calls.append(f"put {key}")
            return await super().put(key, payload, mode=mode)

        async def delete(self, keys: Iterable[str]) -> None:
            calls.append("delete")
            await super().delete(keys)

    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=lambda driver: Noting(driver, FaultPlan()))
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", durable).open() as hierarchy:
        mover = mover_of(hierarchy)
        for version in (0, 10, 20):
            await capture(hierarchy, base(version))
            await mover.cycle()
        await capture(hierarchy, base(30))
        calls.clear()
        await hierarchy.tiers[-1].driver.put(str(base(5)), shard(base(5)))  # of no use to anybody
        calls.clear()
        await mover.cycle()
        assert calls.index("delete") < calls.index(f"put {base(30)}")


async def test_what_is_known_of_no_tier_yet_is_no_ground_for_deleting(tmp_path: Path) -> None:
    """What the durable tier needs is not known while it could not be listed once."""
    plan = FaultPlan.fail_call("list", lambda: Transient("cannot list"), times=10**9)
    async with tiers(tmp_path, durable=plan) as hierarchy:
        await capture(hierarchy, *(base(version) for version in (0, 10, 20)), record(21))
        mover = mover_of(hierarchy)
        assert not await mover.cycle()
        assert len(await held(hierarchy, 0)) == 4
        assert not mover.status.idle
        with pytest.raises(DeadlineExceeded, match=r"nvme: what it holds is not known; its trouble: .*cannot list"):
            await mover.drain(0.1, closing=True)


class Hanging(Watched):
    """Its listings hang while ``listing`` is closed."""

    def __init__(self, inner: TierDriver) -> None:
        super().__init__(inner)
        self.listing = asyncio.Event()

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self.listing.wait()
        async for info in super().list(prefix):
            yield info


@pytest.mark.parametrize("known", [False, True], ids=["never listed", "listed before"])
async def test_a_listing_that_hangs_holds_up_no_copy_elsewhere(tmp_path: Path, known: bool) -> None:
    hanging: list[Hanging] = []

    def hang(driver: TierDriver) -> TierDriver:
        hanging.append(Hanging(driver))
        return hanging[-1]

    middle, durable = f"nvme://{tmp_path}/middle?survives=node", f"nvme://{tmp_path}/durable?survives=rack"
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", middle, Tier(durable, wrap=hang)).open() as hierarchy:
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0))
        if known:
            hanging[0].listing.set()
            await mover.cycle()
            hanging[0].listing.clear()
        async with running(mover):
            await capture(hierarchy, record(1), record(2))
            mover.nudge()

            async def next_door() -> bool:
                return await held(hierarchy, 1) == [str(base(0)), str(record(1)), str(record(2))]

            await until(next_door)
            if known:  # what is known of it is enough for a copy

                async def outside() -> bool:
                    return str(ShardKey.differential(1, 1, 2, 0)) in mover_keys(hierarchy)

                await until(outside)
            await mover.room_for_base(5)
            with pytest.raises(DeadlineExceeded):
                await mover.drain(0.1, closing=True)
            hanging[0].listing.set()
            await mover.drain(10, closing=True)
            assert mover.status.watermark == 0


async def test_room_is_made_by_what_is_known_while_a_listing_hangs(tmp_path: Path) -> None:
    hanging: list[Hanging] = []

    def hang(driver: TierDriver) -> TierDriver:
        hanging.append(Hanging(driver))
        return hanging[-1]

    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=hang)
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", durable).open() as hierarchy:
        mover = mover_of(hierarchy)
        hanging[0].listing.set()
        await capture(hierarchy, base(0))
        await mover.cycle()
        await capture(hierarchy, base(10), base(20))
        hanging[0].listing.clear()
        async with asyncio.timeout(10):
            await mover.make_room()
        assert await held(hierarchy, 0) == [str(base(10)), str(base(20))]


def mover_keys(hierarchy: OpenHierarchy) -> list[str]:
    """What the durable tier holds, without a listing."""
    root = Path(hierarchy.tiers[-1].driver.url.removeprefix("nvme://").partition("?")[0])
    return [str(path.relative_to(root)) for path in root.rglob("*.safetensors")]


async def test_an_older_view_decides_as_long_as_no_newer_generation_has_opened(tmp_path: Path) -> None:
    """However long ago it was listed. What has opened is read right before anything is committed or deleted."""
    async with tiers(tmp_path) as hierarchy:
        durable = hierarchy.tiers[-1].driver
        mover = mover_of(hierarchy)
        await capture(hierarchy, base(0))
        await mover.cycle()
        await capture(hierarchy, base(10), base(20), record(21), record(22))
        hour_s = 3600.0
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + hour_s  # type: ignore[method-assign]  # every view is an hour old
        try:
            assert await mover.cycle()
            assert mover.status.watermark == 20
            await capture(hierarchy, base(30), base(40))
            loop.time = lambda: real() + 2 * hour_s  # type: ignore[method-assign]
            await durable.put(str(LineageKey(2)), [b"whatever"])
            with pytest.raises(JobConflict):
                await mover.cycle()
        finally:
            loop.time = real  # type: ignore[method-assign]


async def test_an_error_of_the_loop_itself_ends_the_mover_and_shows(
    plain: OpenHierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = mover_of(plain)
    monkeypatch.setattr("tiercheck.replication.mover.to_commit", lambda seen, tier: [][0])
    with pytest.raises(SaveError, match="has ended the mover: IndexError"):
        await mover.run()
    assert "IndexError" in mover.status.errors["mover"]


async def test_what_another_job_wrote_under_this_generations_number_is_neither_copied_nor_committed(
    plain: OpenHierarchy,
) -> None:
    own = Branch(1, 0, 0, 1, "a" * 16)
    await capture(plain, base(0))  # without a token: whoever wrote it was not this job
    mover = mover_of(plain, lineage=Lineage.of([own]))
    await mover.cycle()
    assert not await held(plain)
    ours = [base(version) for version in (1, 2)]
    for each in ours:
        await plain.first.driver.put(str(each), shard(each, token="a" * 16))
    await mover.cycle()
    assert await held(plain, 0) == [str(key) for key in (base(0), ours[-1])], "nor is it deleted"
    durable = plain.tiers[-1].driver
    await durable.put(str(base(4)), shard(base(4)))
    await mover.cycle()
    assert str(CommitKey(1, 4)) not in await held(plain)
    assert "another job" in mover.status.errors["nvme"]


async def test_a_look_that_finds_nothing_new_decides_nothing(
    plain: OpenHierarchy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many ranks on a node, what it costs to look in vain is what an idle agent costs."""
    asked: list[str] = []

    def counted(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def count(*arguments: object, **options: object) -> object:
            asked.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(kind, name, count)

    counted(Retention, "reclaimable")
    counted(Retention, "refusals")
    counted(Placement, "transfers")
    mover = mover_of(plain)
    await capture(plain, base(0), record(1), record(2))
    assert await mover.cycle()
    assert set(asked) == {"reclaimable", "refusals", "transfers"}
    asked.clear()
    for _ in range(3):
        assert await mover.cycle()
    assert asked == []
    await capture(plain, record(3), record(4))
    await mover.cycle()
    assert str(ShardKey.differential(1, 3, 4, 0)) in await held(plain)
