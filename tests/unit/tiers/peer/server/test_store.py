"""What the peer server's store answers, past the wire."""

from __future__ import annotations

import pytest

from tiercheck.tiers.memory import MemoryDriver
from tiercheck.tiers.peer import PeerLimits
from tiercheck.tiers.peer.messages import PAGE_MAX, Page
from tiercheck.tiers.peer.server import reading
from tiercheck.tiers.peer.server.effects import ListObjects
from tiercheck.tiers.peer.server.store import NamespaceStore


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
