"""What the peer server's store answers, past the wire."""

from __future__ import annotations

from typing import cast

import pytest

from tiercheck.errors import CapacityExceeded, Transient
from tiercheck.tiers.driver import Reservation
from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerLimits
from tiercheck.tiers.peer.messages import PAGE_MAX, Page
from tiercheck.tiers.peer.server import reading
from tiercheck.tiers.peer.server.effects import (
    Greet,
    ListObjects,
    Memory,
    PublishMemory,
    ReserveMemory,
    StatObject,
)
from tiercheck.tiers.peer.server.store import NamespaceStore
from tiercheck.tiers.shm.driver import ShmDriver, remove_namespace
from tiercheck.types import PutMode, Usage


async def pages_of(count: int) -> list[Page]:
    """All pages of a namespace with so many objects, as a client asks for them."""
    driver = MemoryDriver()
    async with driver:
        for number in range(count):
            await driver.put(f"k{number:05d}", [b""])

        async def opened(namespace: str) -> MemoryDriver:
            return driver

        store = NamespaceStore(opened, PeerLimits())
        pages: list[Page] = []
        while not pages or pages[-1].more:
            page = await store.do(ListObjects("n", "", pages[-1].entries[-1][0] if pages else ""))
            assert isinstance(page, Page)
            pages.append(page)
    keys = [key for page in pages for key, _, _ in page.entries]
    assert keys == [f"k{number:05d}" for number in range(count)]
    return pages


@pytest.mark.parametrize(
    ("count", "lengths"), [(0, [0]), (1, [1]), (PAGE_MAX, [PAGE_MAX]), (PAGE_MAX + 1, [PAGE_MAX, 1])]
)
async def test_a_page_is_as_long_as_a_message_may_be_and_no_longer(count: int, lengths: list[int]) -> None:
    assert [len(page.entries) for page in await pages_of(count)] == lengths


async def test_a_page_holds_as_many_bytes_as_it_may_and_one_object_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    ((key, _, etag),) = (await pages_of(1))[0].entries
    entry_nbytes = len(key.encode()) + len(etag) + 32
    for most, lengths in ((2 * entry_nbytes, [2, 2, 1]), (2 * entry_nbytes - 1, [1] * 5), (0, [1] * 5)):
        monkeypatch.setattr(reading, "PAGE_BYTES_MAX", most)
        assert [len(page.entries) for page in await pages_of(5)] == lengths


async def test_a_namespace_is_not_closed_under_who_reserves_memory_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was empty when it was looked at, to be closed for a further one."""
    opened: list[ShmDriver] = []
    reserved: list[Memory] = []
    usage = ShmDriver.usage

    async def open_namespace(namespace: str) -> ShmDriver:
        opened.append(ShmDriver(f"{name}-{namespace}", size=8 << 20))
        await opened[-1].open()
        return opened[-1]

    async def reserves_behind(driver: ShmDriver) -> Usage:
        found = await usage(driver)
        if is_full and not reserved:
            memory = await store.do(ReserveMemory("first", "k", 1 << 20))
            reserved.append(cast(Memory, memory))
        return found

    is_full = False
    store = NamespaceStore(open_namespace, PeerLimits(namespaces=1))
    await store.do(Greet("first"))
    is_full = True
    monkeypatch.setattr(ShmDriver, "usage", reserves_behind)
    with pytest.raises(CapacityExceeded, match=r"PeerLimits\.namespaces"):
        await store.do(Greet("second"))
    reserved[0].buffer[:3] = b"abc"
    await store.do(PublishMemory(reserved[0], PutMode.OVERWRITE))
    assert await store.do(StatObject("first", "k"))
    await store.close()
    remove_namespace(f"{name}-first")


async def test_a_namespace_that_cannot_be_asked_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is still empty, when it was to be closed for a further one."""
    driver = ShmDriver(name, size=8 << 20)

    async def open_namespace(_: str) -> ShmDriver:
        await driver.open()
        return driver

    store = NamespaceStore(open_namespace, PeerLimits(namespaces=1))
    await store.do(Greet("first"))
    usage, asked = ShmDriver.usage, list[int]()

    async def fails_the_second_time(driver: ShmDriver) -> Usage:
        asked.append(1)
        if len(asked) == 2:
            raise Transient("not now")
        return await usage(driver)

    monkeypatch.setattr(ShmDriver, "usage", fails_the_second_time)
    with pytest.raises(Transient, match="not now"):
        await store.do(Greet("second"))
    assert await store.driver("first") is driver
    await store.close()
    assert not driver.is_open


async def test_memory_of_a_namespace_that_was_closed_meanwhile_is_no_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ShmDriver(name, size=8 << 20)

    async def open_namespace(_: str) -> ShmDriver:
        await driver.open()
        return driver

    store = NamespaceStore(open_namespace, PeerLimits())
    await store.do(Greet("n"))
    reserve = ShmDriver.reserve

    async def closed_meanwhile(driver: ShmDriver, key: str, nbytes: int) -> Reservation:
        memory = await reserve(driver, key, nbytes)
        await store.close()
        return memory

    monkeypatch.setattr(ShmDriver, "reserve", closed_meanwhile)
    with pytest.raises(Transient, match="being closed; try again"):
        await store.do(ReserveMemory("n", "k", 1 << 20))
