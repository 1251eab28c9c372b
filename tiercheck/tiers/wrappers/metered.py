"""Counts of what a tier is asked, and how long it takes: for Prometheus, and for status pages."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.types import ObjectInfo

__all__ = ["LATENCY_BOUNDS_S", "Latency", "MeteredDriver", "Metrics", "OperationMetrics"]

T = TypeVar("T")

LATENCY_BOUNDS_S = tuple(round(0.0001 * 4**n, 4) for n in range(10))
"""Upper bounds of the histogram's classes, in seconds: 0.1 ms, 0.4 ms, ... 26 s. One class more has no bound."""
CANCELLED = "Cancelled"


@dataclass(frozen=True)
class Latency:
    """A histogram of seconds. ``counts[n]`` calls took at most ``bounds_s[n]``; the last one, longer than any bound."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    sum_s: float = 0.0
    max_s: float = 0.0
    bounds_s: tuple[float, ...] = LATENCY_BOUNDS_S

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """Pairs (bound in seconds, calls within it), as Prometheus wants them; the last bound is infinite."""
        return tuple(zip((*self.bounds_s, float("inf")), itertools.accumulate(self.counts), strict=True))


@dataclass(frozen=True)
class OperationMetrics:
    """One operation so far. ``calls`` counts those that ended, well or not; ``errors`` those that failed, by class."""

    calls: int = 0
    in_flight: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    objects_listed: int = 0
    errors: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    latency: Latency = field(default_factory=Latency)


@dataclass(frozen=True)
class Metrics:
    """A tier at one moment. Every operation is there, also those nobody asked for yet."""

    tier: str
    operations: Mapping[Operation, OperationMetrics]

    @property
    def sent_bytes(self) -> int:
        return sum(found.sent_bytes for found in self.operations.values())

    @property
    def received_bytes(self) -> int:
        return sum(found.received_bytes for found in self.operations.values())

    @property
    def errors(self) -> Mapping[str, int]:
        """Failures of all operations, by the name of the exception's class."""
        total: Counter[str] = Counter()
        for found in self.operations.values():
            total.update(found.errors)
        return MappingProxyType(dict(total))


class _Tally:
    """The changing side of :class:`OperationMetrics`; its owner holds the lock."""

    def __init__(self) -> None:
        self.calls = self.in_flight = self.sent_bytes = self.received_bytes = self.objects_listed = 0
        self.errors: Counter[str] = Counter()
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = self.max_s = 0.0

    def ended(self, seconds: float, error: str | None) -> None:
        self.calls += 1
        self.in_flight -= 1
        self.counts[bisect.bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
        self.max_s = max(self.max_s, seconds)
        if error is not None:
            self.errors[error] += 1

    def frozen(self) -> OperationMetrics:
        return OperationMetrics(
            self.calls,
            self.in_flight,
            self.sent_bytes,
            self.received_bytes,
            self.objects_listed,
            MappingProxyType(dict(self.errors)),
            Latency(tuple(self.counts), self.sum_s, self.max_s),
        )


class MeteredDriver(WrappingDriver):
    """``driver``, whose calls are counted and timed. Capabilities are those of ``driver``.

    Bytes are counted once a call has succeeded. A listing counts as one call, timed without what its consumer does
    between two objects. Errors are counted by class: ``NotFound`` is one too, and ``Cancelled`` is a cancellation.
    """

    def __init__(self, driver: TierDriver, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(driver)
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies = {operation: _Tally() for operation in Operation}

    def snapshot(self) -> Metrics:
        """What was counted so far. May be called from any thread, and also once the driver is closed."""
        with self._lock:
            return Metrics(
                self.url, MappingProxyType({operation: tally.frozen() for operation, tally in self._tallies.items()})
            )

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        if call.operation is Operation.LIST:
            return await work()
        tally = self._begin(call.operation)
        start_s = self._clock()
        try:
            result = await work()
        except BaseException as error:
            self._end(tally, self._clock() - start_s, name_of(error))
            raise
        received_bytes = result.nbytes if call.operation is Operation.GET and isinstance(result, memoryview) else 0
        self._end(tally, self._clock() - start_s, None, call.sent_bytes, received_bytes)
        return result

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = aiter(self.inner.list(prefix))
        tally = self._begin(Operation.LIST)
        spent_s, listed, failure = 0.0, 0, None
        try:
            while True:
                start_s = self._clock()
                try:
                    item = await anext(found)
                except StopAsyncIteration:
                    return
                except BaseException as error:
                    failure = name_of(error)
                    raise
                finally:
                    spent_s += self._clock() - start_s
                listed += 1
                yield item
        finally:
            self._end(tally, spent_s, failure, objects_listed=listed)

    def _begin(self, operation: Operation) -> _Tally:
        tally = self._tallies[operation]
        with self._lock:
            tally.in_flight += 1
        return tally

    def _end(
        self,
        tally: _Tally,
        seconds: float,
        error: str | None,
        sent_bytes: int = 0,
        received_bytes: int = 0,
        objects_listed: int = 0,
    ) -> None:
        with self._lock:
            tally.ended(seconds, error)
            tally.sent_bytes += sent_bytes
            tally.received_bytes += received_bytes
            tally.objects_listed += objects_listed


def name_of(error: BaseException) -> str:
    return CANCELLED if isinstance(error, asyncio.CancelledError) else type(error).__name__
