"""A store that all ranks share and that counts what it is asked, on a clock by which each request takes one second."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tiercheck.tiers.memory import MemoryDriver
from tiercheck.types import ByteRange, Capabilities, ObjectInfo, Payload, PutMode, Survives

__all__ = ["Counts", "SharedStore", "run"]

T = TypeVar("T")
PAGE_OBJECTS = 1000
COMMITS = "job/commits/"


@dataclass(frozen=True)
class Counts:
    """What a store was asked."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    """Of a listing: its names."""

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.requests - before.requests,
            self.sent_bytes - before.sent_bytes,
            self.received_bytes - before.received_bytes,
        )


class SharedStore(MemoryDriver):
    """``crowd``: by prefix, what other ranks have brought, beside what is in it."""

    def __init__(self, name: str, crowd: Mapping[str, Callable[[], Iterable[ObjectInfo]]]) -> None:
        super().__init__(name)
        self.counts = Counts()
        self.began = 0.0
        """When the first size was asked for since the counts were set back."""
        self.at_commit: tuple[float, Counts] | None = None
        """When a commit record was put, and what had been asked until then."""
        self._crowd = crowd

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, survives=Survives.RACK, mappable=False)

    async def _asked(self, *, sent: int = 0, received: int = 0) -> None:
        counts = self.counts
        self.counts = Counts(counts.requests + 1, counts.sent_bytes + sent, counts.received_bytes + received)
        await asyncio.sleep(1)

    async def lay(self, key: str, payload: Payload) -> None:
        """Put what is not counted."""
        await MemoryDriver.put(self, key, payload)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        await self._asked(sent=sum(memoryview(part).nbytes for part in payload))
        if key.startswith(COMMITS):
            self.at_commit = asyncio.get_running_loop().time(), self.counts
        return await super().put(key, payload, mode=mode)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        content = await super().get(key, range=range, into=into)
        await self._asked(received=content.nbytes)
        return content

    async def stat(self, key: str) -> ObjectInfo:
        if not self.began:
            self.began, self.counts = asyncio.get_running_loop().time(), Counts()
        await self._asked()
        return await super().stat(key)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._asked()
        await super().delete(keys)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = [info async for info in super().list(prefix)]
        count = names = 0
        for info in itertools.chain(self._crowd.get(prefix, tuple)(), found):
            count, names = count + 1, names + len(info.key)
            if count % PAGE_OBJECTS == 0:
                await self._asked(received=names)
                names = 0
            yield info
        await self._asked(received=names)


class _Selector(selectors.DefaultSelector):
    """Never waits: it moves the clock instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now_s += max(0.0, timeout)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """Its time is the number of round trips in turn. What is handed to a thread is done at once."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # a future of asyncio is what is awaited
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  it is the future's, as an executor's would be
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
