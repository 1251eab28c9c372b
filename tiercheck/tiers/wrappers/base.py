"""What all wrappers share: every call goes to the wrapped driver through one method, :meth:`WrappingDriver.around`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.types import ByteRange, Capabilities, Leftover, ObjectInfo, Payload, PutMode, Usage

__all__ = ["Call", "Operation", "WrappingDriver", "WrappingReservation", "payload_bytes"]

T = TypeVar("T")


class Operation(StrEnum):
    """The calls of the driver protocol that do something; ``PUBLISH`` and ``DROP`` are a reservation's."""

    OPEN = "open"
    OPEN_TO_READ = "open_to_read"
    CLOSE = "close"
    PUT = "put"
    GET = "get"
    STAT = "stat"
    LIST = "list"
    DELETE = "delete"
    USAGE = "usage"
    RESERVE = "reserve"
    PREPARE = "prepare_reservations"
    EXPECT = "expect"
    PUBLISH = "publish"
    DROP = "drop"


@dataclass(frozen=True)
class Call:
    """One call on its way to the wrapped driver. ``sent_bytes``: what it carries towards the tier."""

    operation: Operation
    key: str | None = None
    sent_bytes: int = 0


class WrappingDriver(TierDriver):
    """``inner``, with :meth:`around` around every call. As it stands it cannot be told from ``inner``."""

    def __init__(self, inner: TierDriver) -> None:
        self.inner = inner

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        """Make the call: ``work()`` is the wrapped driver's, and may be made anew where that is sound.

        For ``LIST``, ``work`` fetches the next object, so that what the caller does between two is not in it.
        The end of a listing is a ``StopAsyncIteration`` that ``work`` raises.
        """
        return await work()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def facts(self) -> Mapping[str, str]:
        return self.inner.facts()

    def doubts(self) -> Sequence[str]:
        return self.inner.doubts()

    async def open(self) -> None:
        await self.around(Call(Operation.OPEN), self.inner.open)

    async def open_to_read(self) -> None:
        await self.around(Call(Operation.OPEN_TO_READ), self.inner.open_to_read)

    async def leftovers(self) -> Sequence[Leftover]:
        return await self.inner.leftovers()

    async def reclaim(self) -> None:
        await self.inner.reclaim()

    async def close(self) -> None:
        await self.around(Call(Operation.CLOSE), self.inner.close)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        call = Call(Operation.PUT, key, payload_bytes(payload))
        return await self.around(call, lambda: self.inner.put(key, payload, mode=mode))

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        return await self.around(Call(Operation.GET, key), lambda: self.inner.get(key, range=range, into=into))

    async def stat(self, key: str) -> ObjectInfo:
        return await self.around(Call(Operation.STAT, key), lambda: self.inner.stat(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = aiter(self.inner.list(prefix))
        while True:
            try:
                item = await self.around(Call(Operation.LIST), lambda: anext(found))
            except StopAsyncIteration:
                return
            yield item

    async def delete(self, keys: Iterable[str]) -> None:
        chosen = list(keys)
        await self.around(Call(Operation.DELETE), lambda: self.inner.delete(chosen))

    async def usage(self) -> Usage:
        return await self.around(Call(Operation.USAGE), self.inner.usage)

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        reservation = await self.around(Call(Operation.RESERVE, key), lambda: self.inner.reserve(key, nbytes))
        return WrappingReservation(self, reservation)

    def reserve_nowait(self, key: str, nbytes: int) -> None:
        """Never: what goes on around a call may have to wait."""
        del key, nbytes

    async def prepare_reservations(self, sizes: Sequence[tuple[int, int]]) -> None:
        await self.around(Call(Operation.PREPARE), lambda: self.inner.prepare_reservations(sizes))

    async def expect(self, nbytes: int) -> None:
        await self.around(Call(Operation.EXPECT), lambda: self.inner.expect(nbytes))


class WrappingReservation(Reservation):
    """``inner``, whose publishing and dropping go through the wrapping driver as well."""

    def __init__(self, driver: WrappingDriver, inner: Reservation, key: str | None = None) -> None:
        self.key = inner.key if key is None else key
        self.driver = driver
        self.inner = inner

    @property
    def buffer(self) -> memoryview:
        return self.inner.buffer

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        sent_bytes = self.inner.buffer.nbytes if nbytes is None else max(nbytes, 0)
        call = Call(Operation.PUBLISH, self.key, sent_bytes)
        return await self.driver.around(call, lambda: self.inner.publish(nbytes, mode=mode))

    async def drop(self) -> None:
        await self.driver.around(Call(Operation.DROP, self.key), self.inner.drop)


def payload_bytes(payload: Payload) -> int:
    """Bytes of all buffers together; no view of one stays behind."""
    return sum(buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in payload)
