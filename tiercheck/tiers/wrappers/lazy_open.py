"""A tier whose store may be away when it is opened: a neighbour that has failed, a server that is down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from tiercheck.errors import Closed, ConfigurationError, NothingListens, TierError, Transient
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import Call, Operation, WrappingDriver
from tiercheck.tiers.wrappers.faults import faults_as_errors

__all__ = ["CallsUnderWay", "LazyOpenDriver"]

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S = 5.0
"""How long opening waits for the store, unless it is told otherwise."""
CALL_S = 0.5
"""How long a call to a tier that is not open yet waits for that."""
CLOSE_S_MAX = 10.0


class CallsUnderWay:
    """What is asked of some tiers just now: for the errors of those who wait for its end."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[str, float]] = {}
        self._count = 0

    @contextlib.contextmanager
    def noted(self, tier: str, call: Call) -> Iterator[None]:
        """Inside, ``call`` is under way."""
        self._count += 1
        number = self._count
        what = f"{tier}: {call.operation}" + (f" of {call.key}" if call.key else "")
        self._calls[number] = what, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._calls[number]

    def __str__(self) -> str:
        now = asyncio.get_running_loop().time()
        return "; ".join(f"{what}, for {now - since:.1f} s" for what, since in self._calls.values())


class LazyOpenDriver(WrappingDriver):
    """Opens whether ``inner`` can be opened or not; then each call tries to open it first, and fails where that fails.

    So a mover goes on with the tiers that are there, and takes the others for tiers in trouble, as they are. Until it
    is open its capabilities are those that ``inner`` hopes for. Errors of every call: also ``Transient`` while
    the store does not answer, and ``TierError`` for what ``inner`` raises that is no ``Exception``;
    ``ConfigurationError`` from opening alone, for what no patience mends.
    """

    def __init__(self, inner: TierDriver, *, calls: CallsUnderWay | None = None, open_s: float | None = None) -> None:
        """``open_s``: how long opening waits for the store."""
        super().__init__(inner)
        self._calls = calls or CallsUnderWay()
        self._open_s = open_s
        self._wanted = False
        """Somebody has opened this one, and not closed it."""
        self._open = False
        """``inner`` is open."""
        self._opening: asyncio.Future[None] | None = None
        self._failed: TierError | None = None
        """What the last attempt to open ``inner`` has met."""

    def facts(self) -> Mapping[str, str]:
        """Those of ``inner``; ``trouble`` also says what the last attempt to open it has met, until one succeeds."""
        trouble = {"trouble": self._failed.message} if self._failed and not self._open else {}
        return {**trouble, **self.inner.facts()}

    async def around(self, call: Call, work: Callable[[], Awaitable[T]]) -> T:
        if call.operation is Operation.OPEN:
            return cast(T, await self._begin())
        if call.operation is Operation.CLOSE:
            return cast(T, await self._end())
        if not self._wanted:
            return await work()  # which says that the driver is not open
        try:
            await self._reach(CALL_S)
        except ConfigurationError as error:
            raise Transient(str(error), tier=self.url) from error
        with self._calls.noted(self.url, call), faults_as_errors(self.url, call):
            return await work()

    async def _begin(self) -> None:
        if self._wanted:
            raise RuntimeError(f"{self.url} is open already")
        try:
            await self._reach(OPEN_S if self._open_s is None else self._open_s)
        except TierError as error:
            log.warning("%s; it is tried again with each use", error)
        self._wanted = True

    async def _end(self) -> None:
        self._wanted = False
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening], timeout=CLOSE_S_MAX)
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                self._open = True
        if self._open:
            self._open = False
            with faults_as_errors(self.url, Call(Operation.CLOSE)):
                await self.inner.close()

    async def _open_inner(self) -> None:
        with faults_as_errors(self.url, Call(Operation.OPEN)):
            await self.inner.open()

    async def _reach(self, wait_s: float) -> None:
        """Have ``inner`` open. One attempt goes on while callers come and go."""
        if self._open:
            return
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open_inner())
            self._opening.add_done_callback(_retrieve)
        opening = self._opening
        await asyncio.wait([opening], timeout=wait_s)
        if not opening.done():
            trouble = self.facts().get("trouble")
            if isinstance(self._failed, NothingListens):
                raise NothingListens(self._failed.message, tier=self.url)
            raise Transient("the store has not answered yet" + (f": {trouble}" if trouble else ""), tier=self.url)
        if self._opening is opening:
            self._opening = None
        if opening.cancelled():
            raise Closed("the driver was closed while it opened", tier=self.url)
        try:
            opening.result()
        except TierError as error:
            self._failed = error
            raise
        self._open, self._failed = True, None


def _retrieve(opening: asyncio.Future[Any]) -> None:
    """An attempt that fails while nobody waits for it is no surprise: the next call makes another."""
    with contextlib.suppress(asyncio.CancelledError):
        opening.exception()
