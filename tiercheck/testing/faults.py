"""Faults at every point of an operation: a driver that fails where a plan says.

A *point* is a place where something can go wrong between a caller and a tier: before a call, at each
suspension inside it, and after it, when the work is done but the caller does not know yet. Points are counted
over all drivers that share a plan, so that a test can count those of an operation once, and then run it again
and again with a fault at each one in turn::

    async def save(fault_plan): ...

    for n in range(await count_points(save)):
        with pytest.raises(Killed):
            await save(FaultPlan.kill_at(n))
        await recover()

A killed driver stays dead: each later call raises :class:`Killed`, as no call of a dead process is ever made. Its
``close`` releases what the kernel would release, and nothing else.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from tiercheck.errors import CapacityExceeded
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.wrappers.faults import StagedDeath
from tiercheck.types import ByteRange, Capabilities, Leftover, ObjectInfo, Payload, PutMode, Usage

__all__ = ["Fault", "FaultPlan", "FaultyDriver", "Killed", "Moment", "Point", "count_points"]

T = TypeVar("T")


class Killed(StagedDeath):
    """The process died here. Not an ``Exception``: nothing in a dead process handles its death."""


class Moment(Enum):
    """Where in a call a point lies."""

    BEFORE = "before"
    """The call was made; nothing has happened yet."""
    SUSPENDED = "suspended"
    """The call waits for something."""
    AFTER = "after"
    """The call is done; its caller does not know."""


@dataclass(frozen=True)
class Point:
    """One place in the course of events. ``index`` counts over the plan, ``nth`` over its calls of this name."""

    index: int
    call: str
    nth: int
    key: str | None
    moment: Moment


@dataclass(frozen=True)
class Fault:
    """What happens where: at the points that ``where`` accepts, at most ``times`` times.

    ``raises`` makes the exception: ``Killed`` kills all drivers of the plan, ``asyncio.CancelledError`` cancels the
    call, and anything else is raised in its place. An exception other than those two is never raised at a
    suspension, since no driver fails at one.
    """

    where: Callable[[Point], bool]
    raises: Callable[[], BaseException]
    times: int = 1


@dataclass
class FaultPlan:
    """What goes wrong, and a record of the points that were passed. Shared by the drivers of one test.

    ``flips`` maps the name of a call that carries bytes (``put`` or ``get``) and its number to the offset of
    the byte whose lowest bit is inverted on the way.
    """

    faults: tuple[Fault, ...] = ()
    flips: dict[tuple[str, int], int] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    dead: bool = False
    _calls: dict[str, int] = field(default_factory=dict)
    _fired: dict[int, int] = field(default_factory=dict)

    @classmethod
    def kill_at(cls, index: int) -> FaultPlan:
        """Everything dies at the point ``index``."""
        return cls((Fault(lambda point: point.index == index, Killed),))

    @classmethod
    def cancel_at(cls, index: int) -> FaultPlan:
        """The call at the point ``index`` is cancelled."""
        return cls((Fault(lambda point: point.index == index, asyncio.CancelledError),))

    @classmethod
    def fail_call(
        cls,
        call: str,
        raises: Callable[[], BaseException],
        *,
        nth: int = 0,
        times: int = 1,
        moment: Moment = Moment.BEFORE,
    ) -> FaultPlan:
        """From its ``nth`` call on (from 0), ``call`` fails ``times`` times, before or after its work is done."""
        return cls((Fault(lambda at: at.call == call and at.nth >= nth and at.moment is moment, raises, times),))

    @classmethod
    def full(cls, *, after_puts: int = 0) -> FaultPlan:
        """The tier is full once ``after_puts`` puts and reservations were accepted, and stays so."""
        taken = [0]

        def where(point: Point) -> bool:
            if point.call not in ("put", "reserve") or point.moment is not Moment.BEFORE:
                return False
            taken[0] += 1
            return taken[0] > after_puts

        return cls((Fault(where, lambda: CapacityExceeded("the tier is full (injected)"), times=2**62),))

    @classmethod
    def flip(cls, call: str, *, nth: int = 0, offset: int = 0) -> FaultPlan:
        """The byte at ``offset`` arrives with its lowest bit inverted in the ``nth`` ``put`` or ``get``."""
        if call not in ("put", "get"):
            raise ValueError(f"bytes can be flipped in put and get, not in {call!r}")
        return cls(flips={(call, nth): offset})

    def begin(self, call: str) -> int:
        """Number a call."""
        if self.dead:
            raise Killed(f"{call} in a process that is dead")
        nth = self._calls.get(call, 0)
        self._calls[call] = nth + 1
        return nth

    def pass_point(self, call: str, nth: int, key: str | None, moment: Moment) -> BaseException | None:
        """Count a point; returns what is to be raised there."""
        if self.dead:
            return Killed(f"{call} in a process that is dead")
        point = Point(len(self.points), call, nth, key, moment)
        self.points.append(point)
        for index, fault in enumerate(self.faults):
            if self._fired.get(index, 0) < fault.times and fault.where(point):
                error = fault.raises()
                if moment is Moment.SUSPENDED and not isinstance(error, Killed | asyncio.CancelledError):
                    continue
                self._fired[index] = self._fired.get(index, 0) + 1
                self.dead = self.dead or isinstance(error, Killed)
                return error
        return None


async def count_points(operation: Callable[[FaultPlan], Awaitable[object]]) -> int:
    """How many points ``operation`` passes when nothing goes wrong."""
    plan = FaultPlan()
    await operation(plan)
    return len(plan.points)


class FaultyDriver(TierDriver):
    """``inner``, failing where ``plan`` says. With an empty plan it behaves as ``inner`` does."""

    def __init__(self, inner: TierDriver, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.plan = plan if plan is not None else FaultPlan()

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

    async def prepare_reservations(self, sizes: Sequence[tuple[int, int]]) -> None:
        await self._call("prepare_reservations", None, self.inner.prepare_reservations(sizes))

    async def expect(self, nbytes: int) -> None:
        await self._call("expect", None, self.inner.expect(nbytes))

    async def open(self) -> None:
        await self._call("open", None, self.inner.open(), undo=lambda _: self.inner.close())

    async def leftovers(self) -> Sequence[Leftover]:
        return await self._call("leftovers", None, self.inner.leftovers())

    async def reclaim(self) -> None:
        await self._call("reclaim", None, self.inner.reclaim())

    async def close(self) -> None:
        if self.plan.dead:
            await self.inner.close()
            return
        try:
            await self._call("close", None, self.inner.close())
        except Killed:
            await self.inner.close()
            raise

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        nth = self.plan.begin("put")
        offset = self.plan.flips.get(("put", nth))
        sent = payload if offset is None else [flipped(b"".join(payload), offset)]
        return await self._call("put", key, self.inner.put(key, sent, mode=mode), nth)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        nth = self.plan.begin("get")
        found = await self._call("get", key, self.inner.get(key, range=range, into=into), nth)
        offset = self.plan.flips.get(("get", nth))
        if offset is None:
            return found
        if into is None:
            return memoryview(flipped(found, offset))
        found[offset] ^= 1
        return found

    async def stat(self, key: str) -> ObjectInfo:
        return await self._call("stat", key, self.inner.stat(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        found = aiter(self.inner.list(prefix))
        while True:
            try:
                item = await self._call("list", prefix, anext_of(found))
            except StopAsyncIteration:
                return
            yield item

    async def delete(self, keys: Iterable[str]) -> None:
        await self._call("delete", None, self.inner.delete(keys))

    async def usage(self) -> Usage:
        return await self._call("usage", None, self.inner.usage())

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        reservation = await self._call("reserve", key, self.inner.reserve(key, nbytes), undo=drop)
        return _FaultyReservation(self, reservation)

    async def _call(
        self,
        call: str,
        key: str | None,
        work: Coroutine[Any, Any, T],
        nth: int | None = None,
        undo: Callable[[T], Awaitable[None]] | None = None,
    ) -> T:
        """``work`` with points around and inside it. ``undo`` releases a result that nobody will receive."""
        try:
            number = self.plan.begin(call) if nth is None else nth
            before = self.plan.pass_point(call, number, key, Moment.BEFORE)
            if before is not None:
                raise before
        except BaseException:
            work.close()
            raise
        result, stopped = await step(work, lambda: self.plan.pass_point(call, number, key, Moment.SUSPENDED))
        error = stopped or self.plan.pass_point(call, number, key, Moment.AFTER)
        if error is not None:
            if undo is not None:
                await undo(result)
            raise error
        return result


class _FaultyReservation(Reservation):
    def __init__(self, driver: FaultyDriver, inner: Reservation) -> None:
        self.key = inner.key
        self._driver = driver
        self._inner = inner

    @property
    def buffer(self) -> memoryview:
        return self._inner.buffer

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        return await self._driver._call("publish", self.key, self._inner.publish(nbytes, mode=mode))

    async def drop(self) -> None:
        await self._driver._call("drop", self.key, self._inner.drop())


async def drop(reservation: Reservation) -> None:
    await reservation.drop()


async def anext_of(iterator: AsyncIterator[T]) -> T:
    return await anext(iterator)


async def step(
    work: Coroutine[Any, Any, T], suspended: Callable[[], BaseException | None]
) -> tuple[T, BaseException | None]:
    """Await ``work``, asking ``suspended`` for a reason to stop it whenever it suspends.

    To stop it, its task is cancelled: the driver's contract says what that leaves behind, and that nothing of the
    call goes on afterwards, as nothing of a dead process does. The reason is raised in the cancellation's place, or
    returned beside the result if the work came to its end all the same.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a FaultyDriver is called from an asyncio task")
    stopped: list[BaseException] = []

    def at_suspension() -> None:
        error = None if stopped else suspended()
        if error is not None:
            stopped.append(error)
            task.cancel()

    try:
        result = await stepping(work, at_suspension)
    except asyncio.CancelledError:
        if not stopped:
            raise
        task.uncancel()
        raise stopped[0] from None
    if stopped:
        task.uncancel()
    return result, stopped[0] if stopped else None


@types.coroutine
def stepping(work: Coroutine[Any, Any, T], at_suspension: Callable[[], None]) -> Generator[Any, Any, T]:
    """``await work``, calling ``at_suspension`` each time before control goes to the event loop."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            waited_for = work.send(value) if error is None else work.throw(error)
        except StopIteration as done:
            result: T = done.value
            return result
        at_suspension()
        value, error = None, None
        try:
            value = yield waited_for
        except BaseException as raised:  # noqa: BLE001  (handed on to the work)
            error = raised


def flipped(content: bytes | memoryview, offset: int) -> bytearray:
    changed = bytearray(content)
    changed[offset] ^= 1
    return changed
