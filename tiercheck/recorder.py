"""The writing side of a checkpointer: one rank's streams, into the first tier, while training goes on.

Per iteration a differential, whole or not at all; now and then a base, copied while the next forward and backward
pass run. What cannot be recorded as a differential gets a base instead, since a chain with a gap would restore
another state than the one that was.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from tiercheck import container
from tiercheck.background import BackgroundLoop
from tiercheck.config import CheckpointConfig
from tiercheck.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    GroupError,
    JobConflict,
    SaveError,
    TierCheckError,
    TierError,
)
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import ShardKey
from tiercheck.mover import MoverStatus, Moving
from tiercheck.policy.placement import Placement
from tiercheck.streams.base import BaseCapture
from tiercheck.streams.iteration import IterationCapture, IterationStream
from tiercheck.tiers.driver import Reservation

__all__ = ["Recorder", "Stats"]

log = logging.getLogger(__name__)

T = TypeVar("T")

TOLD_S = 5.0
"""What the mover may take beyond its own deadline, whose error names the tier that it waits for."""


@dataclass(frozen=True)
class Stats:
    """What checkpointing has done and cost on this rank since it was attached."""

    differentials: int = 0
    bases: int = 0
    captured_bytes: int = 0
    differential_stall_s: float = 0.0
    """Seconds training stood still for encoding and copying gradients."""
    base_stall_s: float = 0.0
    """Seconds it stood still for preparing a base, or for the end of its lazy copy."""
    drain_stall_s: float = 0.0
    """Seconds it waited because the durable tier had not taken the bases before."""
    failed_saves: int = 0
    mover: MoverStatus = field(default_factory=MoverStatus)

    @property
    def stall_s(self) -> float:
        return self.differential_stall_s + self.base_stall_s + self.drain_stall_s

    def to_object(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "stall_s": self.stall_s}


@dataclass
class _OpenRecord:
    capture: IterationCapture
    reservation: Reservation
    nbytes: int
    """Needed at most; what is reserved may be more."""


@dataclass
class _BaseInFlight:
    version: int
    copied: concurrent.futures.Future[bool]
    """Done once the state may change again: whether it has changed before."""
    published: concurrent.futures.Future[int | None]
    """Done once the base is in the first tier: its length in bytes; ``None`` where the state changed under the copy."""


class _Saving:
    """See :meth:`Recorder._saving`."""

    def __init__(self, recorder: Recorder, version: int, *, records: bool) -> None:
        self._recorder = recorder
        self._version = version
        self._records = records

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and self._recorder.failed(self._version, error, records=self._records)


class Recorder:
    """Captures versions of one rank, of one generation, from ``version`` on. One thread, the training's, calls it."""

    def __init__(
        self,
        stream: IterationStream,
        hierarchy: OpenHierarchy,
        mover: Moving,
        loop: BackgroundLoop,
        *,
        placement: Placement,
        config: CheckpointConfig,
        rank: int,
        generation: int,
        version: int,
    ) -> None:
        self.version = version
        """The newest version captured."""
        self.stats = Stats()
        self._stream = stream
        self._first = hierarchy.first
        self._roles = hierarchy.roles
        self._mover = mover
        self._loop = loop
        self._placement = placement
        self._config = config
        self._rank = rank
        self._generation = generation
        self._open_differential: _OpenRecord | None = None
        self._ahead: Reservation | None = None
        """Memory for the next version's record, where the driver gives it at once."""
        self._unrecorded: int | None = None
        """The version of which a part could not be recorded: what is left of it is worth nothing."""
        self._base: _BaseInFlight | None = None
        self._newest: ShardKey | None = None
        """The newest base in the first tier; ``None`` where the newest one failed."""
        self._rested: ShardKey | None = None
        """The base that the stream knows of."""
        self._base_due = False
        self._begun = -1
        """The version of the newest base that was begun."""
        self._stepped: int | None = None
        self._written = False
        """Somebody but the optimizer writes to what it trains: bases are copied before the step returns."""
        self._durable_is_full = False
        """A base has waited in vain for its predecessors to drain: until they do, none waits again."""
        self._copier = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tiercheck-base")

    def begin(self) -> None:
        """Capture the base that the generation opens with. Errors: ``SaveError`` (see ``on_save_error``)."""
        self._stream.mark_stepped()
        with self._saving(self.version):
            self._begin_base(self.version, opening=True)

    def capture(self, version: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of the coming step, or of a part of it, before it changes anything.

        ``gradients``: by the provider's names, in their own dtype and shape; their memory is free again on
        return. With ``train_on_compressed`` they are written to, and the step must use them as they are then.
        Errors: ``SaveError`` (see ``on_save_error``); ``JobConflict``; ``ValueError`` for a version that is not the
        next one.
        """
        self._check_next(version)
        self._finish_copy()
        began = time.perf_counter()
        with self._recording(version):
            if self._open_differential is None and version != self._unrecorded:
                if self._stream.masters_written():
                    self._leave_out(version)
                else:
                    self._begin_differential(version)
        with self._recording(version):
            if self._open_differential is not None:
                self._open_differential.capture.add(gradients)
            else:  # the whole version or nothing of it
                self._stream.leave_out(gradients, version)
        self._count(differential_stall_s=time.perf_counter() - began)

    def complete(self, version: int) -> None:
        """The step is done: publish the differential, and begin a base where one is due. Errors: as :meth:`capture`."""
        self._check_next(version)
        began = time.perf_counter()
        # What gradients do not lead to must not be published as if they did, not even while a base is on its way.
        written = self._stepped == version and self._stream.masters_written()
        self._publish_differential(version, began, skipped=False, written=written)

    def stepped(self, version: int) -> None:
        """The optimizer has stepped, and :meth:`complete` follows later: what else is written to the parameters from
        here on is no part of the step."""
        self._stepped = version
        self._stream.mark_stepped()

    def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record so. Errors: as :meth:`capture`."""
        self._check_next(version)
        self._finish_copy()
        with self._recording(version):
            if self._open_differential is None and version != self._unrecorded:
                self._begin_differential(version)
        self._publish_differential(version, time.perf_counter(), skipped=True, written=self._stream.masters_written())

    def flush(self) -> None:
        """Bring everything captured to where policy wants it. Errors: ``SaveError``; ``JobConflict``."""
        self.finish_base()
        self._call_mover(self._mover.drain(self._config.deadline_s, closing=True), "flushing the tiers")

    def close(self) -> None:
        """Wait for the copy of a base that still runs, and give back memory that no record needs. Idempotent."""
        self._copier.shutdown(wait=True, cancel_futures=True)
        self._drop_ahead()

    def _rest_on_base(self) -> bool:
        """Let the stream know the newest base, once it is in the first tier; ``False`` where there is none."""
        self.finish_base()
        if self._newest is None:
            return False
        if self._newest != self._rested:
            self._stream.rest_on(None)  # its memory can be used again
            key, tier = str(self._newest), self._first
            content = self._call(tier.driver.get(key), f"mapping {key}")
            self._stream.rest_on(container.parse(content, key=key, tier=tier.name))
            self._rested = self._newest
        return True

    def _begin_differential(self, version: int) -> None:
        """Open the version's record; what can be no change since a base is given up."""
        if self._stream.supersedes and not self._rest_on_base():
            self._give_up(version)
            return
        key, nbytes = self._stream.key(self._generation, version, self._rank), self._stream.nbytes_max
        reservation = self._take_ahead(key, nbytes) or self._reserve(key, nbytes)
        self._open_differential = _OpenRecord(self._stream.begin(key, reservation.buffer), reservation, nbytes)

    def _publish_differential(self, version: int, began: float, *, skipped: bool, written: bool) -> None:
        """``written``: whether something else than the optimizer has written to a master since its step."""
        if version != self._unrecorded and (written or self._stream.frozen_changed()):
            self._leave_out(version)
        self._stream.mark_stepped()
        captured: dict[str, int] = {}
        try:
            if (opened := self._open_differential) is not None:
                with self._recording(version):
                    nbytes = opened.capture.finish(skipped=skipped)
                    self._publish(opened.reservation, nbytes, f"publishing differential {version}")
                    captured = {"differentials": 1, "captured_bytes": nbytes}
        finally:
            # The optimizer has stepped, recorded or not: the next step must not take this version's place.
            self._open_differential = None
            self.version = version
        if opened is not None and version != self._unrecorded:
            self._reserve_ahead(version + 1, opened.nbytes)
        self._count(**captured, differential_stall_s=time.perf_counter() - began)
        if self._placement.completes(version, self._roles):
            self._nudge()
        if self._base_due or self._lost() or version % self._config.base_every == 0:
            with self._saving(version):
                self._begin_base(version)
            if version == self._unrecorded:
                self.finish_base()  # nothing else holds this version

    def _lost(self) -> bool:
        """Whether something was damaged in the first tier before it was copied on, that no base since makes up for."""
        after = self._mover.status.base_needed_after
        if after is None or after < self._begun:
            return False
        log.error("what was captured after version %d was damaged before it was copied on: a base is made", after)
        return True

    def _begin_base(self, version: int, *, opening: bool = False) -> None:
        """Reserve memory and start the lazy copy. Waits where the bases before have not drained; the one that opens a
        generation has none before it."""
        self.finish_base()
        if not opening:
            self._wait_for_room(version)
        began = time.perf_counter()
        key = ShardKey.base(self._generation, version, self._rank)
        residuals = self._stream.saved_with_bases()
        capture = BaseCapture(self._stream.provider, key, self._stream.world_size, residuals, token=self._stream.token)
        reservation = self._reserve(key, capture.nbytes_max)
        copied: concurrent.futures.Future[bool] = concurrent.futures.Future()
        published = self._copier.submit(self._copy_base, capture, reservation, copied)
        self._base = _BaseInFlight(version, copied, published)
        self._base_due = False
        self._begun = version
        self._stream.mark_recorded()
        self._count(base_stall_s=time.perf_counter() - began)
        if self._written:
            self._finish_copy()

    def _wait_for_room(self, version: int) -> None:
        """Wait until the bases before have drained: once. With a durable tier that takes nothing for hours, training
        that goes on all the same (``on_save_error``) must not stand still for the deadline at every iteration."""
        deadline_s = 0.0 if self._durable_is_full else self._config.deadline_s
        self._durable_is_full = True
        began = time.perf_counter()
        try:
            self._call_mover(self._mover.room_for_base(deadline_s), f"room for base {version}")
        finally:
            self._count(drain_stall_s=time.perf_counter() - began)
        self._durable_is_full = False

    def _copy_base(
        self, capture: BaseCapture, reservation: Reservation, copied: concurrent.futures.Future[bool]
    ) -> int | None:
        """On the copier's thread, while the next forward and backward pass run."""
        try:
            try:
                capture.copy(reservation.buffer)
            finally:
                copied.set_result(capture.disturbed)
            if capture.disturbed:
                self._call(reservation.drop(), "dropping a base")
                return None
            nbytes = capture.finish()
            self._publish(reservation, nbytes, "publishing a base")
        except BaseException:
            self._call(reservation.drop(), "dropping a base")
            raise
        self._nudge()
        return nbytes

    def _finish_copy(self) -> None:
        """Wait until the state may change: the lazy copy of a base has read it."""
        if self._base is None:
            return
        began = time.perf_counter()
        try:
            if self._base.copied.result(timeout=self._config.deadline_s):
                self._written = True  # told once the base is given up, and not again for the version that comes now
        except concurrent.futures.TimeoutError:
            raise SaveError(f"base {self._base.version} was not copied within {self._config.deadline_s:g} s") from None
        self._count(base_stall_s=time.perf_counter() - began)
        if self._base.published.done():
            self.finish_base()

    def finish_base(self) -> None:
        """Wait until the base in flight, if any, is in the first tier. Errors: as :meth:`capture`."""
        base, self._base = self._base, None
        if base is None:
            return
        self._newest = None
        with self._saving(base.version):
            try:
                nbytes = base.published.result(timeout=self._config.deadline_s)
            except concurrent.futures.TimeoutError:
                if base.published.done():  # the copier's own error, not ours
                    raise
                raise DeadlineExceeded(f"base {base.version} was not published in time") from None
            if nbytes is None:
                log.warning("base %d is given up, since its state was written to while it was copied", base.version)
                self._written = self._base_due = True
                return
            self._newest = ShardKey.base(self._generation, base.version, self._rank)
            self._count(bases=1, captured_bytes=nbytes)

    def _reserve(self, key: ShardKey, nbytes: int) -> Reservation:
        """Memory in the first tier; where it is full, after the mover has deleted what may go."""
        try:
            return self._reserved(key, nbytes)
        except CapacityExceeded:
            self._drop_ahead()
            self._call_mover(self._mover.cycle(), "making room in the first tier")
            return self._reserved(key, nbytes)

    def _reserve_ahead(self, version: int, nbytes: int) -> None:
        """Reserve as much memory for the version that comes as the record before it needed, right after that was
        published: what both run through is in the processor's caches then, and after the next forward and backward
        pass it is not."""
        key = self._stream.key(self._generation, version, self._rank)
        try:
            self._ahead = self._first.driver.reserve_at_once(str(key), nbytes)
        except TierError as error:
            log.debug("version %d finds no memory yet: %s", version, error)  # it asks again, and tells

    def _take_ahead(self, key: ShardKey, nbytes: int) -> Reservation | None:
        """What was reserved ahead for this record, if it still suffices."""
        if self._ahead is not None and self._ahead.key == str(key) and len(self._ahead.buffer) >= nbytes:
            ahead, self._ahead = self._ahead, None
            return ahead
        self._drop_ahead()
        return None

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._drop(ahead, f"giving back the memory for {ahead.key}")

    def _drop(self, reservation: Reservation, what: str) -> None:
        """Nothing is lost where that fails, but memory until the tier is closed."""
        try:
            self._call(reservation.drop(), what)
        except TierCheckError as error:
            log.warning("%s: %s", what, error)

    def _reserved(self, key: ShardKey, nbytes: int) -> Reservation:
        driver = self._first.driver
        found = driver.reserve_at_once(str(key), nbytes)
        if found is None:
            found = self._call(driver.reserve(str(key), nbytes), f"reserving memory for {key}")
        return found

    def _publish(self, reservation: Reservation, nbytes: int, what: str) -> None:
        if reservation.publish_at_once(nbytes) is None:
            self._call(reservation.publish(nbytes), what)

    def _give_up(self, version: int) -> None:
        self._unrecorded = version
        self._base_due = True  # the chain has a gap: only a base makes what follows reachable
        opened, self._open_differential = self._open_differential, None
        if opened is not None:
            self._drop(opened.reservation, f"dropping differential {version}")
        self._drop_ahead()  # the base needs room, and perhaps the next version is no differential either

    def _leave_out(self, version: int) -> None:
        """No differential leads to this version: it gets a base instead."""
        if not self._written:
            log.warning(
                "before version %d something other than the attached optimizer's step wrote to parameters: "
                "a version after such a write gets a base instead of a differential, which takes longer; and what is "
                "written after the last step is not saved",
                version,
            )
        self._written = True
        self._give_up(version)

    def _saving(self, version: int) -> _Saving:
        """What runs in it is a save: where it fails, ``on_save_error`` says what happens."""
        return _Saving(self, version, records=False)

    def _recording(self, version: int) -> _Saving:
        """The same, of a part of a differential, which is given up as a whole where any part of it fails, for whatever
        reason: published without that part it would be replayed as if it were all."""
        return _Saving(self, version, records=True)

    def failed(self, version: int, error: BaseException, *, records: bool) -> bool:
        """A save, of a part of a differential where it ``records``, has failed. Whether training goes on all the same.

        Errors: ``SaveError``.
        """
        if records:
            self._give_up(version)
        if not isinstance(error, TierError | GroupError | SaveError):
            return False
        self._base_due = True
        self._count(failed_saves=1)
        message = f"version {version} could not be saved: {error}"
        if self._config.on_save_error == "fail":
            raise SaveError(message) from error
        log.error("%s; training goes on, and the next version gets a base", message)
        return True

    def _check_next(self, version: int) -> None:
        if version != self.version + 1:
            raise ValueError(f"version {version} cannot follow version {self.version}: versions are consecutive")

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self._loop.call(coroutine, what=what, deadline_s=self._config.deadline_s)

    def _call_mover(self, coroutine: Coroutine[Any, Any, object], what: str) -> None:
        try:
            self._loop.call(coroutine, what=what, deadline_s=self._config.deadline_s + TOLD_S)
        except JobConflict:
            raise
        except TierCheckError as error:
            raise SaveError(f"{what}: {error}") from error

    def _nudge(self) -> None:
        self._loop.submit(_nudge(self._mover))

    def _count(self, **more: float) -> None:
        counts = vars(self.stats)
        self.stats = Stats(**{**counts, **{name: counts[name] + value for name, value in more.items()}})


async def _nudge(mover: Moving) -> None:
    mover.nudge()
