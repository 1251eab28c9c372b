"""The front door a training loop holds: captures every version, and resumes from the newest one.

An integration drives it through these calls an iteration, of which the user sees none::

    capture(v, gradients)      before the optimizer changes anything; several times where it steps in parts
    stepped(v)                 after it: what is written to the state from here on is no part of the step
    complete(v)                the iteration is over: version v is in the first tier when this returns
    begin_iteration()          the next one begins: whether something was written to after complete(v)
    skip(v)                    instead of all that, where the step was skipped for an overflow
    close()                    at the end: everything is where policy wants it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType

import torch

from tiercheck.agent.client.session import AgentSession
from tiercheck.config import CheckpointConfig, refuse_other_kind
from tiercheck.errors import ConfigurationError, SaveError, UnsupportedSetup
from tiercheck.folding.launch import trainers_process
from tiercheck.hierarchy import Hierarchy
from tiercheck.opening.job import OpenedJob
from tiercheck.opening.startup import open_job
from tiercheck.policy.policies import Policies
from tiercheck.policy.recovery.lost_stage import LostStage
from tiercheck.policy.recovery.request import Request
from tiercheck.recording.stats import Stats
from tiercheck.recovery.report import Recovery
from tiercheck.runtime.front import of_this_process, run
from tiercheck.runtime.group import BlockingGroup, Group, SingleProcess
from tiercheck.runtime.shutdown import threads_have_ended
from tiercheck.streams.loading import Loading
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.streams.tensors.stage import PipelineStage
from tiercheck.streams.tensors.tensor_state import TensorState

__all__ = ["Checkpointer", "Stats"]


class Checkpointer(AbstractContextManager["Checkpointer"]):
    """Saves and restores one rank's training state through a hierarchy of tiers.

    Making one is a collective: it opens the tiers, restores the newest version every rank can reach
    (:attr:`recovery`) and opens a new generation. If it fails on one rank it fails on all, nothing is left open, and
    the tiers hold what they held before, or an empty generation more. ``request``: another version to begin with.
    ``loading``: how a checkpoint of another model is loaded; by default it is refused. ``caveats``: asked after a
    recovery, why what follows it would differ from an uninterrupted run; it is approximate then. ``before_bases``:
    called on every rank when all of them are about to make a base. ``stage``: of the pipeline, if the job is one.
    ``on_lost_stage``: what is done if no copy of a stage is left; by default the start is refused. Errors:
    ``ConfigurationError``, ``Mismatch``, ``RecoveryError``, ``JobConflict``, ``TierError``, ``GroupError``,
    ``DeadlineExceeded``.
    """

    def __init__(
        self,
        provider: StateProvider,
        hierarchy: Hierarchy,
        *,
        group: Group | None = None,
        config: CheckpointConfig | None = None,
        policies: Policies | None = None,
        request: Request | None = None,
        loading: Loading | None = None,
        caveats: Callable[[], Sequence[str]] = tuple,
        before_bases: Callable[[], None] | None = None,
        stage: PipelineStage | None = None,
        on_lost_stage: LostStage | None = None,
    ) -> None:
        if not isinstance(hierarchy, Hierarchy):
            tiers = hierarchy if isinstance(hierarchy, list | tuple) else [hierarchy]
            such_as = f"Hierarchy.of({', '.join(map(repr, tiers))})"
            raise ConfigurationError(f"hierarchy= must be a Hierarchy, such as {such_as}")
        refuse_other_kind("config", config, CheckpointConfig)
        refuse_other_kind("request", request, Request)
        refuse_other_kind("loading", loading, Loading)
        refuse_other_kind("on_lost_stage", on_lost_stage, LostStage)
        self.config = config or CheckpointConfig()
        self._on_end_iteration: list[Callable[[bool], None]] = []
        self._on_close: list[Callable[[], object]] = []
        self._process = os.getpid()
        runtime = of_this_process()
        try:
            self._opened = run(
                open_job(
                    TensorState(provider, self.config, loading, stage),
                    hierarchy,
                    group=BlockingGroup(group or SingleProcess()),
                    runtime=runtime,
                    find_agent=AgentSession.of,
                    fold_process=trainers_process,
                    config=self.config,
                    policies=policies,
                    request=request,
                    caveats=caveats,
                    before_bases=before_bases,
                    on_lost_stage=on_lost_stage,
                )
            )
        except BaseException:  # an interrupt may come before the job has taken it over
            run(runtime.scheduler.close())
            raise

    @property
    def version(self) -> int:
        """The number of iterations the state has behind it. The newest one is saved once its iteration has ended."""
        return self._opened.recorder.trained

    @property
    def generation(self) -> int:
        return self._opened.generation

    @property
    def recovery(self) -> Recovery | None:
        """What was restored when this checkpointer was made; ``None`` if the tiers held nothing."""
        return self._opened.recovery

    @property
    def stats(self) -> Stats:
        """What checkpointing has done and cost on this rank since it was attached."""
        return replace(self._opened.recorder.stats, mover=self._opened.mover.status)

    def end_iteration(self, *, ends_epoch: bool = False) -> None:
        """Say that the loop's iteration is over: the version is saved as everything is now, and survives the process
        when this returns. Call it behind the last thing that an iteration changes (schedulers, counters), and before
        the next batch is drawn. If the optimizer has not stepped since, it does nothing.

        ``ends_epoch``: an epoch is over with it. A process that resumes there begins the next one as this one does
        now, with the random numbers that ``iter(DataLoader)`` draws; in the middle of an epoch only a process that
        resumes draws them, and they are taken back.

        A loop that does not call it has its versions saved when the next forward pass begins. Errors: as
        :meth:`capture`."""
        self._check_process()
        for action in self._on_end_iteration:
            action(ends_epoch)

    def report(self, **metrics: float) -> None:
        """Report what was measured of this :attr:`version`, for policies that keep the best. Rank 0's values count.
        Errors: ``SaveError`` (see ``on_save_error``); ``ConfigurationError`` for a second value of the version."""
        run(self._job.report(metrics))

    def tier_bytes(self) -> dict[str, int]:
        """Bytes in use per tier (in a shared one: those of all ranks). Looks into the tiers."""
        return run(self._job.tier_bytes())

    def flush(self) -> None:
        """Bring everything captured to where policy wants it, and return when it is there. Errors: ``SaveError`` naming
        a tier that does not take it in time, and its error."""
        run(self._job.flush())

    def close(self) -> None:
        """Flush, let the coordinator commit what all ranks have brought, and give everything back. Idempotent. Errors:
        as :meth:`flush`, and ``RecoveryError`` if another rank could not; everything is given back all the same. In a
        process that was forked from the one that attached it does nothing: all of it is that one's. In a function of
        ``atexit`` it is too late: ``SaveError``."""
        if self._is_forked or self._opened.resources.given_back:
            return
        if threads_have_ended():
            raise SaveError(
                "nothing can be flushed: the interpreter ends its threads before it calls functions of atexit; "
                "what was captured stays in the first tier. Close the checkpointer at the end of the script, by a "
                "'with' block or 'finally'"
            )
        try:
            run(self._job.end(self._on_close))
        except BaseException as error:
            run(self._job.resources.give_back(error))
            raise
        self.abort()

    def abort(self) -> None:
        """Give everything back without flushing. What was captured stays in the first tier. Idempotent. Errors: that of
        the first action of :meth:`on_end` that fails, when everything is given back. In a forked process: as
        :meth:`close`. In a function of ``atexit`` it leaves that to the end of the process."""
        if self._is_forked or threads_have_ended():
            return
        if error := run(self._job.resources.give_back()):
            raise error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None or self._is_forked:
            self.close()
        else:  # other ranks may be anywhere; what was captured stays in the first tier, and is found at the restart
            run(self._job.resources.give_back(error))

    # What an integration calls

    def capture(self, version: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of the coming step, or of a part of it, before it changes anything. ``gradients`` and
        errors: as of :meth:`~tiercheck.recording.recorder.Recorder.capture`."""
        run(self._job.live().capture(version, gradients))

    def part_stepped(self) -> None:
        """One of several optimizers has stepped: what is written from here to the next one's :meth:`capture`, or to
        :meth:`stepped`, is no part of the step."""
        self._job.recorder.part_stepped()

    def cannot_be_replayed(self) -> None:
        """The step has done what no replay of the gradients does: its version gets a base. Before :meth:`stepped`."""
        self._job.recorder.cannot_be_replayed()

    def stepped(self, version: int) -> None:
        """The optimizer has stepped: what is written from here to :meth:`complete` is no part of the step."""
        self._job.recorder.stepped(version)

    def complete(self, version: int) -> None:
        """The iteration is over: publish the differential, and begin a base if one is due. Returns when the version can
        be recovered: the first one waits for the base that its generation opens with. Errors: as :meth:`capture`."""
        run(self._job.recorder.complete(version))

    def begin_iteration(self) -> None:
        """The next iteration begins: see whether something was written to after :meth:`complete`, which no version
        holds then. Errors: as :meth:`capture`."""
        run(self._job.live().begin_iteration())

    def written(self) -> tuple[str, ...]:
        """What was written to since the newest version was saved, and is in no version; nothing once this is closed."""
        return () if self._opened.resources.given_back else self._opened.recorder.written()

    def recapture(self, *, moved: bool = False) -> bool:
        """Whether something was written to after :meth:`complete`; then a base of the version is captured. ``moved``:
        the caller has seen that something was. Errors: as :meth:`capture`."""
        return run(self._job.live().recapture(moved=moved))

    def make_up(self) -> None:
        """If an interrupt has kept the newest version out of the first tier, a base of it is captured; nothing once
        this is closed. Errors: as :meth:`capture`."""
        if not self._opened.resources.given_back:
            run(self._job.live().make_up())

    def skip(self, version: int) -> None:
        """The iteration counts, but its step was skipped: record so. Errors: as :meth:`capture`."""
        run(self._job.live().skip(version))

    def on_end_iteration(self, action: Callable[[bool], None]) -> None:
        """Run ``action`` whenever :meth:`end_iteration` is called, with its ``ends_epoch``."""
        self._on_end_iteration.append(action)

    def on_close(self, action: Callable[[], object]) -> None:
        """Run ``action`` when :meth:`close` is called, before anything is flushed: it ends an open iteration."""
        self._on_close.append(action)

    def on_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` at the end, by :meth:`close` or :meth:`abort`: the integration takes its hooks away."""
        self._job.resources.on_end.append(action)

    # Details

    @property
    def _job(self) -> OpenedJob:
        """To work with. Errors: as :meth:`_check_process`."""
        self._check_process()
        return self._opened

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the one that attached. It has none of its threads, and shares its memory:
        what it captured would overwrite what the other one is saving."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Errors: ``UnsupportedSetup`` in a forked process."""
        if self._is_forked:
            raise UnsupportedSetup(
                f"process {os.getpid()} was forked from process {self._process}, which attached the job and alone "
                "saves it: train there, or fork before you attach; nothing was saved"
            )
