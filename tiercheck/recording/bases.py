"""The bases that a recorder writes: when one is due, the room for it, its lazy copy, and whether it has arrived.

One base at a time is on its way. It is copied while the next forward and backward pass run, and the step after them
waits until the copy has read the state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tiercheck.config import CheckpointConfig
from tiercheck.errors import DeadlineExceeded, NotFound, RecoveryError, SaveError
from tiercheck.format import container
from tiercheck.hierarchy import OpenTier
from tiercheck.keys import ShardKey
from tiercheck.policy.folding import DUE_MAX
from tiercheck.recording.agreement import Agreement
from tiercheck.recording.base_copier import BaseCopier, BaseInFlight
from tiercheck.recording.cadence import Cadence
from tiercheck.recording.modes import (
    DUE,
    IN_FLIGHT,
    BaseEvent,
    Chain,
    ChainEvent,
    Copying,
    CopyingEvent,
    Modes,
)
from tiercheck.recording.reservations import Reservations
from tiercheck.recording.saves import Saves, ask_mover, doubt
from tiercheck.recording.waits import asking
from tiercheck.replication.fold_controller import PREPARING
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.state import StateStream

__all__ = ["Bases"]

log = logging.getLogger(__name__)


class Bases:
    """The bases of one rank and one generation."""

    def __init__(
        self,
        stream: StateStream,
        tier: OpenTier,
        memory: Reservations,
        mover: MoverHandle,
        scheduler: Scheduler,
        *,
        saves: Saves,
        modes: Modes,
        cadence: Cadence,
        config: CheckpointConfig,
        rank: int,
        generation: int,
        agreement: Agreement | None,
        folds: bool,
    ) -> None:
        """``agreement`` is asked on every rank at each version; ``None`` if a tier is shared. ``folds``: bases that are
        due are left to the mover, as far as it takes them."""
        self.in_flight: BaseInFlight | None = None
        self.anchor: int | None = None
        """The version of the newest base that is in the first tier."""
        self._stream = stream
        self._tier = tier
        self._memory = memory
        self._mover = mover
        self._scheduler = scheduler
        self._saves = saves
        self._modes = modes
        self._cadence = cadence
        self._config = config
        self._rank = rank
        self._generation = generation
        self._agreement = agreement
        self._copier = BaseCopier(
            scheduler,
            mover.nudge,
            deadline_s=config.deadline_s,
            patience_s=config.deadline_s if config.on_save_error == "fail" else 0.0,
        )
        self._newest: ShardKey | None = None
        """The newest base, if it is in the first tier; ``None`` if it failed."""
        self._reference: ShardKey | None = None
        """The base that the stream refers to."""
        self._begun = -1
        """The version of the newest base whose copy was begun."""
        self.left = -1
        """The newest version whose base was left to the mover."""
        self._left: tuple[int, ...] = ()
        """The newest of them, which a mover that is started anew is told once more."""
        self._folds = folds
        self._audited = -1
        """The newest version whose record says what training has."""
        self._unaudited = config.audit_every
        """How many bases were left to the mover since one was compared with that."""
        self._gap = -1
        """The newest version that no record leads to."""
        self._waited_in_vain = False
        """What folds was not ready when it was waited for: until it is, that is done no more."""

    @property
    def folds(self) -> bool:
        """Whether bases that are due are left to the mover, as far as it takes them."""
        return self._folds

    def may_be_due(self, version: int) -> bool:
        """Whether the version may get a base, as far as can be said before its iteration has ended."""
        return self._modes.base.state in DUE or self._cadence.may_be_due(version)

    async def is_due(self, version: int) -> bool:
        """Whether every rank makes a base of this version. Errors: ``SaveError``; ``GroupError``."""
        refused = self._cadence.refusals.count
        try:
            return await self._cadence.is_due(version)
        except RecoveryError as error:  # of another rank, in words
            raise SaveError(str(error)) from error
        finally:
            self._saves.count(refused_decisions=self._cadence.refusals.count - refused)

    def is_needed(self) -> bool:
        """Whether this rank alone needs a base: nothing else leads to its newest version; or something was damaged in
        the first tier before it was copied on, or is missing there, and no base since replaces it."""
        if self._modes.base.state in DUE:
            return True
        if self.not_folded():
            return True
        if not self._has_lost():
            return False
        after = self._mover.status.base_needed_after
        log.error("what later versions need was lost or damaged after version %d: a base is made", after)
        return True

    def not_folded(self) -> bool:
        """Whether a base that was left to the mover is missing: its fold differed from what training had, or the mover
        has not taken it over after all. No base was captured since."""
        if self._differs():
            return True
        status = self._mover.status
        done = self.left <= max(self._begun, status.folds_to, status.newest_base)
        if done or status.prepares_folding or not (obstacle := status.not_folded):
            return False
        self._note_not_folded(f"base {self.left} is captured late", obstacle)
        return True

    def _note_not_folded(self, what: str, obstacle: str) -> None:
        """Log it, if it is another obstacle than before."""
        if obstacle != self._saves.stats.not_folded:
            level = logging.INFO if self._config.bases == "auto" else logging.WARNING
            if obstacle == PREPARING and self._rank != 0:
                level = logging.DEBUG  # at each start, of each rank
            log.log(level, "%s, and not folded: %s", what, obstacle)
        self._saves.note_not_folded(obstacle)

    def _has_lost(self) -> bool:
        """Whether something was lost, and no base has begun since that makes up for it."""
        after = self._mover.status.base_needed_after
        return after is not None and after >= self._begun

    def audits(self, version: int) -> bool:
        """Whether the version's record is to say what training has, as its base may be folded and then compared."""
        due = self._folds and 0 < self._config.audit_every <= self._unaudited + 1
        if not due or self._stream.doubts or not self._cadence.may_be_due(version):
            return False
        self._audited = version
        return True

    def _differs(self) -> bool:
        """Whether a fold differed from what training had, and no base was captured since."""
        status = self._mover.status
        if status.differing_version is None or status.differing_version <= self._begun:
            return False
        doubt(self._stream, self._stream.doubts.with_unseen(status.differing))
        return True

    async def left_to_mover(self, version: int) -> bool:
        """Whether the mover folds the base that is due. If those before it have not drained, wait for them. Errors:
        ``SaveError``; ``TierError``."""
        if not self._folds or self._modes.chain.state is not Chain.WHOLE or self.is_needed():
            return False
        if self._stream.constants_unsettled:  # a fold makes none
            return False
        due = (*self._left, version)[-DUE_MAX:]
        if taken := self._will_be_taken():
            self._scheduler.start(_leave(self._mover, due))
        else:
            await self._wait_for_room(version, due)  # the mover looks anew, and finds what to fold, or an obstacle
        status = self._mover.status
        if taken or status.folds_to == version:
            self._left, self.left = due, version
            self._unaudited = 0 if self._audited == version else self._unaudited + 1
            self._saves.note_not_folded("")
            return True
        obstacle = status.not_folded
        if status.folds:
            obstacle = status.fold_lag
        elif not obstacle:
            obstacle = "the node's agent is of a release that does not fold"
        self._note_not_folded(f"base {version} is captured", obstacle)
        return False

    def missing(self, version: int) -> None:
        """No record leads to the version: it can be reached only by a base."""
        self._gap = version
        self._modes.chain.on(ChainEvent.GAP)
        self._modes.base.on(BaseEvent.NEEDED)

    async def begin(self, version: int, *, opening: bool = False) -> int:
        """Reserve memory and start the lazy copy. If the bases before have not drained, wait for them. A generation's
        opening base has none before it. Returns the bytes reserved for the base. Errors: ``SaveError``;
        ``TierError``."""
        await self.finish()
        if not opening:
            if self._folds or not self._has_room():
                await self._wait_for_room(version)
            if self._has_lost():
                self._stream.give_up_constants()  # they may be among what was lost
        began = self._scheduler.time()
        capture = self._stream.base(ShardKey.base(self._generation, version, self._rank))
        nbytes = capture.nbytes_max
        constants = capture.constants
        # The thread that copies them makes the memory, if it is not ready: gigabytes take seconds.
        room = None
        if constants is not None:
            room = await self._memory.reserve(constants.key, constants.nbytes_max, ready=False)
        try:
            reservation = await self._memory.reserve(capture.key, nbytes, ready=False)
        except BaseException:
            if room is not None:
                await self._memory.drop(room, f"dropping the constants of base {version}")
            raise
        lazily = self._modes.copying.state is Copying.LAZY
        self._modes.base.on(BaseEvent.BEGUN)
        self.in_flight = self._copier.begin(version, capture, reservation, room, lazily=lazily)
        self._begun = version
        self._stream.mark_recorded()
        self._saves.count(base_stall_s=self._scheduler.time() - began)
        if not lazily:
            await self.finish_copy()
        return nbytes

    async def settle_with_others(self, version: int, *, due: bool) -> None:
        """Agree with the other ranks, which all are at this version, and of which each makes a base if one is ``due``.
        Errors: ``SaveError``; ``GroupError``."""
        if self._agreement is None:
            return
        if due:
            await self.finish()
        began = self._scheduler.time()
        try:
            await (self._agreement.settle(version) if due else self._agreement.advance(version))
        except RecoveryError as error:  # of another rank, in words
            raise SaveError(str(error)) from error
        finally:
            self._saves.count(drain_stall_s=self._scheduler.time() - began)

    async def finish_copy(self) -> None:
        """Wait until the lazy copy of a base has read the state, so that the state may change. What is on a device may
        still be read: then what this thread puts into the device's stream comes behind that.

        Errors: ``SaveError``.
        """
        if self.in_flight is None:
            return
        began, base = self._scheduler.time(), self.in_flight
        self._stream.hurry()
        if not await self._scheduler.ends(base.copied, self._config.deadline_s):
            raise SaveError(f"base {base.version} was not copied within {self._config.deadline_s:g} s")
        if base.capture.let_change():
            self._modes.copying.on(CopyingEvent.WRITTEN)  # the warning comes when the base is given up, and only then
        self._saves.count(base_stall_s=self._scheduler.time() - began)
        if base.published.done() or base.copied.exception() is not None:  # a failed one is given up at once
            await self.finish()

    async def finish(self) -> None:
        """Wait until the base in flight, if any, is in the first tier. Errors: ``SaveError``."""
        base, self.in_flight = self.in_flight, None
        if base is None:
            if self._modes.base.state in IN_FLIGHT:  # an interrupt came before it was noted or waited for
                self._modes.base.on(BaseEvent.FAILED)
            return
        self._newest = None
        arrived = False
        self._stream.hurry()
        try:
            with self._saves.saving(base.version):
                arrived = await self._arrived(base)
        finally:
            self._copier.give_up()
            self._modes.base.on(BaseEvent.ARRIVED if arrived else BaseEvent.FAILED)

    async def set_reference(self) -> bool:
        """Make the stream refer to the newest base, when it is in the first tier. ``False``: there is none."""
        await self.finish()
        if self._newest is None:
            return False
        if self._newest != self._reference:
            self._stream.set_reference_base(None)  # its memory can be used again
            key, tier = str(self._newest), self._tier
            mapping = tier.driver.get(key)
            try:
                content = await self._scheduler.call(mapping, what=f"mapping {key}", deadline_s=self._config.deadline_s)
            except NotFound:  # the base was damaged, and was deleted: another base is due
                self._newest = None
                return False
            self._stream.set_reference_base(container.parse(content, key=key, tier=tier.name))
            self._reference = self._newest
        return True

    async def close(self) -> None:
        """Wait until a running copy ends. Idempotent. Errors: ``DeadlineExceeded``."""
        await self._copier.close()

    def _has_room(self) -> bool:
        """Whether the mover need not be asked for room: it has found some, and nothing has taken that since. Apart from
        what is folded, only this rank's bases do, and the mover had seen the newest one."""
        status = self._mover.status
        return self._mover.conflict is None and status.has_room and status.newest_base >= max(self._begun, self.left)

    def _will_be_taken(self) -> bool:
        """Whether the mover need not be asked either if it folds: it does, and what was left to it is done."""
        status = self._mover.status
        ready = status.folds and not status.unfolded_bases and status.folds_to == self.left
        return ready and self._has_room()

    async def _wait_for_room(self, version: int, due: Sequence[int] = ()) -> None:
        """Wait until the bases before have drained, but only once. If the durable tier takes nothing for hours and
        training goes on (``on_save_error``), training must not wait for the deadline at every iteration. ``due``:
        leave these to the mover."""
        began, patiently = self._scheduler.time(), bool(due) and self._config.bases == "fold"
        patiently = patiently and not (self._waited_in_vain and self._mover.status.prepares_folding)
        try:
            with asking(self._modes.room, self._config.deadline_s) as deadline_s:
                call, what = self._mover.room_for_base(deadline_s, due, patiently=patiently), f"room for base {version}"
                await ask_mover(self._scheduler, self._mover, call, what, self._config.deadline_s, folds=patiently)
        finally:
            self._saves.count(drain_stall_s=self._scheduler.time() - began)
        if patiently and self._mover.status.prepares_folding:
            self._waited_in_vain = True

    async def _arrived(self, base: BaseInFlight) -> bool:
        """Whether the base is in the first tier, once it is there or given up."""
        if not await self._scheduler.ends(base.published, self._config.deadline_s):
            raise DeadlineExceeded(f"base {base.version} was not published in time")
        result = base.published.result()
        # The copy may have found writes that nothing else has seen: no differential holds them.
        doubt(self._stream, self._stream.doubts.with_unseen(result.unexpected))
        if result.nbytes is None:
            log.warning("base %d is given up, since its state was written to while it was copied", base.version)
            self._modes.copying.on(CopyingEvent.WRITTEN)
            return False
        base.capture.arrived()
        self._newest = base.capture.key
        self.anchor = base.version
        if base.version >= self._gap:
            self._modes.chain.on(ChainEvent.BASE)
        self._saves.count(bases=1, captured_bytes=result.nbytes + result.constants_nbytes)
        return True


async def _leave(mover: MoverHandle, due: Sequence[int]) -> None:
    """Movers are spoken to on the event loop."""
    mover.leave(due)
