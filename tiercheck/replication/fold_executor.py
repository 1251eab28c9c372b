"""Making one base: of a base and the differentials after it, in the first tier, in whichever process folds.

:class:`LocalFoldExecutor` does it in the process that calls it. A process of its own for the folds runs the same code
on a first tier that it has opened itself (:mod:`tiercheck.folding`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from tiercheck.errors import AlreadyExists, Corruption, NotFound, TierCheckError, TierError, Transient
from tiercheck.format import container
from tiercheck.format.container import Shard
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold
from tiercheck.runtime.waiting import settled
from tiercheck.streams.doubts import NAMES_MAX
from tiercheck.streams.errors import InDoubt, NotExact
from tiercheck.streams.state import FoldShards, StateCapture
from tiercheck.tiers.driver import Reservation
from tiercheck.types import PutMode

__all__ = [
    "Damaged",
    "Differs",
    "FoldExecutor",
    "Gone",
    "LocalFoldExecutor",
    "Made",
    "Outcome",
    "Ready",
    "Refused",
    "Superfluous",
    "Wanted",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Ready(Struct, frozen=True, tag=True):
    """What folds is made ready."""


class Made(Struct, frozen=True, tag=True):
    """The base is in the first tier."""

    key: str
    nbytes: int
    audited: bool
    """It was compared with what training had."""


class Superfluous(Struct, frozen=True, tag=True):
    """A base of that version or a newer one is there."""


class Gone(Struct, frozen=True, tag=True):
    """An object that the fold needs is not there any more."""

    key: str


class Damaged(Struct, frozen=True, tag=True):
    """An object that the fold needs is damaged."""

    key: str
    why: str


class Refused(Struct, frozen=True, tag=True):
    """The base might not be what training had. Nothing was published."""

    why: str
    until_captured: bool
    """A captured base ends it: else no base is folded any more."""


class Differs(Struct, frozen=True, tag=True):
    """The base differs from what training had. Nothing was published."""

    names: tuple[str, ...]


Outcome = Ready | Made | Superfluous | Gone | Damaged | Refused | Differs
Wanted = Callable[[], Awaitable[bool]]
"""Asked before room is reserved, and again right before the base is published: whether whoever folds wants it still."""


class FoldExecutor(Protocol):
    """Makes bases in one rank's first tier."""

    @property
    def where(self) -> str:
        """The process, for messages."""
        ...

    async def prepare(self, base: ShardKey) -> Outcome:
        """Make ready what folds bases like this one. Errors: ``TierError``."""
        ...

    async def fold(self, fold: Fold, wanted: Wanted) -> Outcome:
        """Publish the base as one object, or nothing. Nothing is published any more when a cancelled call has returned.
        Errors: ``TierError``, such as for lack of room; it may be tried again."""
        ...


class _BrokenOff(Exception):
    """Nobody waits for the fold any more."""


class _Unreadable(Exception):
    def __init__(self, outcome: Gone | Damaged) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class LocalFoldExecutor:
    """Folds in this process, on the threads of ``executor``; ``None``: on those of the event loop."""

    where = "this process"

    def __init__(self, shards: FoldShards, tier: OpenTier, executor: Executor | None = None) -> None:
        self._shards = shards
        self._tier = tier
        self._executor = executor

    async def prepare(self, base: ShardKey) -> Outcome:
        """That is not waited for if the caller is cancelled."""
        try:
            await self._beside(partial(self._shards.prepare, await self._shard(base)))
        except _Unreadable as error:
            return error.outcome
        except NotExact as doubt:
            return Refused(str(doubt), until_captured=False)
        except TierError:
            raise
        except MemoryError as error:
            raise self._too_little(base, error) from error
        except Exception as error:  # noqa: BLE001  (bases can be captured; what cannot be folded must not end the mover)
            why = (
                f"what folds bases such as {base} of {self._tier} could not be made ready in {self.where}: "
                f"{type(error).__name__}: {error}; see that the optimizer and its library can be imported and run there"
            )
            return Refused(why, until_captured=False)
        return Ready()

    async def fold(self, fold: Fold, wanted: Wanted) -> Outcome:
        try:
            return await self._folded(fold, wanted)
        except _Unreadable as error:
            return error.outcome
        except NotExact as doubt:
            return Refused(str(doubt), until_captured=isinstance(doubt, InDoubt))
        except MemoryError as error:
            raise self._too_little(fold.base, error) from error

    async def _folded(self, fold: Fold, wanted: Wanted) -> Outcome:
        """Errors: ``_Unreadable``; ``NotExact``; ``MemoryError``; ``TierError``."""
        broken_off = False

        def check() -> None:
            if broken_off:
                raise _BrokenOff

        def stop(task: asyncio.Future[Any]) -> None:
            nonlocal broken_off
            broken_off = True

        base = await self._begun(fold, check, stop)
        if not await wanted():
            return Superfluous()
        reservation = await self._tier.driver.reserve(str(base.key), base.nbytes_max)
        try:
            nbytes = await settled(self._beside(partial(_write, base, reservation)), stop=stop)
            if base.unexpected:
                return Differs(base.unexpected[:NAMES_MAX])
            if not await wanted():
                return Superfluous()
            info = await reservation.publish(nbytes, mode=PutMode.CREATE)
        except AlreadyExists:
            return Superfluous()
        finally:
            await settled(_drop(reservation))
        return Made(str(base.key), info.nbytes, base.audited)

    async def _begun(
        self, fold: Fold, check: Callable[[], None], stop: Callable[[asyncio.Future[Any]], None]
    ) -> StateCapture:
        """Of shards that were verified. ``stop`` is called if nobody waits any more, and ``check`` raises then."""
        shards = [await self._verified(key) for key in (fold.base, *fold.differentials)]
        made = partial(self._shards, shards[0], shards[1:], tier=self._tier.name, check=check)
        return await settled(self._beside(made), stop=stop)

    def _too_little(self, base: ShardKey, error: MemoryError) -> Transient:
        why = f"{self.where} has too little memory to fold: {error}"
        what_to_do = "free memory, or let fewer folds run at a time (--fold-threads, TIERCHECK_FOLD_THREADS)"
        return Transient(f"{why}; {what_to_do}", tier=self._tier.name, key=str(base))

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _verified(self, key: ShardKey) -> Shard:
        """Every byte of it. Errors: ``_Unreadable``; ``TierError``."""
        shard = await self._shard(key)
        try:
            await settled(self._beside(shard.verify))
        except Corruption as error:
            raise _Unreadable(Damaged(str(key), str(error))) from error
        return shard

    async def _shard(self, key: ShardKey) -> Shard:
        try:
            return container.parse(await self._tier.driver.get(str(key)), key=str(key), tier=self._tier.name)
        except NotFound as error:
            raise _Unreadable(Gone(str(key))) from error
        except Corruption as error:
            raise _Unreadable(Damaged(str(key), str(error))) from error


async def _drop(reservation: Reservation) -> None:
    """A published one is none any more. An error here must not hide what has ended the fold."""
    try:
        await reservation.drop()
    except TierCheckError as error:
        log.warning("the memory that a fold had reserved is free only when the process that folds ends: %s", error)


def _write(base: StateCapture, reservation: Reservation) -> int:
    base.copy(reservation.buffer)
    return base.finish()
