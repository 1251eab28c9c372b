"""The training state of a provider whose tensors are torch's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from tiercheck import kernels
from tiercheck.config import CheckpointConfig
from tiercheck.format.container import Shard
from tiercheck.kernels.threads import processors_of_rank
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.codecs import codec
from tiercheck.streams.codecs.exact import Exact
from tiercheck.streams.device.cuda import finish_all
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.gradients.encoder import forget_sent
from tiercheck.streams.loading import Loading
from tiercheck.streams.records.base import BaseState, PackedIndex, read_base
from tiercheck.streams.records.expected import Expected
from tiercheck.streams.records.recorded import Differential, read_differentials
from tiercheck.streams.records.snapshot import SNAPSHOT_CODECS, advanced
from tiercheck.streams.records.stream_factory import kernels_used, stream_of
from tiercheck.streams.replay.fidelity import reached
from tiercheck.streams.replay.replay import STEPS_AT_ONCE, replay_runs, threads_granted
from tiercheck.streams.replay.runs import Run, check_fits, decode_run
from tiercheck.streams.stage import StageState
from tiercheck.streams.state import (
    Conversion,
    FoldShards,
    MakeRuns,
    Rebuilt,
    ReplayRate,
    StateStream,
)
from tiercheck.streams.tensors.placing import placed
from tiercheck.streams.tensors.provider import StateProvider
from tiercheck.streams.tensors.stage import PipelineStage, TensorStage
from tiercheck.types import Fidelity

__all__ = ["TensorReader", "TensorState"]


CALLED_ELEMENTS_MAX = 1 << 29
"""Elements of all steps together that a start leaves to the optimizer while no kernel is ready. To make one ready takes
a second in a new process: Numba is imported, and the kernel loaded and tried, and other threads of Python wait for most
of that. On one slow core the fused optimizer needs 2.5 ns for an element of a step, its gradient copied for the call,
and its kernel 1.2 ns: a second is 800 million elements."""


class TensorState:
    """See :class:`~tiercheck.streams.state.TrainingState`."""

    def __init__(
        self,
        provider: StateProvider,
        config: CheckpointConfig,
        loading: Loading | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        self._provider = provider
        self._config = config
        self._loading = loading or Loading()
        self._stage = stage

    def prepare(self, codecs: Collection[str] = ()) -> None:
        config = self._config
        used = kernels_used(config.codec, train_on_compressed=config.train_on_compressed)
        if config.codec == Exact.name:
            used = ()  # which most gradients never call
        kernels.warm_up([*used, *(each for text in codecs for each in codec(text).kernels_used())])

    def stream(self, world_size: int) -> StateStream:
        return stream_of(
            self._provider,
            self._config.codec,
            world_size,
            train_on_compressed=self._config.train_on_compressed,
            encode_threads=self._config.encode_threads,
            gpu_staging_bytes=self._config.gpu_staging_bytes,
            gpu_feedback=self._config.gpu_feedback,
        )

    def reader(self) -> TensorReader:
        threads = self._config.recovery_threads or processors_of_rank()
        return TensorReader(
            self._provider,
            threads=threads,
            exact=self._config.exact_replay,
            called_elements_max=CALLED_ELEMENTS_MAX,
        )

    def replay_rate(self) -> tuple[int, Callable[[], ReplayRate]]:
        from tiercheck.streams.replay.rate import replay_rate  # few starts need it

        elements = sum(each.numel() for each in self._provider.masters().values())
        return elements, partial(replay_rate, self._provider.identity(), self._provider.hyperparameters(), elements)

    def layout(self) -> str:
        identity = self._provider.identity()
        meaning = PackedIndex(self._provider).of_now()  # partitions of one shape may hold other parameters
        return f"{identity.framework} {identity.model} {meaning.checksum}"

    def check_foldable(self) -> None:
        from tiercheck.streams.rebuilding.folding import check_settings  # which needs the reader below

        check_settings(self._provider.identity(), self._config)

    def folding(self, *, certified: bool) -> FoldShards:
        from tiercheck.streams.rebuilding.folding import TensorFolding, check_foldable  # which needs the reader below

        provider = self._provider
        check_foldable(provider.identity(), self._config, provider.hyperparameters(), certified=certified)
        return TensorFolding(certified=certified)

    def conversion(self) -> Conversion:
        from tiercheck.streams.rebuilding.conversion import TensorConversion  # which needs the reader below

        return TensorConversion(self._provider, self._loading)

    @property
    def steps_together(self) -> bool:
        replays = self._config.codec not in SNAPSHOT_CODECS
        return replays and self._provider.steps_together()

    def stage(self) -> StageState | None:
        return None if self._stage is None else TensorStage(self._provider, self._stage)

    def hyperparameters(self) -> list[dict[str, Any]]:
        return self._provider.hyperparameters()

    def host_state(self) -> dict[str, Any]:
        return self._provider.host_state()

    def refresh(self) -> None:
        self._provider.refresh()

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        self._provider.restore_host_state(state)


class TensorReader:
    """See :class:`~tiercheck.streams.state.StateReader`. ``threads``, ``exact``, ``called_elements_max``: as of
    :func:`~tiercheck.streams.replay.replay.replay_runs`."""

    steps_at_once = STEPS_AT_ONCE

    def __init__(
        self,
        provider: StateProvider,
        *,
        threads: int | None = None,
        exact: bool = True,
        called_elements_max: int = 0,
    ) -> None:
        self.threads = threads_granted(threads)
        self._provider = provider
        self._exact = exact
        self._called_elements_max = called_elements_max
        self._expected: Expected | None = None

    def expect(self) -> None:
        self._expected = self._expected or Expected.of(self._provider)

    def base(self, shard: Shard, constants: Shard | None, *, tier: str, places: str) -> BaseState:
        base = read_base(shard, constants, tier=tier)
        if self._expected is not None:
            self._expected.check_identity(base, places)
            self._expected.check_base(base)
        return base

    def led_on(self, base: BaseState, shard: Shard, *, tier: str) -> BaseState:
        state = advanced(base, shard, tier=tier, threads=self.threads)
        if self._expected is not None:
            self._expected.check_base(state)
        return state

    def records(self, shard: Shard, base: BaseState, *, tier: str) -> list[Differential]:
        found = read_differentials(shard, tier=tier)
        for each in found:
            check_fits(each, base.masters, len(base.hyperparameters))
            if self._expected is not None:
                self._expected.check_differential(each)
        return found

    def run(self, records: Sequence[Differential], *, threads: int) -> Run:
        return decode_run(records, threads=threads)

    async def rebuild(self, base: BaseState, start: BaseState, make: MakeRuns, scheduler: Scheduler) -> Rebuilt:
        residuals = {name: residual.clone() for name, residual in base.residuals.items()}

        def forget(run: Run) -> None:
            """Take out of the residuals what a run has sent."""
            for step in run.steps:
                forget_sent(residuals, step.gradients)

        finish_all(self._provider.masters().values())  # threads copy to them, in other streams than the script's
        start = placed(self._provider, start, threads=self.threads)
        self._provider.load(
            masters=start.masters,
            optimizer_state=start.optimizer_state,
            extras=start.extras,
            hyperparameters=start.hyperparameters,
        )
        finish_all(self._provider.masters().values())
        replayed = await replay_runs(
            self._provider,
            make,
            scheduler,
            threads=self.threads,
            exact=self._exact,
            called_elements_max=self._called_elements_max,
            before=forget,
        )
        host_state = start.host_state if replayed.host_state is None else replayed.host_state
        return Rebuilt(host_state, replayed.tally, residuals)

    def reached(self, base: BaseState, rebuilt: Rebuilt) -> tuple[Fidelity, tuple[str, ...]]:
        return reached(base.identity, self._provider.identity(), rebuilt.tally, Doubts.of(rebuilt.host_state))
