"""The soak finds each kind of loss, and finds none where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.account import settle_accounts
from benchmarks.soak.content import HEADER_BYTES, Damaged, Stamp, part_of, payload_of, read_stamp, size_of
from benchmarks.soak.ledger import CLAIMS, Claim, Counted, PoolAccounting, State
from benchmarks.soak.losses import Losses
from benchmarks.soak.worker import Plan, run_slots
from tiercheck.errors import CapacityExceeded, NotFound, PreconditionFailed, Transient
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange, ObjectInfo, Payload, PutMode

OPERATIONS = 1000
SLOTS = 4
SOAKS_MAX = 5


class Honest(MemoryDriver):
    """Those that follow do one thing wrong, in one of ``one_in`` calls of it."""

    one_in = 20

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def counted(self) -> bool:
        """Whether this call is one of the rare ones that go wrong."""
        self.calls += 1
        return self.calls % self.one_in == 0


class DropsPuts(Honest):
    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if self.counted() and mode == PutMode.OVERWRITE:
            return ObjectInfo(key, sum(len(part) for part in payload), "dropped")
        return await MemoryDriver.put(self, key, payload, mode=mode)


class TearsPuts(Honest):
    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if self.counted() and mode == PutMode.OVERWRITE:
            whole = b"".join(payload)
            await MemoryDriver.put(self, key, [whole[: len(whole) // 2]])
            return ObjectInfo(key, len(whole), "torn")
        return await MemoryDriver.put(self, key, payload, mode=mode)


class MixesKeys(Honest):
    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if self.counted() and mode == PutMode.OVERWRITE and not key.startswith("counters"):
            await MemoryDriver.put(self, "soak/00/a", payload)
        return await MemoryDriver.put(self, key, payload, mode=mode)


class PutsLate(Honest):
    """What was cancelled, or failed, comes about when nobody expects it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[str, bytes]] = []

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if self.counted() and mode == PutMode.OVERWRITE:
            self.late.append((key, b"".join(payload)))
            raise Transient("away")
        if self.late and self.calls % 20 == 10:
            late, content = self.late.pop()
            await MemoryDriver.put(self, late, [content])
        return await MemoryDriver.put(self, key, payload, mode=mode)


class RefusesAndPuts(Honest):
    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        info = await MemoryDriver.put(self, key, payload, mode=mode)
        if self.counted():
            raise CapacityExceeded("full")
        return info


class IgnoresConditions(Honest):
    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        return await MemoryDriver.put(self, key, payload)


class ChecksConditionsTooEarly(Honest):
    """The condition is checked, and only later is it published: a race that one client never sees."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if mode.kind != "update":
            return await MemoryDriver.put(self, key, payload, mode=mode)
        try:
            if (await self.stat(key)).etag != mode.etag:
                raise PreconditionFailed("changed", tier=self.url, key=key)
        except NotFound:
            raise PreconditionFailed("none", tier=self.url, key=key) from None
        for _ in range(20):
            await asyncio.sleep(0)
        return await MemoryDriver.put(self, key, payload)


class ForgetsDeletes(Honest):
    one_in = 2  # deletes are rare, and the next put of the key hides the loss

    async def delete(self, keys: Iterable[str]) -> None:
        if not self.counted():
            await super().delete(keys)


class LosesObjects(Honest):
    async def stat(self, key: str) -> ObjectInfo:
        if self.counted():
            await super().delete([key])
        return await super().stat(key)


class FlipsBits(Honest):
    one_in = 5  # reads of ranges are rare, and only those that hold the last byte show it

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        found = bytearray(await super().get(key, range=range))
        if self.counted() and found:
            found[-1] ^= 1
        return memoryview(found)


class RecyclesWhatIsRead(Honest):
    """A mapping that shows what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[bytearray] = []

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        found = bytearray(await super().get(key, range=range))
        if self.counted():
            for each in self.read[-20:]:
                each[:] = bytes(len(each))
        self.read.append(found)
        return memoryview(found)


class ListsInAnyOrder(Honest):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in reversed([info async for info in super().list(prefix)]):
            yield info


class ListsTooFew(Honest):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in [info async for info in super().list(prefix)][1:]:
            yield info


class ListsDebris(Honest):
    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        yield ObjectInfo(f"{prefix}!partial", 7, "x")
        async for info in super().list(prefix):
            yield info


class LeaksErrors(Honest):
    """In puts: the end of a soak makes none, and a tier that fails then is no loss but the end of the soak."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if self.counted():
            raise OSError("something of the file system's")
        return await MemoryDriver.put(self, key, payload, mode=mode)


async def soaked(driver: Honest, tmp_path: Path, seed: int = 7) -> list[str]:
    """The rules that were found broken."""
    ledger = PoolAccounting.create(tmp_path / "ledger", SLOTS)
    losses = Losses(tmp_path / "losses")
    plan = Plan(
        url=driver.url,
        ledger="",
        losses="",
        slots=SLOTS,
        own_slots=tuple(range(SLOTS)),
        seed=seed,
        linger_s=0,
        large_bytes=20_000,
    )
    try:
        async with driver:
            await run_slots(plan, driver, ledger, losses, lambda: ledger.operations() >= OPERATIONS)
            await settle_accounts(driver, ledger, losses, large_bytes=plan.large_bytes)
        assert ledger.operations() >= OPERATIONS
        return [found["lost"] for found in losses.read()]
    finally:
        losses.close()
        ledger.close()


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_found_where_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    assert await soaked(Honest(), tmp_path, seed) == []


@pytest.mark.parametrize(
    ("driver", "rules"),
    [
        (DropsPuts, {"an acknowledged put is not what is read"}),
        (TearsPuts, {"a listing shows a part of an object"}),
        (MixesKeys, {"an object is damaged"}),
        (PutsLate, {"an acknowledged put is not what is read"}),
        (RefusesAndPuts, {"a refused increment came about"}),
        (IgnoresConditions, {"a condition was ignored", "a claim is not its winner's"}),
        (ChecksConditionsTooEarly, {"an increment is lost"}),
        (ForgetsDeletes, {"a deleted object is back"}),
        (LosesObjects, {"an object is gone"}),
        (FlipsBits, {"an object is damaged", "a range holds other bytes"}),
        (RecyclesWhatIsRead, {"a buffer that was read has changed"}),
        (ListsInAnyOrder, {"a listing is out of order"}),
        (ListsTooFew, {"a listing is wrong"}),
        (ListsDebris, {"a listing names what nobody put"}),
        (LeaksErrors, {"a call raised what is no TierError"}),
    ],
)
async def test_each_kind_of_loss_is_found(tmp_path: Path, driver: type[Honest], rules: set[str]) -> None:
    """In one soak; a late put in one of several, since the clock decides when it strikes."""
    found: set[str] = set()
    for seed in range(7, 7 + (SOAKS_MAX if driver is PutsLate else 1)):
        (tmp_path / str(seed)).mkdir()
        found |= set(await soaked(driver(), tmp_path / str(seed), seed))
        if rules <= found:
            return
    assert rules <= found


@given(sequence=st.integers(0, 2**40), nbytes=st.integers(HEADER_BYTES, 3 << 20), data=st.data())
def test_any_change_of_an_object_is_seen(sequence: int, nbytes: int, data: st.DataObject) -> None:
    stamp = Stamp("soak/01/a-b/c", 1, sequence, nbytes)
    content = bytearray(b"".join(payload_of(stamp)))
    assert len(content) == nbytes
    assert read_stamp(stamp.key, memoryview(content)) == stamp
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes))
    assert part_of(stamp, start, stop) == content[start:stop]
    with pytest.raises(Damaged):
        read_stamp("soak/01/other", memoryview(content))
    with pytest.raises(Damaged):
        read_stamp(stamp.key, memoryview(content)[: data.draw(st.integers(0, nbytes - 1))])
    content[data.draw(st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        read_stamp(stamp.key, memoryview(content))


def test_sizes_are_the_same_in_every_process() -> None:
    sizes = [size_of("soak/00/a", sequence, 1 << 20) for sequence in range(300)]
    assert sizes == [size_of("soak/00/a", sequence, 1 << 20) for sequence in range(300)]
    assert min(sizes) >= HEADER_BYTES
    assert max(sizes) > 256 << 10


def test_a_ledger_is_what_the_last_process_left(tmp_path: Path) -> None:
    ledger = PoolAccounting.create(tmp_path / "ledger", 3)
    own = next(ledger.own_keys(1))
    assert ledger.acknowledged(own) == ledger.begun(own) == State(0, present=False)
    state = ledger.begin(own, present=True)
    assert state == State(1, present=True)
    ledger.begin_increment(2, 1, 5)
    ledger.set_claim(CLAIMS - 1, 2, Claim.WON)
    ledger.count(2, Counted.LISTS)
    again = PoolAccounting(tmp_path / "ledger", 3)
    assert again.begun(own) == state
    assert again.acknowledged(own) == State(0, present=False)
    again.acknowledge(own, state)
    assert ledger.acknowledged(own) == state
    assert (again.increments_begun(2, 1), again.increments_acknowledged(2, 1)) == (5, 0)
    assert again.claim(CLAIMS - 1, 2) is Claim.WON
    assert again.operations() == again.operations_of(2) == 1
    untouched = [other for other in again.keys if other != own]
    assert all(again.begun(other) == State(0, present=False) for other in untouched)
    for each in (ledger, again):
        each.close()
