"""A long base is verified as it comes, in bounded memory, and what the optimizer keeps is not copied again."""

from __future__ import annotations

import gc
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.unit.recovery.reading.test_reader import BATCH, Place, Wide, is_batch, report
from tests.watched import flipped
from tiercheck.errors import Corruption, RecoveryError
from tiercheck.format import landing as format_landing
from tiercheck.format.checksums import BLOCK_NBYTES
from tiercheck.format.container import Shard, ShardMetadata, TensorEntry, parse, parse_header, payload
from tiercheck.keys import Stream
from tiercheck.recovery.reading import landing
from tiercheck.recovery.reading.landing import landed
from tiercheck.streams.tensors.placing import SMALL_NBYTES
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange

WINDOW = 16 << 10
METADATA = ShardMetadata(Stream.BASE, 7, 7, 7, 0, 1, {})
KEY = str(METADATA.key)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything counts as long."""
    monkeypatch.setattr(landing, "WINDOW_NBYTES", WINDOW)
    monkeypatch.setattr(landing, "LONG_NBYTES", 1)


@pytest.fixture
async def driver() -> AsyncIterator[TierDriver]:
    name = uuid.uuid4().hex
    async with MemoryDriver(name) as opened:
        yield opened
    MemoryDriver.forget(name)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How much of the memory for tensors is not given back."""
    made: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def fresh(nbytes: int) -> memoryview:
        array = np.zeros(nbytes, np.uint8)
        made.append(weakref.ref(array))
        return memoryview(array)

    def counted() -> int:
        gc.collect()
        return sum(each.nbytes for found in made if (each := found()) is not None)

    monkeypatch.setattr(format_landing, "fresh_memory", fresh)
    return counted


def content() -> bytearray:
    def tensor(name: str, nbytes: int) -> TensorEntry:
        return TensorEntry(name, "U8", (nbytes,), np.random.default_rng(nbytes).bytes(nbytes))

    tensors = [
        tensor("master/weight", BLOCK_NBYTES + 100),
        tensor("master/bias", 3),
        tensor("state/weight/exp_avg", 5 * WINDOW),
        tensor("state/bias/exp_avg", 0),
        tensor("extra/mean", 65),
    ]
    return bytearray(b"".join(payload(METADATA, tensors, {"host": {"lr": 0.5}})))


def parsed(beginning: memoryview, nbytes: int) -> Shard:
    return Shard(parse_header(beginning, nbytes, key=KEY, tier="memory"), beginning, key=KEY, tier="memory")


async def test_what_has_landed_is_what_is_there(driver: TierDriver) -> None:
    wanted = parse(content())
    await driver.put(KEY, [content()])
    found = await landed(driver, KEY, "memory", parsed)
    assert found is not None and found.is_given and not wanted.is_given
    assert [(e.spec, bytes(e.data)) for e in found.entries()] == [(e.spec, bytes(e.data)) for e in wanted.entries()]
    assert (found.digest, found.objects, found.nbytes) == (wanted.digest, wanted.objects, wanted.nbytes)


async def test_a_damaged_byte_is_found_wherever_it_is(driver: TierDriver) -> None:
    sound = content()
    header = parse(sound).header
    for extent in header.extents:
        start, stop = (header.nbytes + each for each in (extent.start, extent.stop))
        middles = {start + BLOCK_NBYTES - 1, start + BLOCK_NBYTES} if extent.spec.nbytes > BLOCK_NBYTES else set()
        for at in sorted({start, stop - 1, *middles}) if stop > start else ():
            damaged = bytearray(sound)
            damaged[at] ^= 1
            await driver.put(KEY, [damaged])
            with pytest.raises(Corruption, match=extent.spec.name.rpartition(":")[2]):
                await landed(driver, KEY, "memory", parsed)
    damaged = bytearray(sound)
    damaged[100] ^= 1
    await driver.put(KEY, [damaged])
    with pytest.raises(Corruption, match="header"):
        await landed(driver, KEY, "memory", parsed)


@pytest.mark.parametrize("nbytes", [7, WINDOW, 3 * WINDOW])
async def test_a_copy_that_was_cut_is_none(driver: TierDriver, nbytes: int) -> None:
    await driver.put(KEY, [content()[:nbytes]])
    with pytest.raises(Corruption):
        await landed(driver, KEY, "memory", parsed)


async def test_what_is_short_is_left_to_a_single_read(driver: TierDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "LONG_NBYTES", len(content()) + 1)
    await driver.put(KEY, [content()])
    assert await landed(driver, KEY, "memory", parsed) is None
    monkeypatch.setattr(landing, "LONG_NBYTES", 1)
    monkeypatch.setattr(landing, "WINDOW_NBYTES", 64)  # less than the header
    assert await landed(driver, KEY, "memory", parsed) is None


async def test_no_more_windows_are_read_ahead_than_there_are(driver: TierDriver) -> None:
    await driver.put(KEY, [content()])
    under_way: set[int] = set()
    most = 0
    get = driver.get

    async def counted(key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        nonlocal most
        assert range is not None and into is not None and into.nbytes == WINDOW
        under_way.add(range.start)
        most = max(most, len(under_way))
        found = await get(key, range=range, into=into)
        under_way.discard(range.start)
        return found

    driver.get = counted  # type: ignore[method-assign]
    assert await landed(driver, KEY, "memory", parsed) is not None
    assert 1 < most <= landing.WINDOWS


async def test_the_memory_of_the_trained_tensors_goes_with_them(driver: TierDriver, alive: Callable[[], int]) -> None:
    await driver.put(KEY, [content()])
    found = await landed(driver, KEY, "memory", parsed)
    assert found is not None
    state = found.entry("state/weight/exp_avg").data
    assert BLOCK_NBYTES < alive() < len(content()) + 4096
    del found
    assert len(state) <= alive() < BLOCK_NBYTES


class TestRecovery:
    @pytest.fixture
    def place(self, tmp_path: Any) -> Iterator[Place]:
        yield Place(tmp_path)

    def test_the_optimizer_keeps_the_memory_that_its_state_was_read_into(
        self, place: Place, alive: Callable[[], int]
    ) -> None:
        states = place.trained(BATCH, Wide, base_every=BATCH)
        checkpointer, training = place.recovered(kind=Wide)
        assert training.parameters() == states[BATCH]
        assert report(checkpointer).replayed == 0
        moments = sum(
            each.nbytes
            for state in training.optimizer.state.values()
            for each in state.values()
            if each.nbytes >= SMALL_NBYTES
        )
        del checkpointer
        assert moments <= alive() < 1.5 * moments, "a third more would be the trained tensors"

    def test_after_a_copy_went_bad_between_its_two_reads_the_base_is_read_again(self, place: Place) -> None:
        """What was loaded has been trained on since."""

        def tamper(key: str, nth: int, content: bytearray) -> bytearray:
            return flipped(content) if is_batch(key, 4 * BATCH) and nth == 2 else content

        states = place.trained(4 * BATCH)
        checkpointer, training = place.recovered(tamper)
        assert report(checkpointer).version == 3 * BATCH
        assert training.parameters() == states[3 * BATCH]

    def test_if_the_base_goes_bad_meanwhile_the_ranks_are_told_that_the_state_is_none(self, place: Place) -> None:
        gone = False

        def tamper(key: str, nth: int, content: bytearray) -> bytearray:
            nonlocal gone
            if is_batch(key, 4 * BATCH) and nth == 2:
                gone = True
                return flipped(content)
            return bytearray(len(content)) if gone and "/base/" in key else content

        place.trained(4 * BATCH)
        with pytest.raises(RecoveryError, match="the state is of no version now"):
            place.recovered(tamper)
