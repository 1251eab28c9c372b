"""Folding beside training: of what lies in the first tier, the mover makes the bases that the trainer leaves to it
and, in between, bases for the first tier alone.

A fold reads a base and the differentials after it, verified, and publishes the next base beside them. Nothing is
deleted for it, so that a crash at any point costs the work and no version. If its outcome might not be exact, folding
is given up for good, and the recorder captures the bases that are due.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

from tiercheck.errors import AlreadyExists, Corruption, NotFound, TierCheckError, TierError
from tiercheck.format import container
from tiercheck.format.container import Shard
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import Fold, gap_after, lag, next_fold, waiting
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Placement, own_bases
from tiercheck.replication.observer import Observer
from tiercheck.runtime.waiting import settled
from tiercheck.streams.doubts import NAMES_MAX, listed
from tiercheck.streams.state import FoldShards, InDoubt, NotExact, StateCapture
from tiercheck.tiers.driver import Reservation
from tiercheck.types import PutMode

__all__ = ["FOLDING", "Folder"]

log = logging.getLogger(__name__)

T = TypeVar("T")

FOLDING = "folding"
PREPARING = "folding is still being prepared (torch is imported, a kernel is certified)"


class _BrokenOff(Exception):
    """Nobody waits for the fold any more."""


class Folder:
    """Folds one rank's bases in ``tier``, the first one, by ``shards``."""

    def __init__(self, shards: FoldShards, tier: OpenTier, observer: Observer, placement: Placement) -> None:
        self.folded_bases = 0
        self.taken = -1
        """The newest version whose base is left to be folded."""
        self.audited_bases = 0
        """Of those, how many were compared with what training had."""
        self._differing: tuple[int | None, tuple[str, ...]] = None, ()
        """The newest version that differed from it, and in what."""
        self._shards = shards
        self._tier = tier
        self._observer = observer
        self._placement = placement
        self._due: Collection[int] = ()
        """The versions whose bases were left to be folded, as far as they matter."""
        self._given_up = ""
        self._prepared = False
        self._in_doubt: tuple[int, str] = -1, ""
        """A version that cannot be folded, and why; a base of that version or a later one ends it."""

    def take(self, due: Collection[int], seen: Observation) -> None:
        """The trainer leaves the bases of these versions to be folded: it captures them itself unless :attr:`taken`
        says so. They are told again with the next one, so that a mover that was started anew learns of them."""
        if not self.obstacle(seen) and not self.waiting(seen):
            self._due, self.taken = tuple(due), max(due)

    def next(self, seen: Observation) -> Fold | None:
        """What to fold now."""
        if self._refused(seen):
            return None
        every = 0 if self.obstacle(seen) else self._placement.fold_every
        return next_fold(seen, self._due, every, self._placement.interval)

    def waiting(self, seen: Observation) -> list[int]:
        """The versions of the bases that are left to be folded, and are not there yet, if they can be. Oldest first."""
        return [] if self.obstacle(seen) else waiting(seen, self._due)

    def lag(self, seen: Observation) -> int:
        """See :func:`tiercheck.policy.folding.lag`."""
        return 0 if self.obstacle(seen) else lag(seen, self._due)

    def obstacle(self, seen: Observation) -> str:
        """Why what is due cannot be folded; empty if it can."""
        if refused := self._refused(seen):
            return refused
        if not self._prepared:
            return PREPARING
        gap = gap_after(seen)
        return "" if gap is None else f"the differential after version {gap} is not in the first tier"

    @property
    def preparing(self) -> bool:
        return not (self._prepared or self._given_up)

    def noted(self, seen: Observation) -> dict[str, Any]:
        """What :class:`~tiercheck.replication.handle.MoverStatus` says of it."""
        obstacle = self.obstacle(seen)
        return {
            "folded_bases": self.folded_bases,
            "audited_bases": self.audited_bases,
            "differing_version": self._differing[0],
            "differing": self._differing[1],
            "unfolded_bases": len(self.waiting(seen)),
            "fold_lag_versions": self.lag(seen),
            "folds_to": self.taken,
            "folds": not obstacle,
            "not_folded": obstacle,
        }

    def base(self, seen: Observation) -> ShardKey | None:
        """The newest base of the generation."""
        bases = own_bases(seen, seen.contents[0])
        return bases[-1] if bases else None

    async def prepare(self, seen: Observation) -> None:
        """Make ready what folds, ahead of the first fold, when the generation has a base. That is not waited for if the
        mover ends."""
        key = self.base(seen)
        try:
            if key is not None and (base := await self._shard(key)) is not None:
                await self._beside(partial(self._shards.prepare, base))
        except NotExact as doubt:
            self._give_up(doubt)
        except TierError as error:  # the first fold does it, or finds it damaged
            log.info("folding is not prepared ahead of the first fold: %s", error)
        except Exception as error:  # noqa: BLE001  (bases can be captured; what cannot be folded must not end the mover)
            self._give_up(NotExact(f"what folds could not be made ready: {type(error).__name__}: {error}"))
        self._prepared = True

    def _give_up(self, doubt: NotExact) -> None:
        self._given_up = str(doubt)
        log.warning("bases are captured from here on, and not folded: %s", doubt)

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
            base = await settled(self._beside(replay), stop=stop)
        except InDoubt as doubt:
            self._in_doubt = fold.version, str(doubt)
            return
        except NotExact as doubt:
            self._give_up(doubt)
            return
        await self._observer.refresh_nearby()
        if self._newest_base(self._observer.seen()) >= fold.version:  # captured meanwhile, or a newer one
            return
        reservation = await self._tier.driver.reserve(str(base.key), base.nbytes_max)
        try:
            nbytes = await settled(self._beside(partial(_write, base, reservation)))
            if base.unexpected:
                self._differs(fold, base.unexpected)
                return
            info = await reservation.publish(nbytes, mode=PutMode.CREATE)
        except AlreadyExists:
            return
        finally:
            await _drop(reservation)
        self._observer.put(self._tier.index, base.key, info.nbytes)
        self.folded_bases += 1
        self.audited_bases += base.audited

    def _differs(self, fold: Fold, names: tuple[str, ...]) -> None:
        """What differs from what training had is no base of it: one is captured."""
        version, names = fold.version, names[:NAMES_MAX]
        why = f"what was folded for version {version} differs from what training had in {listed(names)}"
        self._differing, self._in_doubt = (version, names), (version, why)
        self._observer.differing = version
        log.error(
            "%s: something has written there in a way that torch does not count (through .data, perhaps), or memory or "
            "arithmetic has failed, in the job or here. A base is captured. Versions before it may lack the difference",
            why,
        )

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._shards.executor, work)

    def _refused(self, seen: Observation) -> str:
        version, why = self._in_doubt
        return self._given_up or ("" if self._newest_base(seen) >= version else why)

    def _newest_base(self, seen: Observation) -> int:
        """Its version; -1 if there is none."""
        base = self.base(seen)
        return -1 if base is None else base.last

    async def _verified(self, key: ShardKey) -> Shard | None:
        """The shard, every byte of it verified; ``None`` if it is damaged or gone."""
        return await self._shard(key, verified=True)

    async def _shard(self, key: ShardKey, *, verified: bool = False) -> Shard | None:
        try:
            content = await self._tier.driver.get(str(key))
            shard = container.parse(content, key=str(key), tier=self._tier.name)
            if verified:
                await settled(self._beside(shard.verify))
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
