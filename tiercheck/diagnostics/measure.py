"""Bandwidth and latency of a tier, measured briefly: what ``tiercheck bench`` prints and ``doctor`` looks at."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiercheck.errors import ConfigurationError, Unsupported
from tiercheck.testing.scratch import Scratch, scratch
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import Usage

__all__ = ["Point", "curves", "measure", "usage_in_time"]

SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)
CONCURRENCY = (1, 4)
REPEATS = 5
BUDGET_S = 20.0
BYTES_MAX = 2 << 30
"""The most that one measurement writes, in bytes."""
USAGE_S = 20.0
"""How long a tier may take to count what it holds: some list it all."""
ROOM_UNKNOWN_BYTES = 1 << 30
"""The room that a tier is given which did not say in time how much it has."""
PATTERN = bytes(range(251)) * 4177
"""About 1 MiB that no page-sized period divides."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Point:
    """One operation at one size and one concurrency.

    ``calls`` were timed, in rounds of ``concurrency`` at once; ``latency_*`` are of a call, ``bytes_per_s`` is the
    median over the rounds, of all calls of a round together (0 for ``stat`` and ``list``, which move no content).
    ``nbytes`` is an object's size, 0 for ``stat`` and ``list``; a call of ``list`` lists ``objects`` objects.
    """

    operation: str
    nbytes: int
    concurrency: int
    calls: int
    latency_s_median: float
    latency_s_p95: float
    bytes_per_s: float
    objects: int = 1

    def to_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def curves(
    url: str,
    sizes: Sequence[int] = SIZES,
    concurrency: Sequence[int] = CONCURRENCY,
    repeats: int = REPEATS,
    budget_s: float = BUDGET_S,
    *,
    bytes_max: int = BYTES_MAX,
    clock: Clock = time.perf_counter,
) -> list[Point]:
    """Measure the tier at ``url`` with put, get, stat and list, under a prefix of its own that is removed at the end.

    For each size (bytes) and each concurrency: a round that is not counted, then up to ``repeats`` rounds. A get reads
    into a buffer that was touched before. Once ``budget_s`` has passed no round begins, and a size of which not even
    one round was finished has no point; a round that would write beyond ``bytes_max`` in all, or fill more than half of
    what the tier has free, is left out; if it does not say within 20 s what it has free, that is taken for 1 GiB.
    What lies in the tier at a time is the largest size times the largest concurrency.

    Errors: ``ConfigurationError`` for a size below 0 or a concurrency, a number of repeats or a budget that is not
    positive; the driver's own.
    """
    if not sizes or not concurrency or min(sizes) < 0 or min(concurrency) < 1 or repeats < 1 or budget_s <= 0:
        raise ConfigurationError(
            f"a measurement needs sizes of 0 bytes or more, and a concurrency, repeats and a budget above 0; these are "
            f"{list(sizes)}, {list(concurrency)}, {repeats} and {budget_s}"
        )
    async with scratch(url, "bench") as place:
        return await measure(place, sizes, concurrency, repeats, budget_s, bytes_max=bytes_max, clock=clock)


async def measure(
    place: Scratch,
    sizes: Sequence[int],
    concurrency: Sequence[int],
    repeats: int,
    budget_s: float,
    *,
    bytes_max: int = BYTES_MAX,
    clock: Clock = time.perf_counter,
) -> list[Point]:
    """:func:`curves` in a tier that is open."""
    return await measure_in_room(
        place,
        sizes,
        concurrency,
        repeats,
        budget_s,
        await usage_in_time(place.tier),
        bytes_max=bytes_max,
        clock=clock,
    )


async def usage_in_time(driver: TierDriver, seconds: float = USAGE_S) -> Usage | None:
    """What the tier holds and has free; ``None`` if it does not say within ``seconds``. Errors: the driver's own."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await driver.usage()
    except TimeoutError:
        if not deadline.expired():
            raise
        return None


async def measure_in_room(
    place: Scratch,
    sizes: Sequence[int],
    concurrency: Sequence[int],
    repeats: int,
    budget_s: float,
    usage: Usage | None,
    *,
    bytes_max: int = BYTES_MAX,
    clock: Clock = time.perf_counter,
) -> list[Point]:
    """:func:`measure` if it is known what the tier has free, or known not to be."""
    free = ROOM_UNKNOWN_BYTES if usage is None else usage.free_bytes
    room = math.inf if free is None else free / 2
    run = _Run(place, repeats, clock() + budget_s, bytes_max, clock)
    points: list[Point] = []
    for nbytes in sorted(set(sizes)):
        for count in sorted(set(concurrency)):
            # An overwritten object counts until the new one is there.
            if 2 * nbytes * count <= room:
                points += await run.at(nbytes, count)
        await run.clear()
    return points


class _Run:
    """What the points of one measurement share: the time and the bytes that are left."""

    def __init__(self, place: Scratch, repeats: int, deadline: float, bytes_max: int, clock: Clock) -> None:
        self.place = place
        self.repeats = repeats
        self.deadline = deadline
        self.bytes_left = bytes_max
        self.clock = clock
        self.written: set[str] = set()
        self.without_content: set[int] = set()
        """The concurrencies at which stat and list were measured."""

    async def clear(self) -> None:
        await self.place.driver.delete(sorted(self.written))
        self.written.clear()

    async def at(self, nbytes: int, count: int) -> list[Point]:
        """The points of one size and one concurrency; none if there is no time or room for a round of puts."""
        driver = self.place.driver
        keys = [self.place.key(f"{nbytes}/{n:04d}") for n in range(count)]
        content = (PATTERN * (nbytes // len(PATTERN) + 1))[:nbytes]
        buffers = [memoryview(bytearray(content)) for _ in keys]

        async def put(n: int) -> None:
            await driver.put(keys[n], [content])

        async def get(n: int) -> None:
            await driver.get(keys[n], into=buffers[n])

        async def stat(n: int) -> None:
            await driver.stat(keys[n])

        async def list_all(n: int) -> None:
            listed = [info.key async for info in driver.list(self.place.key(f"{nbytes}/"))]
            if len(listed) < count:
                raise Unsupported(f"a listing shows {len(listed)} objects of {count}", tier=driver.url)

        self.written.update(keys)
        put_point = await self.point("put", nbytes, count, put, nbytes)
        if put_point is None:
            return []
        others = [await self.point("get", nbytes, count, get, nbytes)]
        if count not in self.without_content:  # the object's size does not matter to these
            self.without_content.add(count)
            others.append(await self.point("stat", 0, count, stat))
            others.append(await self.point("list", 0, count, list_all, objects=count))
        return [put_point, *(point for point in others if point is not None)]

    async def point(
        self,
        operation: str,
        nbytes: int,
        count: int,
        call: Callable[[int], Awaitable[None]],
        moved: int = 0,
        objects: int = 1,
    ) -> Point | None:
        latencies: list[float] = []
        rounds: list[float] = []

        async def timed(n: int) -> float:
            began = self.clock()
            await call(n)
            return self.clock() - began

        for number in range(self.repeats + 1):
            cost = moved * count if operation == "put" else 0
            if self.clock() >= self.deadline or cost > self.bytes_left:
                break
            self.bytes_left -= cost
            began = self.clock()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(timed(n)) for n in range(count)]
            if number:  # the first round pays for connections and fresh memory
                rounds.append(self.clock() - began)
                latencies += [task.result() for task in tasks]
        if not rounds:
            return None
        return Point(
            operation,
            nbytes,
            count,
            len(latencies),
            statistics.median(latencies),
            percentile(latencies, 0.95),
            moved * count / max(statistics.median(rounds), 1e-9),
            objects,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
