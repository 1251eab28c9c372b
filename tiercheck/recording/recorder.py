"""The writing side of a checkpointer: it writes one rank's streams into the first tier, while training goes on.

Each iteration writes a differential, whole or not at all. Now and then a base is written; it is copied while the next
forward and backward pass run. If an iteration cannot be recorded as a differential, it gets a base instead, since a
chain with a gap would restore a wrong state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiercheck.config import CheckpointConfig
from tiercheck.errors import CapacityExceeded, SaveError
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.policy.first_tier import Holding
from tiercheck.policy.placement import Placement
from tiercheck.recording.agreement import Agreement
from tiercheck.recording.backlog import Backlog
from tiercheck.recording.bases import Bases
from tiercheck.recording.cadence import Cadence
from tiercheck.recording.lag import LagBound
from tiercheck.recording.modes import BaseEvent, Chain, Copying, CopyingEvent, Modes, Record, RecordEvent
from tiercheck.recording.mover_requests import MoverRequests
from tiercheck.recording.parts import StepParts
from tiercheck.recording.record_closer import ON_THEIR_WAY_MAX, RecordCloser
from tiercheck.recording.reservations import Reservations
from tiercheck.recording.saves import Saves, doubt
from tiercheck.recording.stats import Stats
from tiercheck.recording.waits import Wait
from tiercheck.replication.mover import MoverHandle
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.errors import OtherwiseStored, WrittenUnseen
from tiercheck.streams.state import RecordCapture, StateStream
from tiercheck.tiers.driver import Reservation

__all__ = ["Recorder"]

log = logging.getLogger(__name__)


@dataclass
class _OpenRecord:
    capture: RecordCapture
    reservation: Reservation
    nbytes: int
    """The most that the record needs. The reservation may be longer."""


class _Recording:
    """A context for a part of a differential. If any part fails, for whatever reason, the whole differential is given
    up: without that part it would be replayed as if it were complete."""

    def __init__(self, recorder: Recorder, version: int) -> None:
        self._recorder = recorder
        self._version = version

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and await self._recorder.part_failed(self._version, error)


class Recorder:
    """Captures the versions of one rank and one generation, from ``version`` on.

    Only training's thread runs its coroutines. They suspend it only if there is something to wait for.
    """

    def __init__(
        self,
        stream: StateStream,
        hierarchy: OpenHierarchy,
        mover: MoverHandle,
        scheduler: Scheduler,
        *,
        placement: Placement,
        cadence: Cadence,
        config: CheckpointConfig,
        rank: int,
        generation: int,
        version: int,
        agreement: Agreement | None = None,
        before_bases: Callable[[], None] | None = None,
        folds: bool = False,
        not_folded: str = "",
        holding: Holding | None = None,
    ) -> None:
        """``agreement`` is asked on every rank at each version; ``before_bases`` is called at those
        at which one is due, whoever makes it. ``folds``: those are left to the mover, as far as it takes them;
        ``not_folded``: why not, if that was wanted. ``holding``: as of :class:`Backlog`."""
        self.version = version
        """The newest version captured."""
        self.trained = version
        """The newest version whose step is done. Until its iteration has ended, that is ``version + 1``."""
        self._stream = stream
        self._first = hierarchy.first
        self._roles = hierarchy.roles
        self._mover = mover
        self._scheduler = scheduler
        self._placement = placement
        self._config = config
        self._rank = rank
        self._before_bases = before_bases
        self._generation = generation
        self._modes = Modes()
        self._saves = Saves(config, self._modes)
        self._saves.note_not_folded(not_folded)
        self._open_record: _OpenRecord | None = None
        self._parts = StepParts(stream)
        self._requests = MoverRequests(mover, scheduler, config.deadline_s)
        wait = partial(Wait, scheduler, self._requests.hurry, self._saves)
        self._memory = Reservations(hierarchy.first, scheduler, self._requests.make_room, wait, config)
        self._closer = RecordCloser(self._memory, scheduler, self._record_arrived, self._requests, config.deadline_s)
        self._bases = Bases(
            stream,
            hierarchy.first,
            self._memory,
            mover,
            scheduler,
            saves=self._saves,
            modes=self._modes,
            cadence=cadence,
            config=config,
            rank=rank,
            generation=generation,
            agreement=agreement,
            folds=folds,
        )
        self._backlog = Backlog(
            hierarchy.first,
            mover,
            scheduler,
            wait,
            modes=self._modes,
            rank=rank,
            holding=holding,
            config=config,
            folds=folds,
        )
        self._lag = LagBound(
            hierarchy,
            mover,
            wait,
            modes=self._modes,
            rank=rank,
            versions_max=config.lag_max,
            deadline_s=config.deadline_s,
        )

    @property
    def stats(self) -> Stats:
        """What recording has done and cost so far."""
        return self._saves.stats

    @property
    def failure(self) -> str | None:
        """Why the newest version could not be saved, if that was raised."""
        return self._saves.failure

    async def begin(self) -> int:
        """Capture the generation's opening base. Returns for how many bytes there is memory now: 0 if that failed.
        Errors: ``SaveError`` (see ``on_save_error``)."""
        self._stream.mark_stepped()
        with self._saves.saving(self.version):
            return await self._bases.begin(self.version, opening=True)
        return 0

    async def capture(self, version: int, gradients: Mapping[str, Any]) -> None:
        """Take the gradients of the coming step, or of a part of it, before the step changes anything.

        ``gradients``: by the provider's names, in their own dtype and shape. On return their memory is free again. With
        ``train_on_compressed`` they are written to, and the step must use the new values.
        Errors: ``SaveError`` (see ``on_save_error``); ``JobConflict``; ``ValueError`` if ``version`` is not the next
        version.
        """
        self._check_next(version)
        await self._bases.finish_copy()
        if self._modes.record.state is Record.NONE:
            await self._look_at_closed(ON_THEIR_WAY_MAX - 1)
        async with _Recording(self, version):
            if self._modes.record.state is Record.NONE:
                await self._lag.admit(version)
                await self._backlog.admit()
        began = self._scheduler.time()
        async with _Recording(self, version):
            if self._modes.record.state is not Record.NONE:
                self._parts.look()
            elif self._stream.trained_written():
                await self._leave_out(version)
            else:
                await self._begin_differential(version)
        async with _Recording(self, version):
            if self._open_record is not None:
                await self._add(version, self._open_record, gradients)
            else:  # the whole version is recorded, or nothing of it
                self._stream.leave_out(gradients, version)
        self._saves.count(differential_stall_s=self._scheduler.time() - began)

    async def complete(self, version: int) -> None:
        """The step is done: publish the differential, and begin a base if one is due. Errors: as :meth:`capture`."""
        self._check_next(version)
        if self._modes.record.state is Record.NONE:
            raise ValueError(f"version {version} cannot be completed: capture() takes its gradients before the step")
        began = self._scheduler.time()
        # A version that gradients do not lead to must not get a differential, not even while a base is on its way.
        if self.trained != version:  # nobody has called stepped()
            self._stream.mark_stepped()
        written = self._rewritten(any((self._parts.end(), self._stream.trained_written())))
        await self._publish_differential(version, began, skipped=False, written=written)

    def part_stepped(self) -> None:
        """One of several optimizers has: what is written until :meth:`capture` or :meth:`stepped` is no step's."""
        self._parts.stepped()

    def cannot_be_replayed(self) -> None:
        """The step, or a part of it, has done what no replay of the gradients does: the version gets a base."""
        self._parts.cannot_be_replayed()

    def stepped(self, version: int) -> None:
        """The optimizer has stepped, and :meth:`complete` follows. Later writes to the parameters are no part of the
        step."""
        self.trained = version
        began = self._scheduler.time()
        self._parts.look()
        self._stream.mark_stepped(every_bit=self._bases.may_be_due(version))
        self._saves.count(base_stall_s=self._scheduler.time() - began)

    async def begin_iteration(self) -> None:
        """A forward pass begins. The newest version was published when the loop said that its iteration was over.

        If something has written to the state since then, no version holds that write. Later versions record that as a
        doubt. The first time, the newest version is captured again, as a base that holds the write and the doubt. If
        that version is a base already, it stays as it is, and a recovery of it cannot tell. Errors: ``SaveError`` (see
        ``on_save_error``).
        """
        if not (names := self._stream.written()):
            return
        if doubt(self._stream, self._stream.doubts.with_late(names)):
            await self.recapture(doubted=True)

    def written(self) -> tuple[str, ...]:
        """The names of what was written to since the newest version was published."""
        return self._stream.written()

    async def recapture(self, *, moved: bool = False, doubted: bool = False) -> bool:
        """Capture the newest version again, as a base of the present state, if that was written to since (or has
        ``moved``, as the caller has seen) and the version is no base yet. Unless later records say so (``doubted``),
        none leads on to what was written. Returns whether it was. Errors: as :meth:`begin_iteration`."""
        if not (self._stream.written() or moved):
            return False
        version = self.version
        await self._look_at_closed(0)
        with self._saves.saving(version):
            await self._bases.finish_copy()
            await self._bases.finish()
            if version not in (self._bases.anchor, self._bases.left):  # it has a base, or gets the one that is folded
                self._modes.copying.on(CopyingEvent.WRITTEN)
                if doubted or not self._stream.trained_written():  # else the next version is a base, too
                    self._stream.mark_stepped()
                await self._bases.begin(version)
                self._let_next_go_everywhere(version)
                await self._bases.finish()
        return True

    async def make_up(self) -> None:
        """If nothing in the first tier leads to the newest version, since an interrupt came while that was saved: a
        base does. Errors: as :meth:`begin_iteration`."""
        if self._modes.chain.state is Chain.BROKEN and self.trained == self.version:
            with self._saves.saving(self.version):
                await self._bases.begin(self.version)
                await self._bases.finish()

    def _rewritten(self, seen: bool) -> bool:
        """Whether the masters have other bits than the step left there. It is a doubt if no write was ``seen``."""
        began = self._scheduler.time()
        names = self._stream.masters_rewritten()
        if not seen:
            doubt(self._stream, self._stream.doubts.with_unseen(names))
        self._saves.count(base_stall_s=self._scheduler.time() - began)
        return seen or bool(names)

    async def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record that. Errors: as :meth:`capture`."""
        self._check_next(version)
        await self._bases.finish_copy()
        async with _Recording(self, version):
            if self._modes.record.state is Record.NONE:
                await self._lag.admit(version)
                await self._backlog.admit()
                await self._begin_differential(version)
        self.trained = version
        began, written = self._scheduler.time(), self._stream.trained_written()
        await self._publish_differential(version, began, skipped=True, written=written)

    async def flush(self) -> None:
        """Move everything captured to where policy wants it. Errors: ``SaveError``; ``JobConflict``."""
        if await self._look_at_closed(0) and self.trained == self.version:  # else the end of the iteration captures it
            with self._saves.saving(self.version):
                await self._bases.begin(self.version)
        await self._bases.finish()
        await self._requests.drain()
        if self._bases.not_folded() and self.trained == self.version:  # else the end of the iteration captures it
            with self._saves.saving(self.version):
                await self._bases.begin(self.version)
                await self._bases.finish()
                if self._bases.is_needed():  # what it was to refer to differed, too: the next one holds that itself
                    await self._bases.begin(self.version)
                    await self._bases.finish()
            await self._requests.drain()

    async def commit(self) -> None:
        """All ranks have flushed: wait for what is committed then. Errors: ``SaveError``; ``JobConflict``."""
        await self._requests.commit()

    async def finish_base(self) -> None:
        """Wait until the base in flight, if any, is in the first tier. Errors: as :meth:`capture`."""
        await self._bases.finish()

    async def close(self) -> None:
        """Wait until a running copy of a base, and of records, ends, and free memory that no record needs.
        Idempotent. Errors: ``DeadlineExceeded`` naming what is still copied."""
        self._stream.hurry()
        if self._open_record is not None:
            self._open_record.capture.abandon()
        self._memory.close()
        await self._closer.close()
        await self._bases.close()
        await self._memory.drop_ahead()

    async def _begin_differential(self, version: int) -> None:
        """Open the version's record. If it must refer to a base and there is none, the version is given up."""
        if self._stream.supersedes and not await self._bases.set_reference():
            await self._give_up(version)
            return
        key, nbytes = self._stream.key(self._generation, version, self._rank), self._stream.nbytes_max
        reservation = await self._memory.take_ahead(key, nbytes) or await self._memory.reserve(key, nbytes)
        self._open_record = _OpenRecord(self._stream.begin(key, reservation.buffer), reservation, nbytes)
        self._modes.record.on(RecordEvent.BEGUN)

    async def _add(self, version: int, opened: _OpenRecord, gradients: Mapping[str, Any]) -> None:
        """If gradients take more room than those of the last version, their record goes on in longer memory."""
        try:
            opened.capture.add(gradients)
            return
        except CapacityExceeded:
            if opened.nbytes >= (nbytes := self._stream.nbytes_unexpected):
                raise
        await self._lengthen(version, opened, nbytes)
        opened.capture.add(gradients)

    async def _lengthen(self, version: int, opened: _OpenRecord, nbytes: int) -> None:
        """The record goes on in memory of so many bytes."""
        key = self._stream.key(self._generation, version, self._rank)
        short, longer = opened.reservation, await self._memory.reserve(key, nbytes)
        opened.reservation, opened.nbytes = longer, nbytes
        opened.capture.move(longer.buffer)
        await self._memory.drop(short, f"giving back the shorter memory for {key}")

    async def _publish_differential(self, version: int, began: float, *, skipped: bool, written: bool) -> None:
        """``written``: whether something other than the optimizer has written to a master since the step."""
        record = self._modes.record
        reformed = self._stream.reformed()
        if record.state is Record.OPEN and (written or self._stream.frozen_changed()):
            await self._leave_out(version)
        elif record.state is Record.OPEN and reformed:  # no base before it can hold the record's buffers
            await self._give_up(version)
        self._stream.mark_published()
        captured: dict[str, int] = {}
        recorded = False
        try:
            if (opened := self._open_record) is not None:
                async with _Recording(self, version):
                    captured = await self._close(version, opened, skipped=skipped)
                    recorded = True
        finally:
            # The optimizer has stepped, whether the step was recorded or not: the next step is another version.
            record.on(RecordEvent.ENDED)
            self._open_record = None
            self.version = self.trained = version
        if opened is not None and recorded:
            self._memory.reserve_ahead(self._stream.key(self._generation, version + 1, self._rank), opened.nbytes)
        self._saves.count(**captured, differential_stall_s=self._scheduler.time() - began)
        if self._placement.completes(version, self._roles):
            self.nudge()
        if self._modes.chain.state is not Chain.WHOLE:
            await self._bases.finish()  # until then nothing leads to this version, and that base may be given up
        recorded = recorded and self._modes.chain.state is Chain.WHOLE
        due = False
        with self._saves.saving(version, recorded=recorded):
            due = await self._bases.is_due(version)
            if not due:
                await self._bases.settle_with_others(version, due=False)
        if due or self._bases.is_needed():
            with self._saves.saving(version, recorded=recorded):
                doubted = self._stream.doubts != Doubts()  # the differential says so, also if the doubt ends here
                if due and self._before_bases is not None:
                    self._before_bases()
                if due:
                    await self._bases.settle_with_others(version, due=True)
                folds = not doubted and not self._backlog.folds_late
                if due and folds and self._bases.folds:
                    await self._look_at_closed(0)  # what folds looks for this record
                if due and folds and await self._bases.left_to_mover(version):
                    self._saves.failure = None
                    return
                await self._bases.begin(version)
                self._let_next_go_everywhere(version)
            if self._modes.chain.state is not Chain.WHOLE:
                await self._bases.finish()
        elif self._placement.is_between(version):
            with self._saves.saving(version, recorded=recorded):
                if await self._backlog.stands_in():
                    await self._bases.begin(version)
        self._saves.failure = None

    async def _close(self, version: int, opened: _OpenRecord, *, skipped: bool) -> dict[str, int]:
        """Publish the record, or hand it over if its gradients are still on their way. Returns what was captured."""
        close = opened.capture.ended(skipped=skipped, audit=self._bases.audits(version))
        if opened.capture.is_on_its_way:
            key = self._stream.key(self._generation, version, self._rank)
            self._closer.hand_over(key, opened.capture, close, opened.reservation, self._stream.nbytes_unexpected)
            return {}
        try:
            nbytes = close()
        except CapacityExceeded:  # the host state has grown
            await self._lengthen(version, opened, max(opened.capture.nbytes_needed, self._stream.nbytes_unexpected))
            nbytes = close()
        await self._memory.publish(opened.reservation, nbytes, f"publishing differential {version}")
        return {"differentials": 1, "captured_bytes": nbytes}

    async def _look_at_closed(self, most: int) -> bool:
        """What has become of the records that were handed over, when at most so many are still on their way. Returns
        whether one of them is lost. Errors: ``SaveError``."""
        began, failed = self._scheduler.time(), []
        self._stream.hurry()
        for each in await self._closer.ended(most):
            if each.error is None:
                self._saves.count(differentials=1, captured_bytes=each.nbytes)
            else:
                failed.append((each.version, each.error))
                self._bases.missing(each.version)
        self._saves.count(differential_stall_s=self._scheduler.time() - began)
        for version, error in failed:
            if isinstance(error, WrittenUnseen):
                if error.late:
                    doubt(self._stream, self._stream.doubts.with_unseen(error.names))
                self._modes.copying.on(CopyingEvent.WRITTEN)
                log.warning("version %d has no differential, and the next one gets a base: %s", version, error)
            elif isinstance(error, OtherwiseStored):
                log.warning("version %d has no differential, and the next one gets a base: %s", version, error)
            elif not self._saves.failed(version, error):
                raise error
        return bool(failed)

    def _record_arrived(self, version: int) -> None:
        """On the event loop: a record that was handed over is in the first tier."""
        if self._placement.completes(version, self._roles):
            self._mover.nudge()

    def _let_next_go_everywhere(self, version: int) -> None:
        """A base was captured for what no differential holds. If its version makes it look like a folded one, which
        stays in the first tier, the next version gets a base as well."""
        if self._placement.is_between(version):
            self._modes.base.on(BaseEvent.NEEDED)

    async def _give_up(self, version: int) -> None:
        self._modes.record.on(RecordEvent.GIVEN_UP)
        self._bases.missing(version)
        opened, self._open_record = self._open_record, None
        if opened is not None:
            self._stream.hurry()
            opened.capture.abandon()
            await self._memory.drop(opened.reservation, f"dropping differential {version}")
        await self._memory.drop_ahead()  # the base needs room, and perhaps the next version is no differential either

    async def _leave_out(self, version: int) -> None:
        """No differential leads to this version: it gets a base instead."""
        if self._modes.copying.state is Copying.LAZY and not self._parts.told:
            log.warning(
                "before version %d something other than the attached optimizer's step wrote to parameters, or to what "
                "the optimizer holds: a version after such a write gets a base instead of a differential, which takes "
                "longer",
                version,
            )
        self._modes.copying.on(CopyingEvent.WRITTEN)
        await self._give_up(version)

    async def part_failed(self, version: int, error: BaseException) -> bool:
        """A part of a differential could not be recorded. Returns whether training goes on. Errors: ``SaveError``."""
        await self._give_up(version)
        return self._saves.failed(version, error)

    def _check_next(self, version: int) -> None:
        if self.trained == version - 1 > self.version:
            raise SaveError(
                f"version {self.trained} was trained and not saved: an interrupt has come while it was being saved. "
                f"Close the checkpointer, and attach again to go on from version {self.version}"
            )
        if version != self.version + 1:
            raise ValueError(f"version {version} cannot follow version {self.version}: versions are consecutive")

    def nudge(self) -> None:
        """There is something for the mover."""
        self._requests.nudge()
