"""Another try for what failed but may pass: exponential waits with full jitter, bounded in number and in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tiercheck.errors import Closed, NotFound, TierError, Transient
from tiercheck.runtime.backoff import Backoff
from tiercheck.runtime.chance import CHANCE
from tiercheck.tiers.driver import Reservation, TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver, WrappingReservation, payload_bytes
from tiercheck.types import ByteRange, ObjectInfo, Payload, PutMode

__all__ = ["RetryPolicy", "RetryingDriver"]

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """At most ``attempts`` tries, none begun once ``deadline_s`` have passed since the first.

    Before try n + 1 (from n = 1) the wait is drawn evenly from 0 to ``wait_s * 2**(n - 1)``, or to ``wait_s_max``
    where that is less.

    """

    attempts: int = 6
    wait_s: float = 0.1
    wait_s_max: float = 10.0
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")
        for label in ("wait_s", "wait_s_max", "deadline_s"):
            if not 0 <= getattr(self, label) < float("inf"):
                raise ValueError(f"{label} must be finite and not negative, not {getattr(self, label)}")

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.wait_s, self.wait_s_max)


class RetryingDriver(WrappingDriver):
    """``driver``, with another try where it raises ``Transient``, and nothing else. Capabilities are its own.

    A listing goes on behind the last object that was handed out. A publish is repeated only while the reservation
    still has its memory, hence was not published.

    A conditional put is not blindly repeated, for the try that failed may have done its work, or may still do it.
    The tier is looked at first. If the condition still holds, the put is tried again. If the object is, byte
    for byte, what was to be put, that is the success it looks like; so a writer that must know whether *it* won puts
    something of its own into the content, such as its name. Otherwise nobody can tell whether the first try came to
    nothing, or was stored and then replaced: that stays ``Transient``. So does any put or publish that fails for good
    after a try of which that much is not known: ``CapacityExceeded`` and its like promise that nothing was changed.

    The last failure is raised as it came, with a note on the tries. ``uniform()`` gives 0..1; ``clock`` (s) and
    ``sleep`` (s) may be virtual.
    """

    def __init__(
        self,
        driver: TierDriver,
        policy: RetryPolicy | None = None,
        *,
        uniform: Callable[[], float] = CHANCE.random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(driver)
        self.policy = policy or RetryPolicy()
        self._uniform = uniform
        self._clock = clock
        self._sleep = sleep

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        if call.operation is Operation.CLOSE:
            return await work()
        tries = self.tries(call.operation)
        while True:
            try:
                return await work()
            except Transient as error:
                await tries.failed(error)
            except TierError as error:
                if call.operation is Operation.PUT:
                    tries.check_known(error)
                raise

    def tries(self, operation: Operation) -> _Tries:
        return _Tries(operation, self.policy, self._uniform, self._clock, self._sleep)

    async def put(self, key: str, payload: Payload, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        if not mode.conditional:
            return await super().put(key, payload, mode=mode)
        tries = self.tries(Operation.PUT)
        while True:
            try:
                return await self.inner.put(key, payload, mode=mode)
            except Transient as error:
                await tries.failed(error)
                if (done := await self._outcome(key, payload, mode, error)) is not None:
                    return done
            except TierError as error:
                tries.check_known(error)
                raise

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        tries = self.tries(Operation.LIST)
        last: bytes | None = None
        while True:
            try:
                async for item in self.inner.list(prefix):
                    order = item.key.encode()
                    if last is not None and order <= last:
                        continue
                    last = order
                    tries = self.tries(Operation.LIST)
                    yield item
            except Transient as error:
                await tries.failed(error)
            else:
                return

    async def reserve(self, key: str, nbytes: int) -> Reservation:
        reservation = await self.around(Call(Operation.RESERVE, key), lambda: self.inner.reserve(key, nbytes))
        return _RetryingReservation(self, reservation)

    async def _outcome(self, key: str, payload: Payload, mode: PutMode, error: Transient) -> ObjectInfo | None:
        """What a conditional put that failed has led to: the object it made, or ``None`` if it did nothing so far.

        Errors: ``error`` if another client's object is there, which may have replaced ours.
        """
        for _ in range(self.policy.attempts):
            try:
                found = await self.stat(key)
                if mode.kind == "update" and found.etag == mode.etag:
                    return None
                same = found.nbytes == payload_bytes(payload) and await self._holds(key, payload)
                # What was compared is what was found only if nobody has put another object meanwhile.
                if await self.stat(key) != found:
                    continue
            except NotFound:
                if mode.kind == "create":
                    return None
                break
            if same:
                return found
            break
        raise error

    async def _holds(self, key: str, payload: Payload) -> bool:
        """Whether the object's bytes are those of ``payload``, which is as long; read by the part if possible."""
        whole = None if self.capabilities.ranged_get else await self.get(key)
        step = self.capabilities.part_bytes
        at = 0
        for buffer in payload:
            for start in range(0, len(buffer), step):
                nbytes = min(step, len(buffer) - start)
                part = ByteRange(at, at + nbytes)
                try:
                    found = await self.get(key, range=part) if whole is None else whole[part.start : part.stop]
                except ValueError:  # another object, a shorter one, is there by now
                    return False
                with memoryview(buffer) as view, view[start : start + nbytes] as expected:
                    if found != expected:
                        return False
                at += nbytes
        return True


class _RetryingReservation(WrappingReservation):
    driver: RetryingDriver

    async def publish(self, nbytes: int | None = None, *, mode: PutMode = PutMode.OVERWRITE) -> ObjectInfo:
        tries = self.driver.tries(Operation.PUBLISH)
        while True:
            try:
                return await self.inner.publish(nbytes, mode=mode)
            except Transient as error:
                if not is_live(self.inner):
                    raise
                await tries.failed(error)
            except TierError as error:
                tries.check_known(error)
                raise


class _Tries:
    """The tries of one call."""

    def __init__(
        self,
        operation: Operation,
        policy: RetryPolicy,
        uniform: Callable[[], float],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        self._operation = operation
        self._policy = policy
        self._uniform = uniform
        self._clock = clock
        self._sleep = sleep
        self._start_s = clock()
        self._failures = 0
        self._unknown: TierError | None = None
        """The first failure that does not say what has become of the call."""

    async def failed(self, error: TierError) -> None:
        """Wait before another try, or raise ``error`` if there is none left."""
        self._failures += 1
        self._unknown = self._unknown or error
        wait_s = self._policy.backoff.pause_s(self._failures, self._uniform())
        passed_s = self._clock() - self._start_s
        late = passed_s + wait_s > self._policy.deadline_s
        if late or self._failures >= self._policy.attempts:
            error.add_note(f"{self._operation} was tried {self._failures} times in {passed_s:.1f} s")
            raise error
        await self._sleep(wait_s)

    def check_known(self, error: TierError) -> None:
        """Errors: ``Transient`` if ``error``, which ends the call, cannot speak for a try before it."""
        if self._unknown is not None:
            raise Transient(
                f"an earlier try may have stored it ({self._unknown.message}), the last one failed: {error.message}",
                tier=error.tier,
                key=error.key,
            ) from error


def is_live(reservation: Reservation) -> bool:
    """Whether the reservation still has its memory: it is neither published nor dropped."""
    try:
        return reservation.buffer is not None
    except (RuntimeError, Closed):
        return False
