"""The front door a training loop holds: captures every version, and resumes from the newest one.

An integration drives it through these calls an iteration, of which the user sees none::

    capture(v, gradients)      before the optimizer changes anything; several times where it steps in parts
    stepped(v)                 after it, where complete(v) does not follow at once
    complete(v)                the iteration is over: version v exists and is in the first tier when this returns
    skip(v)                    instead of both, where the step was skipped for an overflow
    close()                    at the end: everything is where policy wants it

What stalls training is only this: encoding and copying the gradients into the first tier, and, where the next
step comes before the lazy copy of a base has finished, waiting for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from tiercheck import kernels
from tiercheck.background import BackgroundLoop
from tiercheck.claim import Claim
from tiercheck.config import CheckpointConfig
from tiercheck.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    GroupError,
    SaveError,
    TierCheckError,
    TierError,
)
from tiercheck.generation import open_generation, propose
from tiercheck.group import Group, SingleProcess
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.keys import ShardKey
from tiercheck.mover import Mover, MoverStatus
from tiercheck.policy.lineage import Branch
from tiercheck.policy.placement import Placement
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, Retention
from tiercheck.restore import Recovery, Restorer, gather
from tiercheck.streams.base import BaseCapture, base_nbytes
from tiercheck.streams.differential import DifferentialCapture, DifferentialStream
from tiercheck.streams.providers import StateProvider
from tiercheck.tiers.driver import Reservation
from tiercheck.types import Survives

__all__ = ["Checkpointer", "Stats"]

log = logging.getLogger(__name__)

T = TypeVar("T")


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
class _OpenDifferential:
    capture: DifferentialCapture
    reservation: Reservation


@dataclass
class _BaseInFlight:
    version: int
    copied: concurrent.futures.Future[None]
    """Done once the state may change again."""
    published: concurrent.futures.Future[int | None]
    """Done once the base is in the first tier: its length in bytes; ``None`` where the state changed under the copy."""


class Checkpointer:
    """Saves and restores one rank's training state through a hierarchy of tiers.

    Making one is a collective: it opens the tiers, restores the newest version every rank can reach
    (:attr:`recovery`) and opens a new generation. Errors: ``ConfigurationError``, ``Mismatch``,
    ``RecoveryError``, ``JobConflict``, ``TierError``, ``GroupError``; nothing is left open then.
    """

    def __init__(
        self,
        provider: StateProvider,
        hierarchy: Hierarchy,
        *,
        group: Group | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        self.config = config or CheckpointConfig()
        self._provider = provider
        self._group = group or SingleProcess()
        self._stats = Stats()
        self._claim: Claim | None = None
        self._open_differential: _OpenDifferential | None = None
        self._unrecorded: int | None = None
        """The version of which a part could not be recorded: what is left of it is worth nothing."""
        self._base: _BaseInFlight | None = None
        self._base_due = False
        self._stepped: int | None = None
        self._written = False
        """Somebody but the optimizer writes to what it trains: bases are copied before the step returns."""
        self._durable_is_full = False
        """A base has waited in vain for its predecessors to drain: until they do, none waits again."""
        self._closed = False
        self._on_close: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._mover_life: concurrent.futures.Future[None] | None = None
        self._copier = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tiercheck-base")
        self._loop = BackgroundLoop()
        self._tiers: OpenHierarchy | None = None
        try:
            self._gather("opening the tiers", lambda: self._open_tiers(hierarchy))
            self._begin()
        except BaseException:
            self.abort()
            raise

    # What a user asks

    @property
    def version(self) -> int:
        """The newest version captured: the number of iterations the state has behind it."""
        return self._version

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def recovery(self) -> Recovery | None:
        """What was restored when this checkpointer was made; ``None`` where the job began at version 0."""
        return self._recovery

    @property
    def stats(self) -> Stats:
        return replace(self._stats, mover=self._mover.status)

    def tier_bytes(self) -> dict[str, int]:
        """Bytes in use per tier (in a shared one: those of all ranks). Looks into the tiers."""
        return {
            tier.name: self._call(tier.driver.usage(), f"the usage of {tier.name}").used_bytes
            for tier in self._opened().tiers
        }

    def flush(self) -> None:
        """Bring everything captured to where policy wants it, and return when it is there.

        Errors: ``SaveError`` where a tier does not take it in time; it names the tier and its error.
        """
        self._opened()
        self._finish_base()
        self._call_mover(self._mover.drain(self.config.deadline_s, closing=True), "flushing the tiers")

    def close(self) -> None:
        """Flush, let the coordinator commit what all ranks have brought, and give everything back. Idempotent.

        Errors: as :meth:`flush`, and ``RecoveryError`` where another rank could not; everything is given back all
        the same.
        """
        if self._closed:
            return
        try:
            # A rank that fails tells the others, which may have to wait as long as it tried.
            gather(self._group, "the end of the job", self._finish, deadline_s=3 * self.config.deadline_s)
            self._call_mover(self._mover.drain(self.config.deadline_s, closing=True), "the last commit")
        finally:
            self.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            # Other ranks may be anywhere. What was captured stays in the first tier and is found at the restart.
            self.abort()

    # What an integration calls

    def capture(self, version: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of the coming step, or of a part of it, before it changes anything.

        ``gradients``: by the provider's names, in their own dtype and shape; their memory is free again on
        return. Errors: ``SaveError`` (see ``on_save_error``); ``JobConflict``; ``ValueError`` for a version
        that is not the next one.
        """
        self._check_life()
        self._check_next(version)
        self._finish_copy()
        began = time.perf_counter()
        with self._saving(version), self._recording(version):
            if self._open_differential is None and version != self._unrecorded and self._stream.masters_written():
                self._leave_out(version)
            if version == self._unrecorded:
                return  # the whole of it or nothing
            if self._open_differential is None:
                self._open_differential = self._begin_differential(version)
            self._open_differential.capture.add(gradients)
        self._count(differential_stall_s=time.perf_counter() - began)

    def complete(self, version: int) -> None:
        """The step is done: publish the differential, and begin a base where one is due. Errors: as :meth:`capture`."""
        self._check_next(version)
        if self._stepped != version:
            self.stepped(version)
        self._publish_differential(version, skipped=False)

    def stepped(self, version: int) -> None:
        """The optimizer has stepped, and :meth:`complete` follows later: what else is written to the parameters from
        here on is no part of the step."""
        self._stepped = version
        self._stream.mark_stepped()

    def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record so. Errors: as :meth:`capture`."""
        self._check_life()
        self._check_next(version)
        self._finish_copy()
        with self._saving(version), self._recording(version):
            if self._open_differential is None and version != self._unrecorded:
                self._open_differential = self._begin_differential(version)
        self._publish_differential(version, skipped=True)

    def on_close(self, action: Callable[[], None]) -> None:
        """Run ``action`` when :meth:`close` is called, before anything is flushed: the integration ends an
        iteration that is still open."""
        self._on_close.append(action)

    def on_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` at the end, by :meth:`close` or :meth:`abort`: the integration takes its hooks away."""
        self._on_end.append(action)

    # How it is done

    def _open_tiers(self, hierarchy: Hierarchy) -> None:
        kernels.warm_up()
        self._stream = DifferentialStream(self._provider, self.config.codec, self._group.world_size)
        tiers = hierarchy.open(
            rank=self._group.rank,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            node=int(os.environ.get("TIERCHECK_NODE", os.environ.get("GROUP_RANK", "0"))),
        )
        lasting = [tier.driver.url for tier in tiers.tiers if tier.capabilities.survives > Survives.NOTHING]
        self._claim = Claim(lasting, self._group.rank)
        self._call(tiers.__aenter__(), "opening the tiers")
        self._tiers = tiers
        self._check_space()

    def _check_space(self) -> None:
        """Errors: ``CapacityExceeded`` where the first tier cannot hold what it will have to."""
        first = self._opened().first
        usage = self._call(first.driver.usage(), f"the usage of {first.name}")
        if usage.limit_bytes is None:
            return
        base = base_nbytes(self._provider) + self._stream.host_nbytes
        differential = self._stream.nbytes_expected
        bases = BASES_IN_VOLATILE_TIERS + 1  # the newest two, and the one being captured
        differentials = 2 * self.config.base_every + self.config.batch
        needed = bases * base + differentials * differential + self._stream.nbytes_max
        if needed > usage.limit_bytes:
            raise CapacityExceeded(
                f"the first tier must hold {bases} bases of {_mib(base)} and {differentials} differentials of "
                f"{_mib(differential)}, {_mib(needed)} in all, but has room for {_mib(usage.limit_bytes)}: "
                f"give it more, or lower base_every (now {self.config.base_every})",
                tier=first.driver.url,
            )

    def _begin(self) -> None:
        """Recover, then open a generation with a base of its own."""
        tiers = self._opened()
        restorer = Restorer(tiers, self._provider, self._group, self._loop, self.config.deadline_s)
        restorer.survey()
        self._recovery = restorer.restore()
        point = self._recovery.point if self._recovery else None
        self._version = point.last if point else 0
        proposal = propose(
            restorer.branches,
            parent=point.generation if point else 0,
            left_at=self._version,
            world_size=self._group.world_size,
        )
        proposals = self._gather("choosing the generation", proposal.to_object)
        branch = Branch.from_object(proposals[0])
        self._generation = branch.generation
        self._gather(
            "opening the generation",
            lambda: self._call(open_generation(tiers, branch), f"opening generation {branch.generation}"),
        )
        self._placement = Placement(self.config.batch)
        self._mover = Mover(
            tiers,
            rank=self._group.rank,
            world_size=self._group.world_size,
            generation=branch.generation,
            placement=self._placement,
            retention=Retention(self.config.keep_last, self.config.keep_every),
        )
        self._mover_life = self._loop.submit(self._mover.run())
        self._stream.mark_stepped()
        with self._saving(self._version):
            self._begin_base(self._version)

    def _begin_differential(self, version: int) -> _OpenDifferential:
        key = ShardKey.differential(self._generation, version, version, self._group.rank)
        reservation = self._reserve(key, self._stream.nbytes_max)
        return _OpenDifferential(self._stream.begin(key, reservation.buffer), reservation)

    def _publish_differential(self, version: int, *, skipped: bool) -> None:
        began = time.perf_counter()
        # What gradients do not lead to must not be published as if they did, not even while a base is on its way.
        if version != self._unrecorded and (self._stream.masters_written() or self._stream.frozen_changed()):
            self._leave_out(version)
        self._stream.mark_stepped()
        try:
            if (opened := self._open_differential) is not None:
                with self._saving(version), self._recording(version):
                    nbytes = opened.capture.finish(skipped=skipped)
                    self._call(opened.reservation.publish(nbytes), f"publishing differential {version}")
                    self._count(differentials=1, captured_bytes=nbytes)
        finally:
            # The optimizer has stepped, recorded or not: the next step must not take this version's place.
            self._open_differential = None
            self._version = version
        self._count(differential_stall_s=time.perf_counter() - began)
        if version == self._placement.window(version)[-1]:
            self._nudge()  # a batch is complete; between batches there is nothing to move
        if self._base_due or version % self.config.base_every == 0:
            with self._saving(version):
                self._begin_base(version)
            if version == self._unrecorded:
                self._finish_base()  # nothing else holds this version

    def _begin_base(self, version: int) -> None:
        """Reserve memory and start the lazy copy. Waits where the bases before have not drained."""
        self._finish_base()
        self._wait_for_room(version)
        began = time.perf_counter()
        key = ShardKey.base(self._generation, version, self._group.rank)
        capture = BaseCapture(self._provider, key, self._group.world_size)
        reservation = self._reserve(key, capture.nbytes_max)
        copied: concurrent.futures.Future[None] = concurrent.futures.Future()
        published = self._copier.submit(self._copy_base, capture, reservation, copied)
        self._base = _BaseInFlight(version, copied, published)
        self._base_due = False
        self._stream.mark_recorded()
        self._count(base_stall_s=time.perf_counter() - began)
        if self._written:
            self._finish_copy()

    def _wait_for_room(self, version: int) -> None:
        """Wait until the bases before have drained: once. With a durable tier that takes nothing for hours, training
        that goes on all the same (``on_save_error``) must not stand still for the deadline at every iteration."""
        deadline_s = 0.0 if self._durable_is_full else self.config.deadline_s
        self._durable_is_full = True
        began = time.perf_counter()
        try:
            self._call_mover(self._mover.room_for_base(deadline_s), f"room for base {version}")
        finally:
            self._count(drain_stall_s=time.perf_counter() - began)
        self._durable_is_full = False

    def _copy_base(
        self, capture: BaseCapture, reservation: Reservation, copied: concurrent.futures.Future[None]
    ) -> int | None:
        """On the copier's thread, while the next forward and backward pass run."""
        try:
            try:
                capture.copy(reservation.buffer)
            finally:
                copied.set_result(None)
            if capture.disturbed:
                self._call(reservation.drop(), "dropping a base")
                return None
            nbytes = capture.finish()
            self._call(reservation.publish(nbytes), "publishing a base")
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
            self._base.copied.result(timeout=self.config.deadline_s)
        except concurrent.futures.TimeoutError:
            raise SaveError(f"base {self._base.version} was not copied within {self.config.deadline_s:g} s") from None
        self._count(base_stall_s=time.perf_counter() - began)
        if self._base.published.done():
            self._finish_base()

    def _finish_base(self) -> None:
        """Wait until the base in flight, if any, is in the first tier."""
        base, self._base = self._base, None
        if base is None:
            return
        with self._saving(base.version):
            try:
                nbytes = base.published.result(timeout=self.config.deadline_s)
            except concurrent.futures.TimeoutError:
                if base.published.done():  # the copier's own error, not ours
                    raise
                raise DeadlineExceeded(f"base {base.version} was not published in time") from None
            if nbytes is None:
                log.warning("base %d is given up, since its state was written to while it was copied", base.version)
                self._written = self._base_due = True
                return
            self._count(bases=1, captured_bytes=nbytes)

    def _reserve(self, key: ShardKey, nbytes: int) -> Reservation:
        """Memory in the first tier; where it is full, after the mover has deleted what may go."""
        driver = self._opened().first.driver
        try:
            return self._call(driver.reserve(str(key), nbytes), f"reserving memory for {key}")
        except CapacityExceeded:
            self._call_mover(self._mover.cycle(), "making room in the first tier")
            return self._call(driver.reserve(str(key), nbytes), f"reserving memory for {key}")

    @contextmanager
    def _recording(self, version: int) -> Iterator[None]:
        """Give up the differential as a whole where any part of it fails, for whatever reason: published without
        that part it would be replayed as if it were all."""
        try:
            yield
        except BaseException:
            self._give_up(version)
            raise

    def _give_up(self, version: int) -> None:
        self._unrecorded = version
        self._base_due = True  # the chain has a gap: only a base makes what follows reachable
        opened, self._open_differential = self._open_differential, None
        if opened is not None:
            try:
                self._call(opened.reservation.drop(), "dropping a differential")
            except TierCheckError as error:
                log.warning("dropping differential %d: %s", version, error)

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

    @contextmanager
    def _saving(self, version: int) -> Iterator[None]:
        """Turn a failed save into what ``on_save_error`` asks for."""
        try:
            yield
        except (TierError, GroupError, SaveError) as error:
            self._base_due = True
            self._count(failed_saves=1)
            message = f"version {version} could not be saved: {error}"
            if self.config.on_save_error == "fail":
                raise SaveError(message) from error
            log.error("%s; training goes on, and the next version gets a base", message)

    def _check_next(self, version: int) -> None:
        if version != self._version + 1:
            raise ValueError(f"version {version} cannot follow version {self._version}: versions are consecutive")

    def _check_life(self) -> None:
        if self._closed:
            raise SaveError("the checkpointer is closed")
        if self._mover.conflict is not None:
            raise self._mover.conflict
        if self._mover_life is not None and self._mover_life.done():
            raise SaveError("the mover has stopped") from self._mover_life.exception()

    def _opened(self) -> OpenHierarchy:
        if self._tiers is None or self._closed:
            raise SaveError("the checkpointer is closed")
        return self._tiers

    def _finish(self) -> None:
        try:
            while self._on_close:
                self._on_close.pop(0)()
        finally:
            self.flush()  # what came before is worth as much, where the last version cannot be saved

    def _gather(self, what: str, produce: Callable[[], Any]) -> list[Any]:
        return gather(self._group, what, produce, deadline_s=self.config.deadline_s)

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self._loop.call(coroutine, what=what, deadline_s=self.config.deadline_s)

    def _call_mover(self, coroutine: Coroutine[Any, Any, object], what: str) -> None:
        try:
            # The mover's own deadline names the tier it waits for, so it must come first.
            self._loop.call(coroutine, what=what, deadline_s=2 * self.config.deadline_s)
        except DeadlineExceeded as error:
            raise SaveError(f"{what}: {error}") from error

    def _nudge(self) -> None:
        self._loop.submit(_nudge(self._mover))

    def _count(self, **more: float) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + value for name, value in more.items()})

    def abort(self) -> None:
        """Give everything back without flushing. What was captured stays in the first tier. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._on_end:
            self._on_end.pop(0)()
        self._copier.shutdown(wait=True, cancel_futures=True)
        if self._mover_life is not None:
            self._mover_life.cancel()
        try:
            try:
                if self._tiers is not None:
                    self._call(self._tiers.__aexit__(None, None, None), "closing the tiers")
            finally:
                self._loop.close()
        except TierCheckError as error:
            log.warning("closing the tiers: %s", error)
        finally:
            if self._claim is not None:
                self._claim.release()
            self._group.close()


async def _nudge(mover: Mover) -> None:
    mover.nudge()


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
