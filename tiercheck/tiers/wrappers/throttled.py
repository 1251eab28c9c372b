"""A tier slowed down to a bandwidth and a rate of requests: to share a link fairly, or to play a slow store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import ObjectInfo

__all__ = ["Throttle", "ThrottledDriver", "TokenBucket"]

T = TypeVar("T")

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]

OBJECTS_PER_REQUEST = 1000
"""A listing costs a request for so many objects, as it does on the object stores."""
FREE = frozenset(
    {
        Operation.OPEN,
        Operation.OPEN_TO_READ,
        Operation.CLOSE,
        Operation.RESERVE,
        Operation.PREPARE,
        Operation.EXPECT,
        Operation.DROP,
    }
)
"""Calls that cost nothing: they move no object."""


@dataclass(frozen=True)
class Throttle:
    """``bytes_per_s`` holds in each direction by itself, as on a full-duplex link. ``None``: without bound.

    ``burst_s``: how many seconds' worth of unused bytes and requests may be saved up.
    """

    bytes_per_s: float | None = None
    requests_per_s: float | None = None
    burst_s: float = 0.1

    def __post_init__(self) -> None:
        for label, rate in (("bytes_per_s", self.bytes_per_s), ("requests_per_s", self.requests_per_s)):
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"{label} must be a positive, finite number or None, not {rate}")
        if not 0 <= self.burst_s < float("inf"):
            raise ValueError(f"burst_s must be finite and not negative, not {self.burst_s}")


class TokenBucket:
    """Tokens flow in at ``per_s``, up to ``burst_s`` seconds' worth; takers wait for theirs, first come first served.

    A taker that is cancelled while it waits has taken nothing, and the next one's turn comes at once.
    """

    def __init__(self, per_s: float, burst_s: float, clock: Clock, sleep: Sleep) -> None:
        self._per_s = per_s
        self._saved_max = per_s * burst_s
        self._clock = clock
        self._sleep = sleep
        self._saved = self._saved_max
        self._seen_s = clock()
        self._turn = asyncio.Lock()

    async def take(self, amount: float) -> None:
        """Wait until ``amount`` tokens have flowed in, and take them."""
        async with self._turn:
            self._refill()
            if amount > self._saved:
                missing = amount - self._saved
                await self._sleep(missing / self._per_s)
                # What flowed in while nobody could save it up is this taker's; a late wake-up is not paid twice.
                passed = (self._clock() - self._seen_s) * self._per_s
                self._saved = min(self._saved_max + amount, self._saved + max(passed, missing))
                self._seen_s = self._clock()
            self._saved -= amount

    def _refill(self) -> None:
        now_s = self._clock()
        self._saved = min(self._saved_max, self._saved + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s


class ThrottledDriver(WrappingDriver):
    """``driver``, no faster than the throttle allows.

    Bytes are paid for in slices of the tier's ``part_bytes``, in turns, so that a small object is not kept waiting
    behind the whole of a large one. What goes to the tier (put, publish) is paid before it is sent; what comes from
    it is handed out once it is paid, a mapping too. Each call but opening, closing and memory costs a request.

    Capabilities are those of ``driver``. Cancellation while waiting: nothing was sent, and slices paid are lost.
    ``clock`` (s) and ``sleep`` (s) may be virtual.
    """

    def __init__(
        self,
        driver: TierDriver,
        throttle: Throttle | None = None,
        *,
        bytes_per_s: float | None = None,
        requests_per_s: float | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        super().__init__(driver)
        if throttle is not None and (bytes_per_s is not None or requests_per_s is not None):
            raise ValueError("give either a Throttle or its rates, not both")
        self.throttle = throttle or Throttle(bytes_per_s, requests_per_s)

        def bucket(per_s: float | None) -> TokenBucket | None:
            return None if per_s is None else TokenBucket(per_s, self.throttle.burst_s, clock, sleep)

        self._sending = bucket(self.throttle.bytes_per_s)
        self._receiving = bucket(self.throttle.bytes_per_s)
        self._requests = bucket(self.throttle.requests_per_s)

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        if call.operation not in FREE and call.operation is not Operation.LIST:
            await self._request()
        await self._pay(self._sending, call.sent_bytes)
        result = await work()
        if call.operation is Operation.GET and isinstance(result, memoryview):
            await self._pay(self._receiving, result.nbytes)
        return result

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        listed = 0
        await self._request()
        async for item in super().list(prefix):
            if listed and listed % OBJECTS_PER_REQUEST == 0:
                await self._request()
            listed += 1
            yield item

    async def _request(self) -> None:
        if self._requests is not None:
            await self._requests.take(1)

    async def _pay(self, bucket: TokenBucket | None, nbytes: int) -> None:
        if bucket is None:
            return
        slice_bytes = self.capabilities.part_bytes
        for at in range(0, nbytes, slice_bytes):
            await bucket.take(min(slice_bytes, nbytes - at))
