"""A base that lies unusable in the first tier keeps the mover from no other fold, and from no rest."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from tests.moving import FIRST, base, record, running
from tests.simulation import virtual_time
from tiercheck.errors import AlreadyExists
from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold
from tiercheck.policy.placement import Placement
from tiercheck.policy.watermark import Retention
from tiercheck.replication.fold_executor import Damaged, Gone, Made, Outcome, Ready, Refused, Superfluous, Wanted
from tiercheck.replication.mover import Mover
from tiercheck.types import PutMode

WITH_CONSTANTS = ShardKey.base(1, 5, 0, refers_to=(1, 3))


def stored(key: ShardKey) -> list[bytes | bytearray | memoryview]:
    return list(container.payload(ShardMetadata.of(key, 1, ""), [TensorEntry(f"{key.first}/x", "U8", (1,), b"x")]))


@dataclass
class Folding:
    """Makes bases that hold nothing, of sound ones."""

    tiers: OpenHierarchy
    damaged: set[ShardKey] = field(default_factory=set)
    gone: set[ShardKey] = field(default_factory=set)
    captured_meanwhile: set[int] = field(default_factory=set)
    """Versions whose base is captured a little before the folded one is published."""
    fails: Exception | None = None
    """What preparing raises."""
    prepared_slowly: Callable[[], Awaitable[Outcome]] | None = None
    """What preparing waits for, and finds."""
    prepared_with: list[ShardKey] = field(default_factory=list)
    asked: list[Fold] = field(default_factory=list)
    where = "a test"

    async def prepare(self, base: ShardKey) -> Outcome:
        self.prepared_with.append(base)
        if self.fails is not None:
            raise self.fails
        return Ready() if self.prepared_slowly is None else await self.prepared_slowly()

    async def fold(self, fold: Fold, wanted: Wanted) -> Outcome:
        self.asked.append(fold)
        await asyncio.sleep(0.1)
        for key in (fold.base, *fold.differentials):
            if key in self.damaged:
                return Damaged(str(key), f"{key} is damaged")
            if key in self.gone:
                return Gone(str(key))
        made = base(fold.version)
        if not await wanted():
            return Superfluous()
        if fold.version in self.captured_meanwhile:
            await asyncio.sleep(0.1)
            await put(self.tiers, made)
        try:
            await self.tiers.first.driver.put(str(made), stored(made), mode=PutMode.CREATE)
        except AlreadyExists:
            return Superfluous()
        return Made(str(made), 1, audited=False)


def lived(
    story: Callable[[OpenHierarchy, Mover, Folding], Awaitable[None]], fold_every: int = 5, interval: int = 10
) -> None:
    async def live() -> None:
        async with Hierarchy.of(f"memory://{uuid.uuid4().hex}").open() as tiers:
            placement = Placement(5, interval=interval, fold_every=fold_every)
            folding = Folding(tiers)
            mover = Mover(
                tiers,
                rank=0,
                world_size=1,
                generation=1,
                placement=placement,
                retention=Retention(placement=placement),
                lineage=FIRST,
                folds=folding,
            )
            await put(tiers, base(0))
            async with running(mover):
                await asyncio.sleep(20)
                await story(tiers, mover, folding)

    virtual_time.run(live())


async def put(tiers: OpenHierarchy, *keys: ShardKey) -> None:
    for key in keys:
        await tiers.first.driver.put(str(key), stored(key))


async def train(tiers: OpenHierarchy, mover: Mover, first: int, last: int) -> None:
    for version in range(first, last + 1):
        await put(tiers, record(version))
        mover.nudge()
        await asyncio.sleep(1)


@pytest.mark.parametrize("version", [5, 10], ids=["in between", "due"])
def test_what_lies_damaged_where_a_base_belongs_is_skipped_and_said_once(
    version: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(tiers: OpenHierarchy, mover: Mover, folding: Folding) -> None:
        await put(tiers, base(version))
        mover._observer.found_damaged(0, base(version))  # as a copy that has read it does
        await train(tiers, mover, 1, version + 4)
        await mover.room_for_base(10, [version] if version % 10 == 0 else [])
        await asyncio.sleep(100)
        folded = [fold.version for fold in folding.asked]
        assert folded == ([] if version == 5 else [5])
        assert (mover.status.unfolded_bases, mover.status.not_folded) == (0, "")
        await train(tiers, mover, version + 5, 20)
        await mover.room_for_base(10, [20])
        await asyncio.sleep(100)
        assert folding.asked[-1].version == 20
        assert version not in [fold.version for fold in folding.asked]
        assert len(folding.asked) <= 4
        assert (mover.status.skipped_folds, mover.status.errors) == (1, {})

    with caplog.at_level(logging.WARNING):
        lived(story)
    told = [each.getMessage() for each in caplog.records if "is not folded" in each.getMessage()]
    assert len(told) == 1
    assert str(base(version)) in told[0]


def test_from_a_base_whose_constants_are_not_there_nothing_is_folded_until_another_is_captured() -> None:
    async def story(tiers: OpenHierarchy, mover: Mover, folding: Folding) -> None:
        await put(tiers, WITH_CONSTANTS)
        await train(tiers, mover, 1, 8)
        await asyncio.sleep(100)
        assert len(folding.asked) <= 1
        assert "lacks its constants" in mover.status.not_folded
        await put(tiers, base(9))
        await train(tiers, mover, 9, 10)
        await mover.room_for_base(10, [10])
        await asyncio.sleep(100)
        assert [(fold.base, fold.version) for fold in folding.asked[-1:]] == [(base(9), 10)]

    lived(story)


def test_what_is_listed_and_not_there_is_no_reason_to_fold_without_a_pause() -> None:
    async def story(tiers: OpenHierarchy, mover: Mover, folding: Folding) -> None:
        folding.gone.add(record(3))
        await train(tiers, mover, 1, 6)
        await asyncio.sleep(100)
        assert len(folding.asked) < 15
        assert "is listed, and is not there" in mover.status.errors["memory"]

    lived(story)


def test_a_base_that_is_captured_while_it_is_folded_is_not_taken_for_a_damaged_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(tiers: OpenHierarchy, mover: Mover, folding: Folding) -> None:
        folding.captured_meanwhile.add(5)
        await train(tiers, mover, 1, 9)
        await asyncio.sleep(100)
        assert 5 in [fold.version for fold in folding.asked]
        assert mover.status.skipped_folds == 0

    with caplog.at_level(logging.WARNING):
        lived(story)
    assert not [each for each in caplog.records if "is not folded" in each.getMessage()]


def test_what_cannot_be_prepared_for_lack_of_a_thread_does_not_end_the_mover(caplog: pytest.LogCaptureFixture) -> None:
    async def story(tiers: OpenHierarchy, mover: Mover, folding: Folding) -> None:
        folding.fails = RuntimeError("can't start new thread")
        await train(tiers, mover, 1, 9)
        await asyncio.sleep(100)
        assert mover.status.folded_bases == 1

    lived(story)
    assert [each.levelname for each in caplog.records if "not prepared ahead" in each.getMessage()] == ["ERROR"]


def test_a_base_that_goes_while_folding_is_prepared_leaves_nobody_without_an_answer() -> None:
    """A newer one was captured meanwhile. That is asked for, so that the job hears why nothing is folded."""

    async def story(tiers: OpenHierarchy, mover: Mover, folding: Folding) -> None:
        async def superseded() -> Outcome:
            if len(folding.prepared_with) > 1:
                return Refused("no kernel", until_captured=False)
            await put(tiers, base(4))
            await tiers.first.driver.delete([str(base(0))])
            return Gone(str(base(0)))

        folding.prepared_slowly = superseded
        await train(tiers, mover, 1, 3)
        await asyncio.sleep(20)
        assert folding.prepared_with == [base(0), base(4)]
        assert mover.status.not_folded == "no kernel"

    lived(story)
