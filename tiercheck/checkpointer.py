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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from tiercheck import kernels
from tiercheck.agent.introduction import Introduction, peer_address
from tiercheck.background import BackgroundLoop
from tiercheck.claim import Claim
from tiercheck.config import CheckpointConfig
from tiercheck.enlistment import Enlistment
from tiercheck.errors import CapacityExceeded, ConfigurationError, DeadlineExceeded, SaveError, TierCheckError
from tiercheck.generation import open_generation, propose
from tiercheck.group import Group, SingleProcess
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.mover import Mover, Moving
from tiercheck.nomination import NominatedTier, Nomination
from tiercheck.policy.lineage import Branch, Lineage
from tiercheck.policy.placement import Placement
from tiercheck.policy.watermark import BASES_IN_VOLATILE_TIERS, SNAPSHOTS_IN_VOLATILE_TIERS, Retention
from tiercheck.recorder import Recorder, Stats
from tiercheck.restore import Recovery, Restorer, gather
from tiercheck.streams.base import base_nbytes
from tiercheck.streams.providers import StateProvider
from tiercheck.streams.recorded import stream_of
from tiercheck.types import Survives, Usage, bytes_text

__all__ = ["Checkpointer", "Stats"]

log = logging.getLogger(__name__)

T = TypeVar("T")


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
        if not isinstance(hierarchy, Hierarchy):
            raise ConfigurationError(f"hierarchy= must be a Hierarchy, such as Hierarchy.of({hierarchy!r})")
        if config is not None and not isinstance(config, CheckpointConfig):
            raise ConfigurationError(f"config= must be a CheckpointConfig, not {type(config).__name__}")
        self.config = config or CheckpointConfig()
        self._provider = provider
        self._group = group or SingleProcess()
        self._claim: Claim | None = None
        self._recorder: Recorder | None = None
        self._closed = False
        self._on_close: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._mover_life: concurrent.futures.Future[None] | None = None
        self._loop = BackgroundLoop()
        self._placed = hierarchy
        """The hierarchy as this rank sees it, once every field of its URLs is filled in."""
        self._tiers: OpenHierarchy | None = None
        self._enlistment: Enlistment | None = None
        self._mover: Moving | None = None
        try:
            nodes = self._gather("finding the agents of the nodes", lambda: self._place(hierarchy))
            self._gather("opening the tiers", lambda: self._open_tiers(nodes))
            self._begin()
        except BaseException:
            self.abort()
            raise

    # What a user asks

    @property
    def version(self) -> int:
        """The newest version captured: the number of iterations the state has behind it."""
        return self._recording.version

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def recovery(self) -> Recovery | None:
        """What was restored when this checkpointer was made; ``None`` where the tiers held nothing."""
        return self._recovery

    @property
    def stats(self) -> Stats:
        """What checkpointing has done and cost on this rank since it was attached."""
        return replace(self._recording.stats, mover=self._moving.status)

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
        self._recording.flush()

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
            drained = self._flush_at_end()  # the coordinator: the last commit
            if drained and self._enlistment is not None:
                self._enlistment.withdraw()
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
        return. With ``train_on_compressed`` they are written to, and the step must use them as they are then.
        Errors: ``SaveError`` (see ``on_save_error``); ``JobConflict``; ``ValueError`` for a version that is not the
        next one.
        """
        self._live().capture(version, gradients)

    def stepped(self, version: int) -> None:
        """The optimizer has stepped, and :meth:`complete` follows later: what else is written to the parameters from
        here on is no part of the step."""
        self._recording.stepped(version)

    def complete(self, version: int) -> None:
        """The step is done: publish the differential, and begin a base where one is due. Errors: as :meth:`capture`."""
        self._recording.complete(version)

    def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record so. Errors: as :meth:`capture`."""
        self._live().skip(version)

    def on_close(self, action: Callable[[], None]) -> None:
        """Run ``action`` when :meth:`close` is called, before anything is flushed: the integration ends an
        iteration that is still open."""
        self._on_close.append(action)

    def on_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` at the end, by :meth:`close` or :meth:`abort`: the integration takes its hooks away."""
        self._on_end.append(action)

    # How it is done

    def _place(self, hierarchy: Hierarchy) -> Any:
        """Fill in the fields of the hierarchy's URLs, and find this node's agent where it has the mover; returns what
        the other ranks need to know of it."""
        node = int_of("TIERCHECK_NODE", int_of("GROUP_RANK", 0))
        placed = hierarchy.resolved(rank=self._group.rank, local_rank=int_of("LOCAL_RANK", 0), node=node)
        self._placed = placed
        if self.config.mover == "trainer" and placed.needs_peer:
            raise ConfigurationError(
                "a neighbour's memory (peer://) is served by the agents of the nodes: leave mover at 'auto'"
            )
        if self.config.mover == "trainer" or (self.config.mover == "auto" and not placed.needs_peer):
            return None
        self._enlistment = Enlistment.of(placed, self._group.rank, self._loop, self.config.deadline_s)
        return self._enlistment.introduction(node).to_object()

    def _open_tiers(self, nodes: Sequence[Any]) -> None:
        """``nodes``: what each rank's :meth:`_place` has returned."""
        if self._placed.needs_peer:
            introductions = [Introduction.from_object(each) for each in nodes]
            self._placed = self._placed.with_peer(*peer_address(self._group.rank, introductions))
        kernels.warm_up()
        self._stream = stream_of(
            self._provider,
            self.config.codec,
            self._group.world_size,
            train_on_compressed=self.config.train_on_compressed,
            encode_threads=self.config.encode_threads,
        )
        tiers = self._placed.open()
        lasting = [tier.driver.url for tier in tiers.tiers if tier.capabilities.survives > Survives.NOTHING]
        self._claim = Claim(lasting, self._group.rank)
        # A little less than the deadline, so that the error names the tier.
        self._call(tiers.opened(0.9 * self.config.deadline_s), "opening the tiers")
        self._tiers = tiers
        self._check_gaps()
        self._check_space()

    def _check_gaps(self) -> None:
        """Errors: ``ConfigurationError`` where ranks may go on after failed saves, and nothing tells one rank which
        bases the others still have: it would delete the last one that all of them share."""
        shared = any(tier.role.shared for tier in self._opened().tiers)
        if self.config.on_save_error == "warn" and self._group.world_size > 1 and not shared:
            raise ConfigurationError(
                f'on_save_error="warn" with {self._group.world_size} ranks needs a tier that all of them share, such '
                'as nvme:///shared/path?survives=rack; add one, or use on_save_error="fail"'
            )

    def _check_space(self) -> None:
        """Errors: ``CapacityExceeded`` where the first tier cannot hold what it will have to."""
        first = self._opened().first
        usage = self._call(first.driver.usage(), f"the usage of {first.name}")
        if usage.limit_bytes is None:
            return
        residuals = self._stream.saved_with_bases()
        base = base_nbytes(self._provider, residuals) + self._stream.host_nbytes
        record = self._stream.nbytes_expected
        bases = BASES_IN_VOLATILE_TIERS + 1  # the newest two, and the one being captured
        if self._stream.supersedes:
            kind, records = "snapshots", 2 * SNAPSHOTS_IN_VOLATILE_TIERS + 1
        else:
            kind, records = "differentials", 2 * self.config.base_every + self.config.batch
        needed = bases * base + records * record + self._stream.nbytes_max
        if needed > usage.limit_bytes:
            raise CapacityExceeded(
                f"the first tier must hold {bases} bases of {bytes_text(base)} and {records} {kind} of "
                f"{bytes_text(record)}, {bytes_text(needed)} in all, but has room for "
                f"{bytes_text(usage.limit_bytes)}: give it more, or lower base_every (now {self.config.base_every})",
                tier=first.driver.url,
            )
        self._prepare_memory([(base, bases), (self._stream.nbytes_max, records)], usage)

    def _prepare_memory(self, wanted: Sequence[tuple[int, int]], usage: Usage) -> None:
        """Have the first tier's memory touched and mapped now, while nothing trains: (bytes, count) as far as there is
        room, or the tier keeps ready. What is not ready costs its first use more."""
        assert usage.free_bytes is not None and usage.limit_bytes is not None
        first = self._opened().first

        def prepare(room: int) -> None:
            sizes = fitting(wanted, room)
            self._call(first.driver.prepare_reservations(sizes), f"preparing the memory of {first.name}")

        try:
            try:
                prepare(usage.free_bytes)
            except CapacityExceeded:  # it keeps less than that beside its objects
                prepare(usage.limit_bytes // 2)
        except (CapacityExceeded, DeadlineExceeded) as error:
            log.warning("not all memory is prepared, so that the first captures take longer: %s", error)

    def _begin(self) -> None:
        """Recover, then open a generation with a base of its own."""
        tiers = self._opened()
        exact, deadline_s = self.config.exact_replay, self.config.deadline_s
        restorer = Restorer(tiers, self._provider, self._group, self._loop, deadline_s, exact=exact)
        restorer.survey()
        self._recovery = restorer.restore()
        self._stream.load(restorer.residuals)
        point = self._recovery.point if self._recovery else None
        version = point.last if point else 0
        proposal = propose(
            restorer.branches,
            restorer.claims,
            parent=point.generation if point else 0,
            left_at=version,
            world_size=self._group.world_size,
        )
        proposals = self._gather("choosing the generation", proposal.to_object)
        branch = Branch.from_object(proposals[0])
        self._generation = branch.generation
        self._stream.token = branch.token
        self._gather(
            "opening the generation",
            lambda: self._call(open_generation(tiers, branch), f"opening generation {branch.generation}"),
        )
        placement = Placement(min(self.config.batch, self.config.base_every))
        self._mover = self._make_mover(placement, Lineage.of([*restorer.branches, branch]))
        self._mover_life = self._loop.submit(self._mover.run())
        self._recorder = Recorder(
            self._stream,
            tiers,
            self._mover,
            self._loop,
            placement=placement,
            config=self.config,
            rank=self._group.rank,
            generation=branch.generation,
            version=version,
        )
        self._recorder.begin()

    def _make_mover(self, placement: Placement, lineage: Lineage) -> Moving:
        """The mover, in this process; or what stands for it here, where the node's agent has it."""
        tiers, rank, world_size = self._opened(), self._group.rank, self._group.world_size
        if self._enlistment is None:
            return Mover(
                tiers,
                rank=rank,
                world_size=world_size,
                generation=self._generation,
                placement=placement,
                retention=Retention(self.config.keep_last, self.config.keep_every, self.config.batch),
                lineage=lineage,
            )
        nomination = Nomination(
            tuple(NominatedTier(tier.name, tier.url, tier.codec) for tier in self._placed.tiers),
            node=self._enlistment.node,
            rank=rank,
            world_size=world_size,
            generation=self._generation,
            batch=placement.batch,
            keep_last=self.config.keep_last,
            keep_every=self.config.keep_every,
        )
        return self._enlistment.nominate(nomination, tiers.first.driver)

    @property
    def _recording(self) -> Recorder:
        if self._recorder is None:
            raise SaveError("the checkpointer was never opened")
        return self._recorder

    @property
    def _moving(self) -> Moving:
        if self._mover is None:
            raise SaveError("the checkpointer was never opened")
        return self._mover

    def _live(self) -> Recorder:
        """The recorder, where saving still makes sense. Errors: ``SaveError``; ``JobConflict``."""
        if self._closed:
            raise SaveError("the checkpointer is closed")
        if self._moving.conflict is not None:
            raise self._moving.conflict
        if self._mover_life is not None and self._mover_life.done():
            raise SaveError("the mover has stopped") from self._mover_life.exception()
        return self._recording

    def _opened(self) -> OpenHierarchy:
        if self._tiers is None or self._closed:
            raise SaveError("the checkpointer is closed")
        return self._tiers

    def _finish(self) -> None:
        try:
            while self._on_close:
                self._on_close.pop(0)()
        finally:
            self._flush_at_end()  # what came before is worth as much, where the last version cannot be saved

    def _flush_at_end(self) -> bool:
        """Whether everything is where policy wants it. A job that went on after failed saves does not fail at its end
        for one more."""
        try:
            self.flush()
        except SaveError as error:
            if self.config.on_save_error == "fail":
                raise
            goes_on = "" if self._enlistment is None else ", and the node's agent goes on with it"
            log.error("%s; what was captured stays in the first tier%s", error, goes_on)
            return False
        return True

    def _gather(self, what: str, produce: Callable[[], Any]) -> list[Any]:
        return gather(self._group, what, produce, deadline_s=self.config.deadline_s)

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        return self._loop.call(coroutine, what=what, deadline_s=self.config.deadline_s)

    def abort(self) -> None:
        """Give everything back without flushing. What was captured stays in the first tier. Idempotent."""
        if self._closed:
            return
        self._closed = True
        while self._on_end:
            self._on_end.pop(0)()
        if self._recorder is not None:
            self._recorder.close()
        if self._mover_life is not None:
            self._mover_life.cancel()
        try:
            try:
                if self._enlistment is not None:
                    self._enlistment.end()
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


def int_of(variable: str, default: int) -> int:
    """The environment variable as a number. Errors: ``ConfigurationError`` naming it."""
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigurationError(f"{variable} must be a number, not {text!r}") from None


def fitting(wanted: Sequence[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """Of each (bytes, count) as many as fit into what those before have left."""
    sizes: list[tuple[int, int]] = []
    for nbytes, count in wanted:
        fits = min(count, room // nbytes)
        sizes.append((nbytes, fits))
        room -= nbytes * fits
    return sizes
