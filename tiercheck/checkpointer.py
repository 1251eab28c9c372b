"""The front door a training loop holds: captures every version, and resumes from the newest one.

An integration drives it through these calls an iteration, of which the user sees none::

    capture(v, gradients)      before the optimizer changes anything; several times where it steps in parts
    stepped(v)                 after it: what is written to the state from here on is no part of the step
    complete(v)                the iteration is over: version v exists and is in the first tier when this returns
    begin_iteration()          the next one begins: whether something was written to after complete(v)
    skip(v)                    instead of all that, where the step was skipped for an overflow
    close()                    at the end: everything is where policy wants it

What stalls training is only this: encoding and copying the gradients into the first tier, and, where the next
step comes before the lazy copy of a base has finished, waiting for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch

from tiercheck import kernels
from tiercheck.agent.client.endpoint import RankEndpoint, peer_address
from tiercheck.agent.client.session import AgentSession
from tiercheck.config import CheckpointConfig, int_of
from tiercheck.errors import ConfigurationError, GroupError, SaveError, TierCheckError
from tiercheck.hierarchy import Hierarchy, OpenHierarchy
from tiercheck.opening.admission import Demand, refuse_gaps
from tiercheck.opening.agreement import Agreement, clear_tiers
from tiercheck.opening.announcement import (
    begun,
    doubtful_tiers,
    nothing_outlives_a_node,
    overruled_options,
    too_little_room,
)
from tiercheck.opening.startup import open_job, prepare_memory, room_at_the_end, take_back
from tiercheck.policy.lineage import Lineage
from tiercheck.policy.placement import Placement
from tiercheck.policy.watermark import Retention
from tiercheck.recording.recorder import Recorder
from tiercheck.recording.stats import Stats
from tiercheck.recovery.ranks import Ranks, gather
from tiercheck.recovery.restorer import Recovery, Restored, Restorer
from tiercheck.replication.job import JobTier, ReplicationJob
from tiercheck.replication.mover import Mover, MoverHandle
from tiercheck.runtime.group import Group, SingleProcess
from tiercheck.runtime.loop_thread import LoopThread
from tiercheck.runtime.process_lock import ProcessLock
from tiercheck.streams.provider import StateProvider
from tiercheck.streams.stream_factory import stream_of
from tiercheck.types import Fidelity, Survives

__all__ = ["Checkpointer", "Stats"]

log = logging.getLogger(__name__)

OPEN_S_MAX = 20.0
"""How long attaching waits for a store that is away before it sees whether it is needed."""


class Checkpointer:
    """Saves and restores one rank's training state through a hierarchy of tiers.

    Making one is a collective: it opens the tiers, restores the newest version every rank can reach
    (:attr:`recovery`) and opens a new generation. Where it fails on one rank it fails on all, nothing is left open, and
    the tiers hold what they held before; what the ranks cannot agree to take back does no harm. ``caveats``: asked
    after a recovery, why what follows it would differ from an uninterrupted run; it is approximate then. Errors:
    ``ConfigurationError``, ``Mismatch``, ``RecoveryError``, ``JobConflict``, ``TierError``, ``GroupError``.
    """

    def __init__(
        self,
        provider: StateProvider,
        hierarchy: Hierarchy,
        *,
        group: Group | None = None,
        config: CheckpointConfig | None = None,
        caveats: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        if not isinstance(hierarchy, Hierarchy):
            raise ConfigurationError(f"hierarchy= must be a Hierarchy, such as Hierarchy.of({hierarchy!r})")
        if config is not None and not isinstance(config, CheckpointConfig):
            raise ConfigurationError(f"config= must be a CheckpointConfig, not {type(config).__name__}")
        self.config = config or CheckpointConfig()
        self._provider = provider
        self._caveats = caveats
        self._group = group or SingleProcess()
        self._process_lock: ProcessLock | None = None
        self._recorder: Recorder | None = None
        self._closed = False
        self._on_end_iteration: list[Callable[[], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._mover_life: concurrent.futures.Future[None] | None = None
        self._loop = LoopThread()
        self._ranks = Ranks(self._group, self._loop, self.config.deadline_s)
        self._placed = hierarchy
        """The hierarchy as this rank sees it, once every field of its URLs is filled in."""
        self._tiers: OpenHierarchy | None = None
        self._agent_session: AgentSession | None = None
        self._mover: MoverHandle | None = None
        self._agreement: Agreement | None = None
        try:
            self._ranks.gather("looking at what is to be saved", self._look)
            nodes = self._ranks.gather("finding the agents of the nodes", lambda: self._place(hierarchy))
            self._ranks.gather("opening the tiers", lambda: self._open_tiers(nodes))
            self._begin()
        except BaseException as error:
            self._give_back(error)
            raise

    # What a user asks

    @property
    def version(self) -> int:
        """The number of iterations the state has behind it. The newest one is saved once its iteration has ended."""
        return self._recording.trained

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

    def end_iteration(self) -> None:
        """Say that the loop's iteration is over: the version is saved, with everything as it is now, and survives the
        process when this returns. Call it behind the last thing that an iteration changes (schedulers, averages,
        counters), and before the next batch is drawn. If the optimizer has not stepped since, it does nothing.

        A loop that does not call it has its versions saved when the next forward pass begins. Errors: as
        :meth:`capture`.
        """
        for action in self._on_end_iteration:
            action()

    def tier_bytes(self) -> dict[str, int]:
        """Bytes in use per tier (in a shared one: those of all ranks). Looks into the tiers."""
        return {
            tier.name: self._ranks.call(tier.driver.usage(), f"the usage of {tier.name}").used_bytes
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
            deadline_s, failure = 3 * self.config.deadline_s, self._recording.failure
            gather(self._group, "the end of the job", self._finish, deadline_s=deadline_s, after=failure)
            drained = self._flush_at_end()  # the coordinator: the last commit
            if drained and self._agent_session is not None:
                self._agent_session.withdraw()
        except BaseException as error:
            self._give_back(error)
            raise
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
            self._give_back(exc)

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
        """The optimizer has stepped, and :meth:`complete` follows: what else is written to the parameters from here on
        is no part of the step."""
        self._recording.stepped(version)

    def complete(self, version: int) -> None:
        """The iteration is over: publish the differential, and begin a base where one is due. Returns once the version
        can be recovered: the first one waits for the base that its generation opens with. Errors: as :meth:`capture`.
        """
        self._recording.complete(version)

    def begin_iteration(self) -> None:
        """The next iteration begins: see whether something was written to after :meth:`complete`, which no version
        holds then. Errors: as :meth:`capture`."""
        self._live().begin_iteration()

    def recapture(self) -> bool:
        """Whether something was written to after :meth:`complete`; then the version is captured again, as a base.
        Errors: as :meth:`capture`."""
        return self._live().recapture()

    def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record so. Errors: as :meth:`capture`."""
        self._live().skip(version)

    def on_end_iteration(self, action: Callable[[], None]) -> None:
        """Run ``action`` whenever :meth:`end_iteration` is called."""
        self._on_end_iteration.append(action)

    def on_close(self, action: Callable[[], None]) -> None:
        """Run ``action`` when :meth:`close` is called, before anything is flushed: the integration ends an
        iteration that is still open."""
        self._on_close.append(action)

    def on_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` at the end, by :meth:`close` or :meth:`abort`: the integration takes its hooks away."""
        self._on_end.append(action)

    # How it is done

    def _look(self) -> None:
        """All that may refuse without a tier: the codec, and the state's being storable."""
        self._given = self._provider.hyperparameters()
        self._stream = stream_of(
            self._provider,
            self.config.codec,
            self._group.world_size,
            train_on_compressed=self.config.train_on_compressed,
            encode_threads=self.config.encode_threads,
        )

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
        self._agent_session = AgentSession.of(placed, self._group.rank, self._loop, self.config.deadline_s)
        return self._agent_session.endpoint(node).to_object()

    def _open_tiers(self, nodes: Sequence[Any]) -> None:
        """``nodes``: what each rank's :meth:`_place` has returned."""
        if self._placed.needs_peer:
            endpoints = [RankEndpoint.from_object(each) for each in nodes]
            self._placed = self._placed.with_peer(*peer_address(self._group.rank, endpoints))
        kernels.warm_up()
        tiers = self._placed.patient(min(OPEN_S_MAX, self.config.deadline_s / 4)).open()
        lasting = [tier.driver.url for tier in tiers.tiers if tier.capabilities.survives > Survives.NOTHING]
        self._process_lock = ProcessLock(lasting, self._group.rank)
        # A little less than the deadline, so that the error names the tier.
        self._ranks.call(tiers.opened(0.9 * self.config.deadline_s), "opening the tiers")
        self._tiers = tiers
        refuse_gaps(self.config, self._group.world_size, shared=any(tier.role.shared for tier in tiers.tiers))
        self._demand = Demand.of(self._stream, self.config)
        usage = self._ranks.call(tiers.first.driver.usage(), f"the usage of {tiers.first.name}")
        if usage.limit_bytes is not None:
            self._demand.check(usage.limit_bytes, self.config, tier=tiers.first.driver.url)
            prepare_memory(self._ranks, tiers, self._demand, usage)

    def _begin(self) -> None:
        """Recover, then open a generation with a base of its own."""
        tiers = self._opened()
        restart = self.config.on_nothing_left == "restart"
        restorer = Restorer(tiers, self._provider, self._ranks, exact=self.config.exact_replay, restart=restart)
        restored = restorer.restore()
        self._ranks.gather("taking over what was restored", lambda: self._take_over(restored))
        branch = open_job(self._ranks, tiers, restored)
        self._generation = branch.generation
        try:
            self._stream.token = branch.token
            lineage = Lineage.of([*restored.past.branches, branch])
            mark = clear_tiers(self._ranks, tiers, restored, branch.generation)
            read_from = self._ranks.gather("beginning to save", lambda: self._prepare(lineage, restored.version))
        except GroupError:
            raise
        except Exception:
            if self._recorder is not None:
                self._recorder.close()
            take_back(self._ranks, tiers, branch)
            raise
        if self._agent_session is not None:
            self._ranks.gather("handing the movers to the agents", self._agent_session.register)
        if self._agreement is not None:
            self._agreement.mark = mark
            self._ranks.gather("telling the movers what is whole", self._agreement.begin)
        self._mover_life = self._loop.submit(self._moving.run())
        if self._group.rank == 0:
            read = dict.fromkeys(chain.from_iterable(read_from))
            log.info("%s", begun(self._recovery, read, tiers, self._generation, self._demand.base_nbytes))
        for caution in self._found_odd:
            log.warning("%s", caution)

    def _take_over(self, restored: Restored) -> None:
        """The recovery, approximate where an uninterrupted run would go on otherwise; and the residuals."""
        recovery = restored.recovery
        if recovery is not None and recovery.version > 0 and (caveats := self._caveats()):
            recovery = replace(recovery, fidelity=Fidelity.APPROXIMATE, notes=(*recovery.notes, *caveats))
        self._recovery = recovery
        self._stream.load(restored.residuals)

    def _prepare(self, lineage: Lineage, version: int) -> list[str]:
        """Capture the base that the generation opens with. No mover runs yet, so that it can be taken back. Returns the
        tiers that this rank's state was read from."""
        placement = Placement(min(self.config.batch, self.config.base_every))
        self._mover = self._make_mover(placement, lineage)
        if Agreement.needed(self._opened(), self._group):
            self._agreement = Agreement(self._group, self._mover, self._loop, self.config.deadline_s)
        self._recorder = Recorder(
            self._stream,
            self._opened(),
            self._mover,
            self._loop,
            placement=placement,
            config=self.config,
            rank=self._group.rank,
            generation=self._generation,
            version=version,
            settle=self._agreement.settle if self._agreement else None,
        )
        self._found_odd = self._cautions()
        self._recorder.begin()
        return [tier for _, tier in self._recovery.sources] if self._recovery else []

    def _cautions(self) -> list[str]:
        """What the user may not have meant, told once a job."""
        if self._group.rank != 0:
            return []
        tiers, world_size = self._opened(), self._group.world_size
        found = [nothing_outlives_a_node(tiers, world_size), doubtful_tiers(tiers)]
        if self._recovery is not None:
            scheduled = self._provider.host_state().get("scheduler") is not None
            found.append(overruled_options(self._given, self._provider.hyperparameters(), scheduled=scheduled))
        if (usage := room_at_the_end(self._ranks, tiers)) is not None:
            found.append(too_little_room(tiers, usage, self._demand.base_nbytes, world_size, self.config))
        return [each for each in found if each is not None]

    def _make_mover(self, placement: Placement, lineage: Lineage) -> MoverHandle:
        """The mover, in this process; or what stands for it here, where the node's agent has it."""
        tiers, rank, world_size = self._opened(), self._group.rank, self._group.world_size
        if self._agent_session is None:
            return Mover(
                tiers,
                rank=rank,
                world_size=world_size,
                generation=self._generation,
                placement=placement,
                retention=Retention(self.config.keep_last, self.config.keep_every, self.config.batch),
                lineage=lineage,
            )
        job = ReplicationJob(
            tuple(JobTier(tier.name, tier.url, tier.codec) for tier in self._placed.tiers),
            node=self._agent_session.node,
            rank=rank,
            world_size=world_size,
            generation=self._generation,
            batch=placement.batch,
            keep_last=self.config.keep_last,
            keep_every=self.config.keep_every,
        )
        return self._agent_session.mover(job, tiers.first.driver)

    @property
    def _recording(self) -> Recorder:
        if self._recorder is None:
            raise SaveError("the checkpointer was never opened")
        return self._recorder

    @property
    def _moving(self) -> MoverHandle:
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
            error = self._mover_life.exception()
            raise SaveError(f"the mover has stopped: {error}" if error else "the mover has stopped") from error
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
            goes_on = "" if self._agent_session is None else ", and the node's agent goes on with it"
            log.error("%s; what was captured stays in the first tier%s", error, goes_on)
            return False
        return True

    def abort(self) -> None:
        """Give everything back without flushing. What was captured stays in the first tier. Idempotent.

        Errors: what the first action of :meth:`on_end` that fails raises, when everything is given back.
        """
        if (error := self._give_back()) is not None:
            raise error

    def _give_back(self, error: BaseException | None = None) -> BaseException | None:
        """As :meth:`abort`. Returns the first error, ``error`` where there is one; later ones are notes of it."""
        if self._closed:
            return error
        self._closed = True
        while self._on_end:
            try:
                self._on_end.pop(0)()
            except Exception as later:  # noqa: BLE001  raised, or a note of what is raised
                if error is None:
                    error = later
                else:
                    error.add_note(f"then, at the end: {type(later).__name__}: {later}")
        if self._recorder is not None:
            self._recorder.close()
        if self._mover_life is not None:
            self._mover_life.cancel()
        try:
            try:
                if self._agent_session is not None:
                    self._agent_session.end()
                if self._tiers is not None:
                    self._ranks.call(self._tiers.__aexit__(None, None, None), "closing the tiers")
            finally:
                self._loop.close()
        except TierCheckError as error:
            log.warning("closing the tiers: %s", error)
        finally:
            if self._process_lock is not None:
                self._process_lock.release()
            self._group.close()
        return error
