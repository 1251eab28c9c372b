"""Listing in the byte order of keys, whatever order the server lists in, in bounded memory.

S3 promises ListObjectsV2 in byte order: then the pages are the answer (``flat``). Others walk folders (SeaweedFS shows
``a/b`` before ``a-b``), or promise nothing (S3 directory buckets). There one folder is listed at a time, sorted, and
each folder below it put where its name with the slash belongs (``tree``); that is byte order, since a folder's keys
share that name as their beginning. It takes a request for each folder instead of one for a thousand keys; those
of neighbouring folders are made ahead. Memory: a page, or the names in the folders from the root to here.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tiercheck.errors import TierError
from tiercheck.runtime.waiting import together
from tiercheck.tiers.s3.client import S3Client
from tiercheck.tiers.s3.names import Names
from tiercheck.types import ObjectInfo

__all__ = ["Entry", "Listing", "pages"]

T = TypeVar("T")

FOLDERS_AHEAD = 8


@dataclass(frozen=True)
class Entry:
    """What a page shows of an object (``etag`` is the server's), or the name of a folder (``etag`` is empty)."""

    name: str
    nbytes: int
    etag: str
    written_s: float | None = None


async def pages(client: S3Client, prefix: str, *, folders: bool = False) -> AsyncIterator[list[Entry]]:
    """The pages of a listing as the server gives them; with ``folders`` only what lies right in the folder."""
    token: dict[str, Any] = {}
    delimiter: dict[str, Any] = {"Delimiter": "/"} if folders else {}
    while True:
        answer = await client.ask("ListObjectsV2", Prefix=prefix, **delimiter, **token)
        page = [
            Entry(item["Key"], int(item["Size"]), item["ETag"], written_s(item)) for item in answer.get("Contents", [])
        ]
        page += [Entry(item["Prefix"], 0, "") for item in answer.get("CommonPrefixes", [])]
        yield [entry for entry in page if entry.name.startswith(prefix)]
        if not answer.get("IsTruncated"):
            return
        following = answer.get("NextContinuationToken")
        if not following or following == token.get("ContinuationToken"):
            raise TierError("the server's listing does not go on: it repeats itself", tier=client.tier)
        token = {"ContinuationToken": following}


async def _first(shard: AsyncGenerator[T, None]) -> T | None:
    return await anext(shard, None)


def written_s(item: dict[str, Any]) -> float | None:
    """When the object was written, if the server says so."""
    modified = item.get("LastModified")
    return None if modified is None else float(modified.timestamp())


class Listing:
    """Listings of one tier. ``flat``: the server lists in byte order."""

    def __init__(self, client: S3Client, names: Names, *, flat: bool) -> None:
        self._client = client
        self._names = names
        self._walk = self._flat if flat else self._tree

    async def infos(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        """The tier's objects, in order. Their etags hold a token of the put, which S3 tells in a request of its own."""
        async with contextlib.aclosing(self._merged(prefix)) as found:
            async for key, entry in found:
                yield ObjectInfo(key, entry.nbytes, "", entry.written_s)

    async def used_bytes(self) -> int:
        """The sum of the sizes; no order is needed."""
        used = 0
        for root in self._names.roots:
            async for page in pages(self._client, root):
                used += sum(entry.nbytes for entry in page if self._names.key(entry.name, root) is not None)
        return used

    async def _merged(self, prefix: str) -> AsyncGenerator[tuple[str, Entry], None]:
        """Keys and entries of all shards, in the order of keys."""
        if prefix.startswith("/") or "//" in prefix:
            return  # no key looks like that, and some servers take it for another
        async with contextlib.AsyncExitStack() as stack:
            heap: list[tuple[bytes, int, str, Entry]] = []
            shards = []
            for root in self._names.roots:
                shard = self._keyed(root, prefix)
                shards.append(await stack.enter_async_context(contextlib.aclosing(shard)))
            heads = await together(_first(shard) for shard in shards)
            for number, head in enumerate(heads):
                if head is not None:
                    heap.append((head[0].encode(), number, *head))
            heapq.heapify(heap)
            while heap:
                _, number, key, entry = heap[0]
                yield key, entry
                head = await anext(shards[number], None)
                if head is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (head[0].encode(), number, *head))

    async def _keyed(self, root: str, prefix: str) -> AsyncGenerator[tuple[str, Entry], None]:
        last = b""
        async with contextlib.aclosing(self._walk(root + prefix)) as entries:
            async for entry in entries:
                key = self._names.key(entry.name, root)
                if key is None:
                    continue
                if not last < key.encode():
                    raise TierError(
                        f"the server lists {key!r} out of order; open the tier with listing=tree",
                        tier=self._client.tier,
                    )
                last = key.encode()
                yield key, entry

    async def _flat(self, prefix: str) -> AsyncGenerator[Entry, None]:
        async for page in pages(self._client, prefix):
            for entry in page:
                yield entry

    async def _tree(self, prefix: str) -> AsyncGenerator[Entry, None]:
        async with contextlib.aclosing(self._below(await self._level(prefix))) as entries:
            async for entry in entries:
                yield entry

    async def _level(self, prefix: str) -> list[Entry]:
        """One folder's entries, each once, in byte order."""
        found: dict[str, Entry] = {}
        async for page in pages(self._client, prefix, folders=True):
            found.update((entry.name, entry) for entry in page if entry.name != self._names.probe_root)
        return sorted(found.values(), key=lambda entry: entry.name.encode())

    async def _below(self, level: list[Entry]) -> AsyncGenerator[Entry, None]:
        """The objects of a folder's ``level`` and those of the folders in it, which are listed ahead."""
        folders = deque(entry.name for entry in level if not entry.etag)
        ahead: deque[asyncio.Task[list[Entry]]] = deque()
        try:
            for entry in level:
                if entry.etag:
                    yield entry
                    continue
                while folders and len(ahead) < FOLDERS_AHEAD:
                    ahead.append(asyncio.create_task(self._level(folders.popleft())))
                async with contextlib.aclosing(self._below(await ahead[0])) as entries:
                    ahead.popleft()
                    async for below in entries:
                        yield below
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)
