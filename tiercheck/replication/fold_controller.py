"""Folding beside training: of what lies in the first tier, the mover makes the bases that the trainer leaves to it
and, in between, bases for the first tier alone.

A fold reads a base and the differentials after it, verified, and publishes the next base beside them. Nothing is
deleted for it, so that a crash at any point costs the work and no version. If its outcome might not be exact, folding
is given up for good, and the recorder captures the bases that are due.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from tiercheck.errors import TierError
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey, Stream, parse
from tiercheck.policy.commit import superseded
from tiercheck.policy.damage import base_without_constants
from tiercheck.policy.folding import Fold, gap_after, lag, newest_usable, next_fold, waiting
from tiercheck.policy.observation import Observation
from tiercheck.policy.placement import Placement, own_bases, own_differentials
from tiercheck.replication.backoff import ProcessEnds, SourceError
from tiercheck.replication.fold_executor import (
    Damaged,
    Differs,
    FoldExecutor,
    Gone,
    Made,
    Outcome,
    Refused,
    Superfluous,
)
from tiercheck.replication.handle import MoverStatus
from tiercheck.replication.observer import Observer
from tiercheck.runtime.shutdown import process_ends
from tiercheck.streams.doubts import listed

__all__ = ["FOLDING", "FoldController"]

log = logging.getLogger(__name__)

FOLDING = "folding"
PREPARING = "folding is still being prepared (torch is imported, a kernel is certified)"


class FoldController:
    """Has one rank's bases folded in ``tier``, the first one."""

    def __init__(self, folds: FoldExecutor, tier: OpenTier, observer: Observer, placement: Placement) -> None:
        self.folded_bases = 0
        self.taken = -1
        """The newest version whose base is left to be folded."""
        self.audited_bases = 0
        """Of those, how many were compared with what training had."""
        self._differing: tuple[int | None, tuple[str, ...]] = None, ()
        """The newest version that differed from it, and in what."""
        self._folds = folds
        self._tier = tier
        self._observer = observer
        self._placement = placement
        self._due: Collection[int] = ()
        """The versions whose bases were left to be folded, as far as they matter."""
        self._given_up = ""
        self._prepared = False
        self._in_doubt: tuple[int, str] = -1, ""
        """A version that cannot be folded, and why; a base of that version or a later one ends it."""
        self.skipped_folds = 0
        self._blocked: set[int] = set()
        """Versions that are not folded: something unusable lies in the base's place. It was said of each."""
        self._missing: set[str] = set()
        """What was listed, and was not there."""

    def take(self, due: Collection[int], seen: Observation) -> None:
        """The trainer leaves the bases of these versions to be folded: it captures them itself unless :attr:`taken`
        says so. They are told again with the next one, so that a mover that was started anew learns of them."""
        if not self.obstacle(seen) and not self.waiting(seen):
            self._due, self.taken = tuple(due), max(due)

    def next(self, seen: Observation) -> Fold | None:
        """What to fold now."""
        if self._refused(seen):
            return None
        self._block(self._blocked_in(seen))
        every = 0 if self.obstacle(seen) else self._placement.fold_every
        return next_fold(seen, self._due, every, self._placement.interval, self._blocked_in(seen))

    def waiting(self, seen: Observation) -> list[int]:
        """The versions of the bases that are left to be folded, and are not there yet, if they can be. Oldest first."""
        return [] if self.obstacle(seen) else waiting(seen, self._due, self._blocked_in(seen))

    def obstacle(self, seen: Observation) -> str:
        """Why what is due cannot be folded; empty if it can."""
        if refused := self._refused(seen):
            return refused
        if not self._prepared:
            return PREPARING
        if base_without_constants(seen) is not None:
            return "the newest base in the first tier lacks its constants (what does not change and is stored once)"
        gap = gap_after(seen)
        return "" if gap is None else f"the differential after version {gap} is not in the first tier"

    def awaited(self, status: MoverStatus) -> str:
        """What training waits for, in words; empty if it is no fold."""
        if self.preparing:
            return f"{PREPARING} in {self._folds.where}"
        if not status.unfolded_bases:
            return ""
        return f"{status.fold_lag}; {self._folds.where} folds it"

    @property
    def state(self) -> object:
        """All that :meth:`next` rests on besides what was seen."""
        return tuple(self._due), self._prepared, self._given_up, self._in_doubt, frozenset(self._blocked)

    @property
    def preparing(self) -> bool:
        return not (self._prepared or self._given_up)

    def noted(self, seen: Observation) -> dict[str, Any]:
        """What :class:`~tiercheck.replication.handle.MoverStatus` says of it."""
        obstacle = self.obstacle(seen)
        due, blocked = ((), ()) if obstacle else (self._due, self._blocked_in(seen))
        return {
            "folded_bases": self.folded_bases,
            "audited_bases": self.audited_bases,
            "differing_version": self._differing[0],
            "differing": self._differing[1],
            "skipped_folds": self.skipped_folds,
            "unfolded_bases": len(waiting(seen, due, blocked)),
            "fold_lag_versions": lag(seen, due, blocked),
            "folds_to": self.taken,
            "folds": not obstacle,
            "prepares_folding": self.preparing,
            "not_folded": obstacle,
        }

    def base(self, seen: Observation) -> ShardKey | None:
        """The newest base of the generation."""
        bases = own_bases(seen, seen.contents[0])
        return bases[-1] if bases else None

    def begun(self, seen: Observation) -> bool:
        """Whether the generation has a base and, after it, a version that was trained."""
        base = self.base(seen)
        return base is not None and any(key.last > base.last for key in own_differentials(seen, seen.contents[0]))

    async def prepare(self, seen: Observation) -> None:
        """Make ready what folds, ahead of the first fold, when the generation has a base. That is not waited for if the
        mover ends."""
        tried: set[ShardKey] = set()
        while (key := self.base(seen)) is not None and key not in tried:
            tried.add(key)
            try:
                outcome = await self._folds.prepare(key)
                self._note(outcome)
                if not isinstance(outcome, Gone):
                    break
                await self._observer.refresh(self._tier)  # a newer base was captured meanwhile
                seen = self._observer.seen()
            except TierError as error:  # the first fold does it, or finds what is the matter
                log.info("folding is not prepared ahead of the first fold: %s", error)
            except Exception as error:
                if process_ends(error):
                    raise ProcessEnds("the process ends, and nothing can be folded any more") from error
                log.exception(
                    "folding is not prepared ahead of the first fold, which tries again: see that the process has "
                    "threads, open files and memory left (ulimit -u, ulimit -n)"
                )
        self._prepared = True

    async def fold(self, fold: Fold) -> None:
        """Make the base. Errors: ``TierError``, such as for lack of room; it is tried again."""

        async def wanted() -> bool:
            await self._observer.refresh_nearby()
            seen = self._observer.seen()
            captured_meanwhile = self._newest_base(seen) >= fold.version
            return superseded(seen) is None and not captured_meanwhile

        outcome = await self._folds.fold(fold, wanted)
        if isinstance(outcome, Gone):
            self._check_gone(outcome.key)
        self._note(outcome, fold)
        if isinstance(outcome, Superfluous):
            await self._observer.refresh_nearby()  # a base may have been captured since the fold asked
        seen = self._observer.seen()
        if isinstance(outcome, Superfluous) and newest_usable(seen) < fold.version and superseded(seen) is None:
            self._block({fold.version})  # a base lies there, and is none to go on from

    def _note(self, outcome: Outcome, fold: Fold | None = None) -> None:
        match outcome:
            case Gone(key):
                self._observer.gone(self._tier.index, [_key(key)])
            case Damaged(key, why):
                self._observer.found_damaged(self._tier.index, _key(key))
                log.error("%s; it is not folded", why)
            case Refused(why, until_captured) if until_captured and fold is not None:
                self._in_doubt = fold.version, why
            case Refused(why):
                self._given_up = why
                level = logging.INFO if fold is None else logging.WARNING  # before the first one it is no surprise
                log.log(level, "bases are captured from here on, and not folded: %s", why)
            case Differs(names) if fold is not None:
                self._differs(fold, names)
            case Made(key, nbytes, audited):
                self._observer.put(self._tier.index, _key(key), nbytes)
                self.folded_bases += 1
                self.audited_bases += audited

    def _blocked_in(self, seen: Observation) -> set[int]:
        """Versions newer than the newest usable base where something unusable lies in the base's place. Nothing
        overwrites it, since a base of a version is made once; bases after it are folded as before."""
        copies = self._observer.damaged_there | self._observer.foreign
        keys = (copy.key for copy in copies if copy.tier == self._tier.index)
        bases = {key.last for key in keys if key.stream is Stream.BASE and key.generation == seen.generation}
        usable = newest_usable(seen)
        return {version for version in self._blocked | bases if version > usable}

    def _block(self, versions: set[int]) -> None:
        """Count those that are new, and say so."""
        for version in sorted(versions - self._blocked):
            self.skipped_folds += 1
            log.warning(
                "%s of %s is not folded: one that is damaged, or lacks what it refers to, lies there. The next one "
                "that is due takes its place; what tiercheck verify says of this one tells whether memory fails",
                ShardKey.base(self._observer.seen().generation, version, self._observer.rank),
                self._tier,
            )
        self._blocked |= versions

    def _check_gone(self, key: str) -> None:
        """Once is in order: it was deleted meanwhile. Errors: ``SourceError``, so that the fold pauses."""
        if key in self._missing:
            raise SourceError("what is to be folded is listed, and is not there", tier=self._tier.name, key=key)
        self._missing = {key}

    def _differs(self, fold: Fold, names: tuple[str, ...]) -> None:
        """What differs from what training had is no base of it: one is captured."""
        why = f"what was folded for version {fold.version} differs from what training had in {listed(names)}"
        self._differing, self._in_doubt = (fold.version, names), (fold.version, why)
        self._observer.differing = fold.version
        log.error(
            "%s: something has written there in a way that torch does not count (through .data, perhaps), or memory or "
            "arithmetic has failed, in the job or here. A base is captured. Versions before it may lack the difference",
            why,
        )

    def _refused(self, seen: Observation) -> str:
        version, why = self._in_doubt
        return self._given_up or ("" if self._newest_base(seen) >= version else why)

    def _newest_base(self, seen: Observation) -> int:
        """Its version; -1 if there is none."""
        base = self.base(seen)
        return -1 if base is None else base.last


def _key(text: str) -> ShardKey:
    key = parse(text)
    assert isinstance(key, ShardKey), "a fold reads shards"
    return key
