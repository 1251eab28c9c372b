"""The writing side of a checkpointer: it writes one rank's streams into the first tier, while training goes on.

Each iteration writes a differential, whole or not at all. Now and then a base is written; it is copied while the next
forward and backward pass run. If an iteration cannot be recorded as a differential, it gets a base instead, since a
chain with a gap would restore a wrong state.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tiercheck.config import CheckpointConfig
from tiercheck.errors import (
    DeadlineExceeded,
    GroupError,
    JobConflict,
    NotFound,
    RecoveryError,
    SaveError,
    TierCheckError,
    TierError,
)
from tiercheck.format import container
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import MetricKey, ShardKey
from tiercheck.policy.placement import Placement
from tiercheck.recording.base_copier import BaseCopier, BaseInFlight
from tiercheck.recording.cadence import Cadence
from tiercheck.recording.reservations import Reservations
from tiercheck.recording.stats import Stats
from tiercheck.replication.mover import MoverHandle
from tiercheck.replication.records import metric_record
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.state import RecordCapture, StateStream
from tiercheck.tiers.driver import Reservation

__all__ = ["Recorder"]

log = logging.getLogger(__name__)

T = TypeVar("T")

TOLD_S = 5.0
"""The time that the mover may take beyond its own deadline. Its own error names the tier for which it waits."""


@dataclass
class _OpenRecord:
    capture: RecordCapture
    reservation: Reservation
    nbytes: int
    """The most that the record needs. The reservation may be longer."""


class _Saving:
    """See :meth:`Recorder._saving`."""

    def __init__(self, recorder: Recorder, version: int, *, records: bool) -> None:
        self._recorder = recorder
        self._version = version
        self._records = records

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and await self._recorder.failed(self._version, error, records=self._records)


class Recorder:
    """Captures the versions of one rank and one generation, from ``version`` on.

    Only training's thread runs its coroutines. They suspend it only where there is something to wait for.
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
        settle: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """``settle`` is called on every rank, at the versions at which all ranks make a base."""
        self.version = version
        """The newest version captured."""
        self.trained = version
        """The newest version whose step is done. Until its iteration has ended, that is ``version + 1``."""
        self.stats = Stats()
        self.failure: str | None = None
        """Why the newest version could not be saved, if that was raised."""
        self._stream = stream
        self._first = hierarchy.first
        self._roles = hierarchy.roles
        self._mover = mover
        self._scheduler = scheduler
        self._placement = placement
        self._cadence = cadence
        self._config = config
        self._rank = rank
        self._generation = generation
        self._settle = settle
        self._open_differential: _OpenRecord | None = None
        self._memory = Reservations(
            hierarchy.first,
            scheduler,
            lambda: self._call_mover(mover.make_room(), "making room in the first tier"),
            deadline_s=config.deadline_s,
        )
        self._unrecorded: int | None = None
        """The version of which a part could not be recorded. The other parts of it are not recorded either."""
        self._base: BaseInFlight | None = None
        self._newest: ShardKey | None = None
        """The newest base, if it is in the first tier; ``None`` if it failed."""
        self._reference: ShardKey | None = None
        """The base that the stream refers to."""
        self._base_due = False
        self._begun = -1
        """The version of the newest base whose copy was begun."""
        self._anchor: int | None = None
        """The version of the newest base that is in the first tier."""
        self._written = False
        """Something other than the optimizer writes to what it trains. So bases are copied before the step returns."""
        self._durable_is_full = False
        """A base has waited in vain until the bases before it have drained. Until they have, no base waits again."""
        self._copier = BaseCopier(scheduler, mover.nudge)

    async def begin(self) -> None:
        """Capture the generation's opening base. Errors: ``SaveError`` (see ``on_save_error``)."""
        self._stream.mark_stepped()
        async with self._saving(self.version):
            await self._begin_base(self.version, opening=True)

    async def capture(self, version: int, gradients: Mapping[str, Any]) -> None:
        """Take the gradients of the coming step, or of a part of it, before the step changes anything.

        ``gradients``: by the provider's names, in their own dtype and shape. On return their memory is free again. With
        ``train_on_compressed`` they are written to, and the step must use the new values.
        Errors: ``SaveError`` (see ``on_save_error``); ``JobConflict``; ``ValueError`` if ``version`` is not the next
        version.
        """
        self._check_next(version)
        await self._finish_copy()
        began = self._scheduler.time()
        async with self._recording(version):
            if self._open_differential is None and version != self._unrecorded:
                if self._stream.masters_written():
                    await self._leave_out(version)
                else:
                    await self._begin_differential(version)
        async with self._recording(version):
            if self._open_differential is not None:
                self._open_differential.capture.add(gradients)
            else:  # the whole version is recorded, or nothing of it
                self._stream.leave_out(gradients, version)
        self._count(differential_stall_s=self._scheduler.time() - began)

    async def complete(self, version: int) -> None:
        """The step is done: publish the differential, and begin a base if one is due. Errors: as :meth:`capture`."""
        self._check_next(version)
        began = self._scheduler.time()
        # A version that gradients do not lead to must not get a differential, not even while a base is on its way.
        if self.trained != version:  # nobody has called stepped()
            self._stream.mark_stepped()
        written = self._stream.masters_written() or self._rewritten()
        await self._publish_differential(version, began, skipped=False, written=written)

    def stepped(self, version: int) -> None:
        """The optimizer has stepped, and :meth:`complete` follows. Later writes to the parameters are no part of the
        step."""
        self.trained = version
        began = self._scheduler.time()
        self._stream.mark_stepped(every_bit=self._base_due or self._cadence.may_be_due(version))
        self._count(base_stall_s=self._scheduler.time() - began)

    async def begin_iteration(self) -> None:
        """A forward pass begins. The newest version was published when the loop said that its iteration was over.

        If something has written to the state since then, no version holds that write. Later versions record that as a
        doubt. The first time, the newest version is captured again, as a base that holds the write and the doubt. If
        that version is a base already, it stays as it is, and a recovery of it cannot tell. Errors: ``SaveError`` (see
        ``on_save_error``).
        """
        if not (names := self._stream.written()):
            return
        if self._doubt(self._stream.doubts.with_late(names)):
            await self.recapture()

    async def recapture(self) -> bool:
        """Capture the newest version again, as a base of the present state, if the state was written to after that
        version was published and the version is no base yet. Returns whether the state was written to. Errors: as
        :meth:`begin_iteration`."""
        if not self._stream.written():
            return False
        version = self.version
        async with self._saving(version):
            await self._finish_copy()
            await self.finish_base()
            if self._anchor != version:
                self._written = True
                self._stream.mark_stepped()
                await self._begin_base(version)
                await self.finish_base()
        return True

    def _rewritten(self) -> bool:
        """Whether the masters have other bits than the step left there, though no write was seen."""
        began = self._scheduler.time()
        names = self._stream.masters_rewritten()
        self._doubt(self._stream.doubts.with_unseen(names))
        self._count(base_stall_s=self._scheduler.time() - began)
        return bool(names)

    def _doubt(self, doubts: Doubts) -> bool:
        """Record ``doubts`` with all later versions. Returns whether they are new."""
        if doubts == self._stream.doubts:
            return False
        self._stream.doubts = doubts
        log.warning("versions from here on are approximate: %s", "; ".join(doubts.notes(replayed=True)))
        return True

    async def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record that. Errors: as :meth:`capture`."""
        self._check_next(version)
        await self._finish_copy()
        async with self._recording(version):
            if self._open_differential is None and version != self._unrecorded:
                await self._begin_differential(version)
        self.trained = version
        began, written = self._scheduler.time(), self._stream.masters_written()
        await self._publish_differential(version, began, skipped=True, written=written)

    async def report(self, metrics: Sequence[MetricKey]) -> None:
        """Put what the loop has reported into the first tier, from where the mover takes it. Errors: ``SaveError`` (see
        ``on_save_error``)."""
        for key in metrics:
            what = f"reporting {key.name} of version {key.version}"
            try:
                await self._call(self._first.driver.put(str(key), [metric_record(key)]), what)
            except (TierError, GroupError) as error:
                if self._config.on_save_error == "fail":
                    raise SaveError(f"{what}: {error}") from error
                log.error("%s: %s; training goes on", what, error)
        self._nudge()

    async def flush(self) -> None:
        """Move everything captured to where policy wants it. Errors: ``SaveError``; ``JobConflict``."""
        await self.finish_base()
        await self._call_mover(self._mover.drain(self._config.deadline_s, closing=True), "flushing the tiers")

    async def close(self) -> None:
        """Wait until a running copy of a base ends, and free memory that no record needs. Idempotent."""
        await self._copier.close()
        await self._memory.drop_ahead()

    async def _set_reference_base(self) -> bool:
        """Make the stream refer to the newest base, when it is in the first tier. ``False``: there is none."""
        await self.finish_base()
        if self._newest is None:
            return False
        if self._newest != self._reference:
            self._stream.set_reference_base(None)  # its memory can be used again
            key, tier = str(self._newest), self._first
            try:
                content = await self._call(tier.driver.get(key), f"mapping {key}")
            except NotFound:  # the base was damaged, and was deleted: another base is due
                self._newest = None
                return False
            self._stream.set_reference_base(container.parse(content, key=key, tier=tier.name))
            self._reference = self._newest
        return True

    async def _begin_differential(self, version: int) -> None:
        """Open the version's record. If it must refer to a base and there is none, the version is given up."""
        if self._stream.supersedes and not await self._set_reference_base():
            await self._give_up(version)
            return
        key, nbytes = self._stream.key(self._generation, version, self._rank), self._stream.nbytes_max
        reservation = await self._memory.take_ahead(key, nbytes) or await self._memory.reserve(key, nbytes)
        self._open_differential = _OpenRecord(self._stream.begin(key, reservation.buffer), reservation, nbytes)

    async def _publish_differential(self, version: int, began: float, *, skipped: bool, written: bool) -> None:
        """``written``: whether something other than the optimizer has written to a master since the step."""
        if version != self._unrecorded and (written or self._stream.frozen_changed()):
            await self._leave_out(version)
        self._stream.mark_published()
        captured: dict[str, int] = {}
        try:
            if (opened := self._open_differential) is not None:
                async with self._recording(version):
                    nbytes = opened.capture.finish(skipped=skipped)
                    await self._memory.publish(opened.reservation, nbytes, f"publishing differential {version}")
                    captured = {"differentials": 1, "captured_bytes": nbytes}
        finally:
            # The optimizer has stepped, whether the step was recorded or not: the next step is another version.
            self._open_differential = None
            self.version = self.trained = version
        if opened is not None and version != self._unrecorded:
            self._memory.reserve_ahead(self._stream.key(self._generation, version + 1, self._rank), opened.nbytes)
        self._count(**captured, differential_stall_s=self._scheduler.time() - began)
        if self._placement.completes(version, self._roles):
            self._nudge()
        if not self._is_anchored():
            await self.finish_base()  # until then nothing leads to this version, and that base may be given up
        due = False
        async with self._saving(version):
            due = await self._is_base_due(version)
        if due or self._base_due or self._lost():
            async with self._saving(version):
                if due:
                    await self._settle_with_others(version)
                await self._begin_base(version)
            if not self._is_anchored():
                await self.finish_base()
        self.failure = None

    async def _is_base_due(self, version: int) -> bool:
        """Whether every rank makes a base of this version. Errors: ``SaveError``; ``GroupError``."""
        refused = self._cadence.refusals.count
        try:
            return await self._cadence.is_due(version)
        except RecoveryError as error:  # of another rank, in words
            raise SaveError(str(error)) from error
        finally:
            self._count(refused_decisions=self._cadence.refusals.count - refused)

    def _is_anchored(self) -> bool:
        """Whether the newest version can be reached from a base that is in the first tier."""
        return self._anchor is not None and (self._unrecorded is None or self._anchor >= self._unrecorded)

    def _lost(self) -> bool:
        """Whether something was damaged in the first tier before it was copied on, and no base since replaces it."""
        after = self._mover.status.base_needed_after
        if after is None or after < self._begun:
            return False
        log.error("what was captured after version %d was damaged before it was copied on: a base is made", after)
        return True

    async def _settle_with_others(self, version: int) -> None:
        """Every rank calls this. Errors: ``SaveError``; ``GroupError``."""
        if self._settle is None:
            return
        await self.finish_base()
        began = self._scheduler.time()
        try:
            await self._settle(version)
        except RecoveryError as error:  # of another rank, in words
            raise SaveError(str(error)) from error
        finally:
            self._count(drain_stall_s=self._scheduler.time() - began)

    async def _begin_base(self, version: int, *, opening: bool = False) -> None:
        """Reserve memory and start the lazy copy. If the bases before have not drained, wait for them. A generation's
        opening base has none before it."""
        await self.finish_base()
        if not opening:
            await self._wait_for_room(version)
        began = self._scheduler.time()
        key = ShardKey.base(self._generation, version, self._rank)
        capture = self._stream.base(key)
        reservation = await self._memory.reserve(key, capture.nbytes_max)
        self._base = self._copier.begin(version, capture, reservation, lazily=not self._written)
        self._base_due = False
        self._begun = version
        self._stream.mark_recorded()
        self._count(base_stall_s=self._scheduler.time() - began)
        if self._written:
            await self._finish_copy()

    async def _wait_for_room(self, version: int) -> None:
        """Wait until the bases before have drained, but only once. If the durable tier takes nothing for hours and
        training goes on (``on_save_error``), training must not wait for the deadline at every iteration."""
        deadline_s = 0.0 if self._durable_is_full else self._config.deadline_s
        self._durable_is_full = True
        began = self._scheduler.time()
        try:
            await self._call_mover(self._mover.room_for_base(deadline_s), f"room for base {version}")
        finally:
            self._count(drain_stall_s=self._scheduler.time() - began)
        self._durable_is_full = False

    async def _finish_copy(self) -> None:
        """Wait until the lazy copy of a base has read the state, so that the state may change."""
        if self._base is None:
            return
        began = self._scheduler.time()
        if not await self._scheduler.ends(self._base.copied, self._config.deadline_s):
            raise SaveError(f"base {self._base.version} was not copied within {self._config.deadline_s:g} s")
        if self._base.copied.result():
            self._written = True  # the warning comes when the base is given up, and only then
        self._count(base_stall_s=self._scheduler.time() - began)
        if self._base.published.done():
            await self.finish_base()

    async def finish_base(self) -> None:
        """Wait until the base in flight, if any, is in the first tier. Errors: as :meth:`capture`."""
        base, self._base = self._base, None
        if base is None:
            return
        self._newest = None
        async with self._saving(base.version):
            if not await self._scheduler.ends(base.published, self._config.deadline_s):
                raise DeadlineExceeded(f"base {base.version} was not published in time")
            result = base.published.result()
            # The copy may have found writes that nothing else has seen: no differential holds them.
            self._doubt(self._stream.doubts.with_unseen(result.unexpected))
            if result.nbytes is None:
                log.warning("base %d is given up, since its state was written to while it was copied", base.version)
                self._written = self._base_due = True
                return
            self._newest = ShardKey.base(self._generation, base.version, self._rank)
            self._anchor = base.version
            self._count(bases=1, captured_bytes=result.nbytes)

    async def _give_up(self, version: int) -> None:
        self._unrecorded = version
        self._base_due = True  # the chain has a gap: later versions are reachable only from a new base
        opened, self._open_differential = self._open_differential, None
        if opened is not None:
            await self._memory.drop(opened.reservation, f"dropping differential {version}")
        await self._memory.drop_ahead()  # the base needs room, and perhaps the next version is no differential either

    async def _leave_out(self, version: int) -> None:
        """No differential leads to this version: it gets a base instead."""
        if not self._written:
            log.warning(
                "before version %d something other than the attached optimizer's step wrote to parameters: "
                "a version after such a write gets a base instead of a differential, which takes longer",
                version,
            )
        self._written = True
        await self._give_up(version)

    def _saving(self, version: int) -> _Saving:
        """A context for a save. If the save fails, ``on_save_error`` says what happens."""
        return _Saving(self, version, records=False)

    def _recording(self, version: int) -> _Saving:
        """The same for a part of a differential. If any part fails, for whatever reason, the whole differential is
        given up: without that part it would be replayed as if it were complete."""
        return _Saving(self, version, records=True)

    async def failed(self, version: int, error: BaseException, *, records: bool) -> bool:
        """A save has failed. Returns whether training goes on. ``records``: the save was a part of a differential.

        Errors: ``SaveError``.
        """
        if records:
            await self._give_up(version)
        if not isinstance(error, TierError | GroupError | SaveError):
            return False
        self._base_due = True
        self._count(failed_saves=1)
        message = f"version {version} could not be saved: {error}"
        if self._config.on_save_error == "fail":
            self.failure = message
            raise SaveError(message) from error
        log.error("%s; training goes on, and the next version gets a base", message)
        return True

    def _check_next(self, version: int) -> None:
        if version != self.version + 1:
            raise ValueError(f"version {version} cannot follow version {self.version}: versions are consecutive")

    async def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return await self._scheduler.call(coroutine, what=what, deadline_s=self._config.deadline_s)

    async def _call_mover(self, coroutine: Coroutine[Any, Any, object], what: str) -> None:
        try:
            await self._scheduler.call(coroutine, what=what, deadline_s=self._config.deadline_s + TOLD_S)
        except JobConflict:
            raise
        except TierCheckError as error:
            raise SaveError(f"{what}: {error}") from error

    def _nudge(self) -> None:
        self._scheduler.start(_nudge(self._mover))

    def _count(self, **more: float) -> None:
        self.stats = self.stats.plus(**more)


async def _nudge(mover: MoverHandle) -> None:
    mover.nudge()
