"""Folding beside training: the mover makes the bases that are due of what lies in the first tier.

A fold reads a base and the differentials after it, verified, and publishes the next base beside them. Nothing is
deleted for it, so that a crash at any point costs the work and no version. If its outcome might not be exact, folding
is given up for good, and the recorder captures the bases that are due.
"""

from __future__ import annotations

import asyncio
import logging

from tiercheck.errors import AlreadyExists, Corruption, NotFound, TierCheckError
from tiercheck.format import container
from tiercheck.format.container import Shard
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold, gap_after, next_fold, waiting
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import own_bases
from tiercheck.replication.observer import Observer
from tiercheck.runtime.waiting import settled
from tiercheck.streams.state import FoldShards, InDoubt, NotExact, StateCapture
from tiercheck.tiers.driver import Reservation
from tiercheck.types import PutMode

__all__ = ["FOLDING", "Folder"]

log = logging.getLogger(__name__)

FOLDING = "folding"


class _BrokenOff(Exception):
    """Nobody waits for the fold any more."""


class Folder:
    """Folds one rank's bases in ``tier``, the first one, each ``interval`` versions, by ``shards``."""

    def __init__(self, shards: FoldShards, tier: OpenTier, observer: Observer, *, interval: int) -> None:
        self.folded_bases = 0
        self._shards = shards
        self._tier = tier
        self._observer = observer
        self._interval = interval
        self._given_up = ""
        self._in_doubt: tuple[int, str] = -1, ""
        """A version that cannot be folded, and why; a base of that version or a later one ends it."""

    def next(self, seen: Observation) -> Fold | None:
        """What to fold now."""
        return None if self._refused(seen) else next_fold(seen, self._interval)

    def waiting(self, seen: Observation) -> int:
        """The number of bases that are due, not there yet, and to be folded."""
        return 0 if self._refused(seen) else waiting(seen, self._interval)

    def obstacle(self, seen: Observation) -> str:
        """Why what is due cannot be folded; empty if it can."""
        if refused := self._refused(seen):
            return refused
        gap = gap_after(seen)
        return "" if gap is None else f"the differential after version {gap} is not in the first tier"

    async def fold(self, fold: Fold) -> None:
        """Make the base. Errors: ``TierError``, such as for lack of room; it is tried again."""
        shards: list[Shard] = []
        for key in (fold.base, *fold.differentials):
            shard = await self._verified(key)
            if shard is None:
                return  # the next look does without it
            shards.append(shard)
        broken_off = False

        def check() -> None:
            if broken_off:
                raise _BrokenOff

        def stop(task: asyncio.Future[StateCapture]) -> None:
            nonlocal broken_off
            broken_off = True

        def replay() -> StateCapture:
            return self._shards(shards[0], shards[1:], tier=self._tier.name, check=check)

        try:
            base = await settled(asyncio.to_thread(replay), stop=stop)
        except InDoubt as doubt:
            self._in_doubt = fold.target.last, str(doubt)
            return
        except NotExact as doubt:
            self._given_up = str(doubt)
            log.warning("bases are captured from here on, and not folded: %s", doubt)
            return
        reservation = await self._tier.driver.reserve(str(fold.target), base.nbytes_max)
        try:
            nbytes = await settled(asyncio.to_thread(_write, base, reservation))
            info = await reservation.publish(nbytes, mode=PutMode.CREATE)
        except AlreadyExists:  # captured meanwhile
            return
        finally:
            await _drop(reservation)
        self._observer.put(self._tier.index, fold.target, info.nbytes)
        self.folded_bases += 1

    def _refused(self, seen: Observation) -> str:
        version, why = self._in_doubt
        bases = own_bases(seen, seen.contents[0])
        return self._given_up or ("" if bases and bases[-1].last >= version else why)

    async def _verified(self, key: ShardKey) -> Shard | None:
        """The shard, every byte of it verified; ``None`` if it is damaged or gone."""
        try:
            content = await self._tier.driver.get(str(key))
            shard = container.parse(content, key=str(key), tier=self._tier.name)
            await settled(asyncio.to_thread(shard.verify))
            return shard
        except NotFound:
            self._observer.gone(self._tier.index, [key])
        except Corruption as error:
            self._observer.found_damaged(self._tier.index, key)
            log.error("%s; it is not folded", error)
        return None


async def _drop(reservation: Reservation) -> None:
    """A published one is none any more. An error here must not hide what has ended the fold."""
    try:
        await reservation.drop()
    except TierCheckError as error:
        log.warning("dropping the memory of a fold: %s", error)


def _write(base: StateCapture, reservation: Reservation) -> int:
    base.copy(reservation.buffer)
    return base.finish()
