"""A tier whose store may be away opens as soon as the store is back. It passes the kit among the other wrappers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tiercheck.errors import Closed, ConfigurationError, NotFound, NothingListens, TierError, Transient
from tiercheck.testing.faults import Killed
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.posix.nvme import NvmeDriver
from tiercheck.tiers.wrappers.lazy_open import LazyOpenDriver
from tiercheck.types import ObjectInfo, PutMode


async def test_a_store_that_comes_back_is_used(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("in the way")
    async with LazyOpenDriver(NvmeDriver(tmp_path / "x" / "tier")) as driver:
        with pytest.raises(TierError, match="cannot be made"):
            await driver.put("a", [b"1"])
        with pytest.raises(TierError, match="cannot be made"):
            [info async for info in driver.list()]
        (tmp_path / "x").unlink()
        await driver.put("a", [b"1"])
        assert [info.key async for info in driver.list()] == ["a"]
    with pytest.raises(Closed):
        await driver.inner.get("a")


class Slow(MemoryDriver):
    """Opens when it is told to."""

    def __init__(self) -> None:
        super().__init__("")
        self.may_open = asyncio.Event()
        self.attempts = 0
        self.error: Exception | None = None

    async def open(self) -> None:
        self.attempts += 1
        await self.may_open.wait()
        if self.error is not None:
            raise self.error
        await super().open()


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercheck.tiers.wrappers.lazy_open.OPEN_S", 0.02)
    monkeypatch.setattr("tiercheck.tiers.wrappers.lazy_open.CALL_S", 0.02)


async def test_a_store_that_says_nothing_keeps_nobody_waiting(brisk: None) -> None:
    slow = Slow()
    async with LazyOpenDriver(slow) as driver:
        for _ in range(3):
            with pytest.raises(Transient, match="has not answered yet"):
                await driver.usage()
        assert slow.attempts == 1, "one attempt goes on"
        slow.may_open.set()
        puts = await asyncio.gather(*(driver.put(str(n), [b"x"]) for n in range(4)))
        assert len(puts) == 4
        assert slow.attempts == 1


async def test_who_waits_in_vain_is_told_what_the_last_attempt_met(brisk: None) -> None:
    slow = Slow()
    slow.may_open.set()
    slow.error = Transient("the connection was refused")
    async with LazyOpenDriver(slow) as driver:
        assert driver.facts() == {"trouble": "the connection was refused"}
        slow.may_open.clear()
        with pytest.raises(Transient, match="has not answered yet: the connection was refused"):
            await driver.usage()
        slow.error = None
        slow.may_open.set()
        await driver.usage()
        assert driver.facts() == {}


async def test_where_nothing_has_listened_the_next_attempt_is_not_waited_for_to_say_so(brisk: None) -> None:
    slow = Slow()
    slow.may_open.set()
    slow.error = NothingListens("the connection was refused")
    async with LazyOpenDriver(slow) as driver:
        slow.may_open.clear()
        with pytest.raises(NothingListens, match="the connection was refused"):
            await driver.usage()
        assert slow.attempts == 2


async def test_an_attempt_that_is_under_way_ends_with_the_driver(brisk: None) -> None:
    slow = Slow()
    async with LazyOpenDriver(slow):
        pass
    slow.may_open.set()
    await asyncio.sleep(0)
    with pytest.raises(Closed):
        await slow.usage()


async def test_who_waits_for_an_attempt_while_the_driver_is_closed_is_told_so(brisk: None) -> None:
    slow = Slow()
    driver = LazyOpenDriver(slow)
    await driver.open()
    waiting = asyncio.ensure_future(driver.usage())
    await asyncio.sleep(0)
    await driver.close()
    with pytest.raises(Closed, match="was closed while it opened"):
        await waiting


async def test_what_no_patience_mends_is_said_at_once(brisk: None) -> None:
    slow = Slow()
    slow.error = ConfigurationError("no such region")
    slow.may_open.set()
    with pytest.raises(ConfigurationError, match="no such region"):
        await LazyOpenDriver(slow).open()
    later = Slow()
    async with LazyOpenDriver(later) as driver:
        later.error = ConfigurationError("no such region")
        later.may_open.set()
        with pytest.raises(Transient, match="no such region"):
            await driver.usage()


class Panic(BaseException):
    """As a client in Rust has."""


FAULTS = [asyncio.CancelledError(), Panic("unwrap on None"), SystemExit(1)]


class Faulty(MemoryDriver):
    """Raises ``fault`` from each call, or waits for ever without one."""

    fault: BaseException | None = None

    async def _meet(self) -> None:
        if self.fault is not None:
            raise self.fault
        await asyncio.Event().wait()

    async def put(self, key: str, payload: Any, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await self._meet()
        return await super().put(key, payload, mode=mode)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self._meet()
        async for info in super().list(prefix):
            yield info

    async def open(self) -> None:
        if self.fault is not None:
            raise self.fault
        await super().open()

    async def close(self) -> None:
        await super().close()
        if self.fault is not None:
            raise self.fault


@pytest.mark.parametrize(
    "fault", [asyncio.CancelledError(), Panic("unwrap on None"), SystemExit(1)], ids=lambda fault: type(fault).__name__
)
async def test_what_a_driver_raises_that_is_no_error_is_one_of_its_tier(fault: BaseException) -> None:
    inner = Faulty("")
    driver = LazyOpenDriver(inner)
    said = rf"raised {type(fault).__name__}.* from (put|list|close).*memory://"
    await driver.open()
    inner.fault = fault
    with pytest.raises(TierError, match=said):
        await driver.put("a", [b"1"])
    with pytest.raises(TierError, match=said):
        [info async for info in driver.list()]
    with pytest.raises(TierError, match=said):
        await driver.close()


@pytest.mark.parametrize(
    "fault", [asyncio.CancelledError(), Panic(), SystemExit(1)], ids=lambda fault: type(fault).__name__
)
async def test_a_driver_that_raises_it_from_open_is_tried_again(fault: BaseException) -> None:
    inner = Faulty("")
    inner.fault = fault
    async with LazyOpenDriver(inner) as driver:
        with pytest.raises(TierError, match=f"raised {type(fault).__name__}"):
            await driver.stat("a")
        inner.fault = None
        with pytest.raises(NotFound):
            await driver.stat("a")


async def test_a_death_that_a_test_stages_goes_through() -> None:
    inner = Faulty("")
    async with LazyOpenDriver(inner) as driver:
        inner.fault = Killed()
        with pytest.raises(Killed):
            await driver.put("a", [b"1"])
        inner.fault = None


async def test_a_caller_s_own_cancellation_is_one() -> None:
    async with LazyOpenDriver(Faulty("")) as driver:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await driver.put("a", [b"1"])
        waiting = asyncio.ensure_future(driver.put("a", [b"1"]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
