"""A quick check of any open driver, without pytest: is the tier at this URL what its capabilities say?

The conformance kit certifies a driver's code on an empty tier. These checks look at one tier as it is today, in
seconds and under a prefix of their own, so that ``tiercheck doctor`` can try a tier that a job is using. Both clients
are this process's and take turns, so what they see of conditions and of whole objects is no proof for two processes:
that is the kit's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tiercheck.errors import AlreadyExists, Closed, NotFound, PreconditionFailed, TierCheckError, Unsupported
from tiercheck.testing.scratch import Scratch
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import ByteRange, ObjectInfo, PutMode, Survives

__all__ = ["CHECKS", "Broken", "Check", "check_tier"]

log = logging.getLogger(__name__)

LARGE_NBYTES = 9 << 20
"""More than most drivers' part, and little enough for any tier."""
CHECK_S = 60.0
"""What a single check may take."""
LATE_S = 10.0
"""What a check may take after one that was not done in time: a tier that hangs is known to by then."""


class Broken(Exception):
    """The tier did not do what its driver says; the message says what was asked, and what came back."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check. ``message`` says what was seen, or what went wrong. ``error``: the class of the tier's
    error that ended it, if one did."""

    name: str
    passed: bool
    message: str
    seconds: float
    error: str = ""
    late: bool = False
    """It was not done in time."""


@dataclass(frozen=True)
class CheckContext:
    """What a check works with: two open clients of one tier, and a prefix of its own, which ends in ``/``."""

    driver: TierDriver
    second: TierDriver
    prefix: str

    def key(self, name: str) -> str:
        return self.prefix + name

    async def content(self, client: TierDriver, name: str) -> bytes | None:
        try:
            return bytes(await client.get(self.key(name)))
        except NotFound:
            return None

    async def expect(self, client: TierDriver, name: str, content: bytes | None, when: str) -> None:
        found = await self.content(client, name)
        if found != content:
            raise Broken(f"{when} {told(content)} should be there, and {told(found)} is")


def told(content: bytes | None) -> str:
    return "no object" if content is None else f"an object of {len(content)} bytes ({content[:12]!r}...)"


async def refused(call: Awaitable[object], error: type[Exception], what: str) -> None:
    """``call`` must raise ``error``; a foreign exception goes on."""
    try:
        await call
    except error:
        return
    except TierCheckError as other:
        raise Broken(f"{what} should raise {error.__name__}, not {type(other).__name__}: {other}") from other
    raise Broken(f"{what} should raise {error.__name__}, and it was done")


async def check_round_trip(context: CheckContext) -> str:
    driver = context.driver
    large = random.Random(7).randbytes(LARGE_NBYTES)
    for name, payload in (("empty", []), ("one", [b"x"]), ("large", [large[:1], large[1:4097], large[4097:]])):
        expected = b"".join(payload)
        info = await driver.put(context.key(name), payload)
        if (info.key, info.nbytes) != (context.key(name), len(expected)):
            raise Broken(f"a put of {len(expected)} bytes reported {info}")
        if await driver.stat(context.key(name)) != info:
            raise Broken(f"stat after the put disagrees with it: {await driver.stat(context.key(name))} and {info}")
        await context.expect(driver, name, expected, "after the put")
    into = bytearray(LARGE_NBYTES)
    await driver.get(context.key("large"), into=memoryview(into))
    if into != large:
        raise Broken("an object read into a buffer differs from what was put")
    return f"0, 1 and {LARGE_NBYTES} bytes came back as they were"


async def check_second_client(context: CheckContext) -> str:
    await context.driver.put(context.key("seen"), [b"by both"])
    found = await context.content(context.second, "seen")
    if found == b"by both":
        return "what one client puts another reads"
    if context.driver.capabilities.survives is Survives.NOTHING:
        return "another client sees nothing of it: the tier belongs to the driver that opened it"
    raise Broken(f"a second client of the same URL finds {told(found)} where the first has put 7 bytes")


async def check_ranges(context: CheckContext) -> str:
    driver, key = context.driver, context.key("digits")
    await driver.put(key, [b"0123456789"])
    if not driver.capabilities.ranged_get:
        await refused(driver.get(key, range=ByteRange(0, 1)), Unsupported, "a ranged get (ranged_get is false)")
        return "refused, as the capabilities say"
    for start, stop in ((0, 10), (3, 7), (9, 10), (5, 5)):
        found = bytes(await driver.get(key, range=ByteRange(start, stop)))
        if found != b"0123456789"[start:stop]:
            raise Broken(f"the bytes [{start}, {stop}) of 0123456789 came back as {found!r}")
    await refused(driver.get(key, range=ByteRange(5, 11)), ValueError, "a range past the object's end")
    return "the bytes asked for, and no others"


async def check_listing(context: CheckContext) -> str:
    names = ["list/a-b", "list/a/b", "list/a0", "list/b/c", "list/é"]
    for name in reversed(names):
        await context.driver.put(context.key(name), [name.encode()])
    for prefix in ("list/", "list/a", "list/a/", "list/none"):
        found = [info.key async for info in context.driver.list(context.key(prefix))]
        expected = [context.key(name) for name in sorted(names, key=str.encode) if name.startswith(prefix)]
        if found != expected:
            raise Broken(f"the listing of {prefix!r} is {found}, not {expected}")
    return "complete, and in byte order"


async def check_deleting(context: CheckContext) -> str:
    keys = [context.key(name) for name in ("gone", "never")]
    await context.driver.put(keys[0], [b"x"])
    await context.driver.delete(keys)
    await context.expect(context.driver, "gone", None, "after the delete")
    await refused(context.driver.stat(keys[0]), NotFound, "stat of a deleted object")
    return "gone at once; a missing object is no error"


async def check_keys(context: CheckContext) -> str:
    for bad in ("/absolute", "a/../b", "nul\0", ""):
        await refused(context.driver.stat(bad), ValueError, f"the unsafe key {bad!r}")
    odd = "odd/é ü?#%2e=&+~"
    await context.driver.put(context.key(odd), [b"odd"])
    await context.expect(context.driver, odd, b"odd", "under an odd but safe key")
    return "unsafe ones are refused, odd ones taken as they are"


async def check_conditions(context: CheckContext) -> str:
    driver, key = context.driver, context.key("conditional")
    if not driver.capabilities.conditional_put:
        await refused(driver.put(key, [b"x"], mode=PutMode.CREATE), Unsupported, "CREATE (conditional_put is false)")
        await context.expect(driver, "conditional", None, "after a refused CREATE")
        return "refused, as the capabilities say"
    results = await asyncio.gather(
        *(driver.put(key, [b"%d" % n], mode=PutMode.CREATE) for n in range(4)), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, AlreadyExists):
            raise result
    won = [n for n, result in enumerate(results) if isinstance(result, ObjectInfo)]
    if len(won) != 1:
        raise Broken(f"of 4 that CREATE one object at once 1 must win, and {len(won)} did")
    await context.expect(driver, "conditional", b"%d" % won[0], "after the race")
    first = await driver.stat(key)
    await driver.put(key, [b"second"], mode=PutMode.UPDATE(first.etag))
    stale = driver.put(key, [b"third"], mode=PutMode.UPDATE(first.etag))
    await refused(stale, PreconditionFailed, "UPDATE with an etag that is no longer the object's")
    await context.expect(driver, "conditional", b"second", "after a refused UPDATE")
    return "1 of 4 creators in this process won; a stale etag was refused"


async def check_whole_objects(context: CheckContext) -> str:
    """Readers of a second client while the first overwrites."""
    nbytes, rounds = 1 << 18, 8
    reader = context.driver if await context.content(context.second, "seen") is None else context.second
    await context.driver.put(context.key("whole"), [b"\0" * nbytes])

    async def write() -> None:
        for n in range(1, rounds):
            await context.driver.put(context.key("whole"), [bytes([n]) * (nbytes // 2), bytes([n]) * (nbytes // 2 + n)])

    writing = asyncio.create_task(write())
    reads = 0
    try:
        while not writing.done():
            found = await context.content(reader, "whole")
            reads += 1
            if not found or found != found[:1] * (nbytes + found[0]):
                raise Broken(f"while it was overwritten a reader saw neither the old nor the new: {told(found)}")
            for _ in range(reads % 3):  # out of step with the writer
                await asyncio.sleep(0)
        await writing
    finally:
        writing.cancel()
        await asyncio.wait({writing})
    return f"{reads} reads during {rounds - 1} overwrites from this process, each of one whole object"


async def check_reservations(context: CheckContext) -> str:
    driver, key = context.driver, context.key("reserved")
    if not driver.capabilities.mappable:
        await refused(driver.reserve(key, 8), Unsupported, "reserve (mappable is false)")
        return "refused, as the capabilities say"
    reservation = await driver.reserve(key, 8)
    reservation.buffer[:] = b"reserved"
    await context.expect(driver, "reserved", None, "before it is published")
    await reservation.publish(7)
    await context.expect(driver, "reserved", b"reserve", "once 7 bytes are published")
    dropped = await driver.reserve(context.key("dropped"), 8)
    await dropped.drop()
    await context.expect(driver, "dropped", None, "after the reservation was dropped")
    return "unseen until published; gone when dropped"


async def check_closed(context: CheckContext) -> str:
    """The last one: it closes the second client."""
    await context.second.close()
    await refused(context.second.stat(context.key("seen")), Closed, "a call after close")
    await context.expect(context.driver, "one", b"x", "after another client has closed")
    return "objects stay; calls are refused"


CHECKS: tuple[tuple[str, Callable[[CheckContext], Awaitable[str]]], ...] = (
    ("round trip", check_round_trip),
    ("second client", check_second_client),
    ("ranges", check_ranges),
    ("listing", check_listing),
    ("deleting", check_deleting),
    ("keys", check_keys),
    ("conditional puts", check_conditions),
    ("whole objects", check_whole_objects),
    ("reservations", check_reservations),
    ("closing", check_closed),
)
"""Each check's name, and what it does: it returns what it saw, and raises if the tier breaks its word."""


async def check_tier(scratch: Scratch, second: TierDriver, *, check_s: float = CHECK_S) -> tuple[Check, ...]:
    """Every check in turn, under ``scratch``. ``second`` is another client of the tier, not open; it is closed at the
    end. One check that fails, or takes longer than ``check_s``, does not keep the next from running; but after one that
    takes longer they have ``LATE_S`` at most.

    Errors: those of opening ``second``.
    """
    async with second:
        context = CheckContext(scratch.driver, second, scratch.prefix)
        checks: list[Check] = []
        for name, check in CHECKS:
            checks.append(await run(name, check, context, check_s))
            if checks[-1].late and check_s > LATE_S:
                check_s = LATE_S
                message = "%s: %s: %s; the checks that follow have %g s each"
                log.warning(message, scratch.driver.url, name, checks[-1].message, check_s)
        return tuple(checks)


async def run(
    name: str, check: Callable[[CheckContext], Awaitable[str]], context: CheckContext, check_s: float
) -> Check:
    began, kind, late = time.monotonic(), "", False
    try:
        async with asyncio.timeout(check_s) as deadline:
            message = await check(context)
    except Broken as error:
        passed, message = False, str(error)
    except TierCheckError as error:
        kind = type(error).__name__
        passed, message = False, f"{kind}: {error}"
    except Exception as error:  # noqa: BLE001  (a foreign exception at the driver's edge is what is reported)
        passed, late = False, isinstance(error, TimeoutError) and deadline.expired()
        foreign = f"a foreign {type(error).__name__} reached the caller: {error}"
        message = f"not done within {check_s:g} s" if late else foreign
    else:
        passed = True
    return Check(name, passed, message, time.monotonic() - began, kind, late)
