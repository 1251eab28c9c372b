"""What the tiers hold: known without listing more than it takes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.moving import base, capture, mover_of, shard
from tiercheck import keys
from tiercheck.hierarchy import Hierarchy, OpenHierarchy, Tier
from tiercheck.keys import JOB, CommitKey, Key, LineageKey, MarkerKey, ShardKey, rank_prefix
from tiercheck.policy.guard import checked_deletions
from tiercheck.policy.policies import KeepEvery, KeepLast
from tiercheck.policy.recovery.lineage import Branch, Lineage
from tiercheck.policy.watermark import Retention
from tiercheck.replication import observer as observing
from tiercheck.replication.backoff import TierBackoff
from tiercheck.replication.observer import Observer
from tiercheck.runtime.backoff import Backoff
from tiercheck.testing.faults import FaultPlan, FaultyDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import Capabilities, ObjectInfo, Survives


def observer_of(hierarchy: OpenHierarchy) -> Observer:
    return Observer(hierarchy, TierBackoff(), rank=0, world_size=1, generation=1, lineage=Lineage(((1, None),)))


async def test_a_listing_that_was_under_way_does_not_undo_what_was_done_meanwhile(tmp_path: Path) -> None:
    """Else a base might be deleted of which the view does not know that it is committed."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(FaultyDriver):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            found = [info async for info in super().list(prefix)]
            begun.set()
            await go_on.wait()
            for info in found:
                yield info

    durable = Tier(f"nvme://{tmp_path}/durable?survives=rack", wrap=lambda driver: Slow(driver, FaultPlan()))
    async with Hierarchy.of(f"memory://mover-{uuid.uuid4().hex}", durable).open() as hierarchy:
        driver = hierarchy.tiers[1].driver
        await driver.put(str(base(0)), shard(base(0)))
        observer = observer_of(hierarchy)
        looking = asyncio.create_task(observer.look())
        await begun.wait()
        observer.put(1, CommitKey(1, 0), 10)
        observer.gone(1, [base(0)])
        go_on.set()
        assert list((await looking).contents[1].nbytes) == [CommitKey(1, 0)]
        assert list((await observer.look([1])).contents[1].nbytes) == [base(0)], "the next one tells the truth again"


class Shared(MemoryDriver):
    """Memory that takes itself for a store that all ranks share."""

    def __init__(self, crowd: Sequence[ObjectInfo] = (), survives: Survives = Survives.RACK) -> None:
        super().__init__()
        self.survives = survives
        self.crowd = crowd
        """Objects that are there beside those that were put."""
        self.listings = 0
        """Of what concerns the whole job: one in each look."""
        self.listed = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, survives=self.survives, mappable=False)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.listings += prefix == JOB
        for info in self.crowd:
            if info.key.startswith(prefix):
                self.listed += 1
                yield info
        async for info in super().list(prefix):
            yield info


def shared(crowd: Sequence[ObjectInfo] = ()) -> Hierarchy:
    durable = Tier("memory://", name="durable", wrap=lambda driver: Shared(crowd))
    return Hierarchy.of(f"memory://observer-{uuid.uuid4().hex}", durable)


def marker(shard: ShardKey) -> MarkerKey:
    return MarkerKey(CommitKey.of(shard), shard.rank)


def crowd(ranks: range, versions: range) -> list[ObjectInfo]:
    """What other ranks of the job have brought: differentials, bases, and their markers."""
    found: list[ObjectInfo] = []
    for rank in ranks:
        keys = [ShardKey.differential(1, version, version, rank) for version in versions]
        keys += [base(version, rank) for version in (0, 10, 20)]
        markers = [marker(base(version, rank)) for version in (0, 10, 20)]
        found += [ObjectInfo(str(key), 1, "1") for key in (*keys, *markers)]
    return found


async def test_among_40_000_objects_it_looks_at_its_own_and_at_the_markers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed = [0]
    parse = keys.parse

    def counted(text: str) -> Key | None:
        parsed[0] += 1
        return parse(text)

    monkeypatch.setattr(keys, "parse", counted)
    # Else, on a busy machine, the next listing would be due in the middle of a cycle.
    monkeypatch.setattr(observing, "RELIST", Backoff(60.0, 60.0))
    others = crowd(range(1, 201), range(1, 195))
    assert len(others) == 40_000
    async with shared(others).open() as hierarchy:
        durable = hierarchy.tiers[1].driver
        assert isinstance(durable, Shared)
        mover = mover_of(hierarchy)
        for versions in ((0, 10), (20,)):
            await capture(hierarchy, *map(base, versions))
            await mover.cycle()
        assert mover.status.watermark == 20
        expected = [
            base(10),
            base(20),
            CommitKey(1, 10),
            CommitKey(1, 20),
        ]
        assert set(durable.store.objects) == set(map(str, expected)), "base 0 is deleted, and nothing else"
        assert durable.listings == 2
        assert durable.listed == 2 * 3 * 200, "the coordinator lists all ranks' markers, and no shard of another rank"
        assert parsed[0] < 700, "and looks at each name once"


async def test_a_look_at_a_tier_where_nothing_changed_makes_nothing_anew() -> None:
    async with shared(crowd(range(1, 20), range(1, 20))).open() as hierarchy:
        durable = hierarchy.tiers[1].driver
        assert isinstance(durable, Shared)
        observer = observer_of(hierarchy)
        before = (await observer.look([1])).contents[1]
        assert (await observer.look([1])).contents[1] is before
        await durable.put(str(base(30)), shard(base(30)))
        after = (await observer.look([1])).contents[1]
        assert base(30) in after
        assert after.markers(7) == before.markers(7)
        await durable.delete([str(base(30))])
        durable.crowd = [each for each in durable.crowd if each.key != str(marker(base(10, 7)))]
        after = (await observer.look([1])).contents[1]
        assert base(30) not in after and len(after.markers(7)) == len(before.markers(7)) - 1
        assert before.differentials(7) == (), "what another rank has captured is not listed"


async def test_foreign_names_are_known_and_count_for_nothing() -> None:
    async with shared().open() as hierarchy:
        durable = hierarchy.tiers[1].driver
        await durable.put("notes.txt", [b"mine"])
        observer = observer_of(hierarchy)
        before = (await observer.look([1])).contents[1]
        assert list(before) == []
        assert (await observer.look([1])).contents[1] is before


async def test_a_damaged_copy_is_absent_until_another_is_put_in_its_place() -> None:
    async with shared().open() as hierarchy:
        durable = hierarchy.tiers[1].driver
        await durable.put(str(base(0)), shard(base(0)))
        observer = observer_of(hierarchy)
        assert base(0) in (await observer.look([1])).contents[1]
        observer.found_damaged(1, base(0))
        assert base(0) not in observer.seen().contents[1]
        assert base(0) not in (await observer.look([1])).contents[1]
        observer.put(1, base(0), 100)
        assert base(0) in observer.seen().contents[1] and observer.damaged == set()
        observer.found_damaged(1, base(0))
        await durable.delete([str(base(0))])
        await observer.look([1])
        assert observer.damaged == set(), "what is gone is remembered no more"


async def test_a_view_that_is_old_shows_from_the_begin_of_its_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real, ahead_s = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: real() + ahead_s[0])

    class Slow(Shared):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            ahead_s[0] += 100.0 * (prefix == JOB)
            async for info in super().list(prefix):
                yield info

    durable = Tier("memory://", name="durable", wrap=lambda driver: Slow())
    async with Hierarchy.of(f"memory://observer-{uuid.uuid4().hex}", durable).open() as hierarchy:
        observer = observer_of(hierarchy)
        await observer.look()
        assert observer.slow_views_s["durable"] == pytest.approx(100.0, abs=10.0)
        tier = hierarchy.tiers[1]
        await observer.refresh(tier)
        ahead_s[0] += 90.0
        await observer.refresh(tier)
        assert ahead_s[0] < 200.0, "listing takes half of the time at most"
        ahead_s[0] += 50.0
        await observer.refresh(tier)
        assert ahead_s[0] > 300.0


async def test_what_has_opened_is_asked_again_of_the_durable_tier_after_each_commit() -> None:
    async with shared().open() as hierarchy:
        first, durable = hierarchy.tiers
        observer = observer_of(hierarchy)
        await observer.look()
        await durable.driver.put(str(LineageKey(2)), [b"whatever"])
        await observer.fence(first)
        assert observer.seen().newest_generation == 0, "nothing in the first tier rests on anything there yet"
        observer.put(1, CommitKey(1, 0), 10)
        await observer.fence(first)
        assert observer.seen().newest_generation == 2


async def test_what_has_opened_is_asked_of_the_tier_itself() -> None:
    async with shared().open() as hierarchy:
        observer = observer_of(hierarchy)
        await observer.look()
        for tier, generation in zip(hierarchy.tiers, (2, 3), strict=True):
            await tier.driver.put(str(LineageKey(generation)), [b"whatever"])
            await observer.fence(tier)
            assert observer.seen().newest_generation == generation


class Overtaken(Shared):
    """Commits 10 and 20 come while it is listed: the listing has passed the place of the first one."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            yield info
        if prefix == JOB and self.listings == 2:
            for version in (10, 20):
                info = await self.put(str(CommitKey(1, version)), [b"whatever"])
            yield info


async def test_a_base_whose_commit_a_listing_has_overtaken_is_not_taken_for_uncommitted() -> None:
    durable = Tier("memory://", name="durable", wrap=lambda driver: Overtaken())
    async with Hierarchy.of(f"memory://observer-{uuid.uuid4().hex}", durable).open() as hierarchy:
        mover = mover_of(hierarchy, rank=1, world_size=2, retention=Retention(KeepLast(1) | KeepEvery(10)))
        for version in (10, 20):
            await capture(hierarchy, base(version, rank=1))
            await mover.cycle()
        driver = hierarchy.tiers[1].driver
        shards = {info.key async for info in driver.list(rank_prefix(1))}
        assert shards == {str(base(10, rank=1)), str(base(20, rank=1))}
        assert mover.status.watermark == 20


@pytest.mark.parametrize("lives_here", [True, False])
async def test_what_another_rank_refers_to_stays_and_what_it_left_goes_once_that_is_known(lives_here: bool) -> None:
    """Rank 0 looks before the other rank's opening base has come, which refers to older constants."""
    constants, resumed = ShardKey.constant(1, 0, 1), ShardKey.base(2, 47, 1, (1, 0))
    lineage = Lineage.of([Branch(1, 0, 0, 2, "a"), Branch(2, 1, 47, 2, "b")])
    name, retention = uuid.uuid4().hex, Retention()
    peer = Tier("memory://", name="peer", wrap=lambda driver: Shared(survives=Survives.NODE))
    durable = Tier("memory://", name="durable", wrap=lambda driver: Shared())
    async with Hierarchy.of(f"memory://observer-{name}", peer, durable).open() as hierarchy:
        first, middle, last = (tier.driver for tier in hierarchy.tiers)
        left = ShardKey.base(1, 40, 1, (1, 0))
        for driver in (first, middle):
            for key in (constants, left):
                await driver.put(str(key), [b"x"])
        observer = Observer(hierarchy, TierBackoff(), rank=0, world_size=2, generation=2, lineage=lineage)
        gone = retention.reclaimable(await observer.look())
        assert not any(gone.values())
        if lives_here:
            await first.put(str(resumed), [b"x"])
        for driver in (first, last):
            await driver.put(str(ShardKey.base(2, 47, 0)), [b"x"])
        await last.put(str(CommitKey(2, 47)), [b"x"])
        everything: dict[int, list[Key]] = {0: [constants], 1: [constants]}
        for look in range(4):
            seen = await observer.look([2])
            gone = retention.reclaimable(seen)
            allowed, _ = checked_deletions(seen, everything, "Evil()")
            assert constants not in (*gone[1], *allowed[1]), "its base may be on its way there"
            if lives_here or look == 0:
                assert constants not in (*gone[0], *allowed[0]), "by an old view nothing of it goes"
            for index, deleted in gone.items():
                await hierarchy.tiers[index].driver.delete([str(key) for key in deleted])
                observer.gone(index, deleted)
        kept = {info.key async for info in first.list()}
        assert str(left) not in kept
        assert (str(constants) in kept) is lives_here
