"""The state machine finds drivers that break their word in a way that no single call shows."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.plain_driver import PlainDriver
from tiercheck.testing.stateful import DriverMachine
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.memory import MemoryDriver, StoredObject
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives, Usage

ENOUGH = settings(
    max_examples=1000,  # the first that fails is the last
    report_multiple_bugs=False,
    stateful_step_count=40,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class CachingDriver(MemoryDriver):
    """Remembers what it has read, and does not hear of what another client puts."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cache: dict[str, ObjectInfo] = {}

    async def stat(self, key: str) -> ObjectInfo:
        if key not in self.cache:
            self.cache[key] = await super().stat(key)
        return self.cache[key]

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        self.cache.pop(key, None)
        return await super().put(key, payload, mode=mode)

    async def delete(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        for key in kept:
            self.cache.pop(key, None)
        await super().delete(kept)


class HashingDriver(MemoryDriver):
    """Its etags are hashes of the content."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        info = await super().put(key, payload, mode=mode)
        stored = self.store.objects[key]
        self.store.objects[key] = StoredObject(stored.content, str(hash(bytes(stored.content))))
        return ObjectInfo(key, info.nbytes, self.store.objects[key].etag)


class RecyclingDriver(MemoryDriver):
    """An overwrite frees the memory that readers have a view of, and something else is written there."""

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        old = self.store.objects.get(key)
        info = await super().put(key, payload, mode=mode)
        if old is not None and isinstance(old.content.obj, bytearray):
            old.content.obj[:] = b"!" * len(old.content.obj)
        return info


class GreedyDriver(MemoryDriver):
    """A range past the end is cut short instead of refused."""

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        nbytes = (await self.stat(key)).nbytes
        if range is not None and range.stop > nbytes:
            cut = ByteRange(min(range.start, nbytes), nbytes)
            return await super().get(key, range=cut, into=into)
        return await super().get(key, range=range, into=into)


class LeakingDriver(MemoryDriver):
    """Counts deleted objects as used."""

    deleted_bytes = 0

    async def delete(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        self.deleted_bytes += sum(self.store.objects[key].content.nbytes for key in set(kept) & set(self.store.objects))
        await super().delete(kept)

    async def usage(self) -> Usage:
        usage = await super().usage()
        return Usage(usage.used_bytes + self.deleted_bytes, None)


class ForgetfulDriver(MemoryDriver):
    """What a publish under a condition is refused stays reserved."""

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        if nbytes > 64:
            self.store.reserved_bytes += 1
        return await super().reserve(key, nbytes)


class GenerousDriver(MemoryDriver):
    """Says that it is not mappable, and hands out memory."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(Survives.NOTHING, mappable=False, conditional_put=True)


class LaggingDriver(MemoryDriver):
    """Its listings show the etag that was there before, with the very same bytes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.former: dict[tuple[str, bytes], str] = {}

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            content = bytes(self.store.objects[info.key].content)
            yield ObjectInfo(info.key, info.nbytes, self.former.setdefault((info.key, content), info.etag))


def machine(driver: type[MemoryDriver], *, lag: bool = False) -> type[DriverMachine]:
    class Machine(DriverMachine):
        lists_may_lag = lag

        def make_driver(self) -> TierDriver:
            self.name = getattr(self, "name", None) or secrets.token_hex(8)
            return driver(self.name)

        def remove_tier(self) -> None:
            MemoryDriver.forget(self.name)

    return Machine


@pytest.mark.parametrize(
    "broken",
    [
        CachingDriver,
        HashingDriver,
        RecyclingDriver,
        GreedyDriver,
        LeakingDriver,
        ForgetfulDriver,
        GenerousDriver,
        LaggingDriver,
    ],
)
def test_a_broken_promise_is_found(broken: type[MemoryDriver]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine(broken), settings=ENOUGH)


@pytest.mark.parametrize(("good", "lag"), [(MemoryDriver, False), (PlainDriver, False), (LaggingDriver, True)])
def test_a_driver_that_keeps_its_word_passes(good: type[MemoryDriver], lag: bool) -> None:
    few = settings(ENOUGH, max_examples=25)
    run_state_machine_as_test(machine(good, lag=lag), settings=few)


class StaleListingDriver(MemoryDriver):
    """Its listings show the first etag that an object had, whatever has been put since."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.first: dict[str, str] = {}

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix):
            yield ObjectInfo(info.key, info.nbytes, self.first.setdefault(info.key, info.etag))


def test_lag_is_no_licence_for_the_etag_of_other_bytes() -> None:
    with pytest.raises(AssertionError, match="never the etag of other bytes"):
        run_state_machine_as_test(machine(StaleListingDriver, lag=True), settings=ENOUGH)
