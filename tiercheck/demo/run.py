"""The demo: train once without a failure and once with one, recover, and compare bit by bit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tiercheck.demo.failure import LAST_STEPS_SPARED, Failure, FailurePlan, plan_failure
from tiercheck.demo.launch import Start, Trainers
from tiercheck.demo.results.compare import Interrupted, compare, mean_losses
from tiercheck.demo.results.plot import plot_losses
from tiercheck.demo.results.recovery_view import availability_table, plan_table
from tiercheck.demo.results.report import DemoResult, ranks_text
from tiercheck.demo.settings import RANKS, RECOVERED, SEED_MAX, TrainingSettings
from tiercheck.demo.training.model_size import parameter_count
from tiercheck.demo.training.progress import RankProgress
from tiercheck.demo.training.text import check_length, load_corpus
from tiercheck.demo.workspace import Workspace
from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.streams.codecs import codec

__all__ = ["DemoOptions", "run_demo"]

# Small batches in bf16: CPUs without bf16 instructions multiply such matrices some thirty times slower.
SIZES: Mapping[str, Mapping[str, int]] = {
    "fp32": {"steps": 60, "sequence": 128, "micro_batch": 2},
    "bf16": {"steps": 40, "sequence": 64, "micro_batch": 1},
}


@dataclass(frozen=True)
class DemoOptions:
    """What the user chose; ``None`` leaves the choice to the demo (a random seed, sizes by dtype)."""

    failure: Failure = Failure.SOFTWARE
    zero: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    """``cuda``: a rank on each GPU, and two at most, unless there is a pipeline."""
    codec: str = "exact"
    seed: int | None = None
    text: Path | None = None
    output: Path = Path("demo-output")
    keep: bool = False
    steps: int | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    sequence: int | None = None
    base_every: int | None = None
    batch: int | None = None
    resume_on: int | None = None
    """So many ranks go on after the failure; by default as many as before."""
    pipeline: int = 0
    """The stages of the pipeline to train, one a rank; 0: data-parallel ranks."""
    on_lost_stage: str | None = None
    """As ``attach`` takes it."""

    def settings(self) -> TrainingSettings:
        """The settings of the run without checkpoints. Errors: ``ConfigurationError``."""
        chosen = {
            name: getattr(self, name)
            for name in ("steps", "width", "layers", "heads", "sequence", "base_every", "batch")
            if getattr(self, name) is not None
        }
        seed = secrets.randbelow(SEED_MAX + 1) if self.seed is None else self.seed
        sizes = {**SIZES.get(self.dtype, SIZES["fp32"]), **chosen}
        if self.device == "cuda":
            sizes = {"ranks": min(RANKS, gpus_for(max(self.pipeline, self.resume_on or 1))), **sizes}
        if self.pipeline:
            sizes = {"layers": self.pipeline, **sizes, "ranks": self.pipeline, "stages": self.pipeline}
            if self.resume_on is not None:
                raise ConfigurationError("a pipeline goes on with its stages: --resume-on is for ranks without one")
        return TrainingSettings(
            seed=seed,
            zero=self.zero,
            dtype=self.dtype,
            device=self.device,
            codec=self.codec,
            text=None if self.text is None else str(self.text.absolute()),
            on_lost_stage=self.on_lost_stage,
            **sizes,
        )


def run_demo(options: DemoOptions, console: Console, *, start: Start | None = None) -> DemoResult:
    """Run the whole demo; about a minute with the defaults. Leaves the plot and the report in the output folder.
    ``start``: how the ranks are started, if not by torchrun.

    Raises:
        ConfigurationError: an option cannot be met; nothing was started.
        TrainerFailure: a trainer died by itself or hung.
    """
    settings = options.settings()
    failure = plan_failure(options.failure, settings)
    codec(settings.codec)  # an unknown one is an error now, not after the first run
    check_length(load_corpus(options.text), settings.sequence)
    resumed = replace(settings, ranks=settings.ranks if options.resume_on is None else options.resume_on)
    ranks_changed = resumed.ranks != settings.ranks
    compared_when_resumed = ranks_changed or failure.stage_lost is not None
    ranks = (settings.ranks, resumed.ranks) if ranks_changed else (settings.ranks,)
    with Workspace(options.output, keep=options.keep, ranks=ranks) as workspace:
        first, second = (with_tiers(each, workspace) for each in (settings, resumed))
        first = replace(first, killed_by=settings.steps - LAST_STEPS_SPARED + 1)
        workspace.nodes.check_memory(first)
        introduce(console, options, settings, resumed, failure)
        with progress_bars(console) as bars:
            if compared_when_resumed:  # the uninterrupted run tells its state at the version that was recovered
                second = replace(second, digest_at=RECOVERED)
                interrupted = fail_and_recover(bars, console, (first, second), failure, workspace, start)
                settings = replace(settings, digest_at=interrupted.second[0].started["version"])
            reference = train_to_end(bars, "without a failure", settings, workspace.uninterrupted, start)
            if not compared_when_resumed:
                interrupted = fail_and_recover(bars, console, (first, second), failure, workspace, start)
        result = compare(options.failure, resumed, failure, reference, interrupted, plot=workspace.plot)
        plot_losses(
            workspace.plot,
            result,
            uninterrupted=mean_losses([rank.steps for rank in reference]),
            before_failure=mean_losses([rank.steps for rank in interrupted.first]),
        )
        workspace.write_report(result.to_object())
    return result


def gpus_for(ranks: int) -> int:
    """The GPUs there are. Errors: ``ConfigurationError`` if they are too few for so many ranks."""
    import torch  # which is heavy, and was not needed so far

    count = torch.cuda.device_count()
    if count < ranks:
        found = "this torch is built for CPUs" if torch.version.cuda is None else f"torch finds {count}"
        raise ConfigurationError(f"--device cuda needs a GPU for each rank, here for {ranks_text(ranks)}, and {found}")
    return count


def with_tiers(settings: TrainingSettings, workspace: Workspace) -> TrainingSettings:
    nodes = workspace.nodes
    return replace(settings, tiers=nodes.tiers(settings, workspace.durable), name=nodes.name)


def introduce(
    console: Console, options: DemoOptions, before: TrainingSettings, settings: TrainingSettings, failure: FailurePlan
) -> None:
    """``before``, ``settings``: of the lives before and after the failure."""
    source = "the Python standard library's source" if settings.text is None else settings.text
    lost = ", ".join(f"node {node}" for node in failure.nodes_lost)
    lost = lost and f", and the memory of {lost} is lost"
    if failure.stage_lost is not None:
        lost = f", and every copy of stage {failure.stage_lost} is lost{but_bases(failure)}"
    goes_on = ""
    if settings.ranks != before.ranks:
        goes_on = f" Then it goes on with {ranks_text(settings.ranks)}."
    parameters = parameter_count(width=settings.width, layers=settings.layers, sequence=settings.sequence)
    layout = f"a pipeline of {settings.stages} stages" if settings.stages else ranks_text(before.ranks)
    console.print(
        f"Seed {settings.seed}. A byte-level GPT of {parameters / 1e6:.1f}M parameters on {source}, "
        f"ZeRO-{settings.zero}, {settings.dtype}, {layout}{on_gpus(before)}.\n"
        f"A {options.failure} failure is to strike after step {failure.version} of {settings.steps}: "
        f"kill -9 of all trainers{lost}.{goes_on}",
        highlight=False,
    )


def on_gpus(settings: TrainingSettings) -> str:
    if settings.device != "cuda":
        return ""
    return " on a GPU" if settings.ranks == 1 else ", each rank on a GPU"


def but_bases(failure: FailurePlan) -> str:
    kept = failure.bases_kept_until
    return "" if kept < 0 else f", but for the bases up to version {kept} in the durable tier"


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield bars


class Bar:
    """A run's progress bar: the version all ranks have finished, and what is going on."""

    def __init__(
        self, bars: Progress, label: str, steps: int, held: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        """``held``: the bytes that each tier holds now."""
        self.most_held: Mapping[str, int] = {}
        """By tier, the most bytes that were seen after any step."""
        self._held = held
        self._bars = bars
        self._task: TaskID = bars.add_task(label, total=steps, status="starting")

    def tell(self, ranks: Sequence[RankProgress]) -> None:
        if self._held is not None:
            now = self._held()
            self.most_held = {tier: max(nbytes, self.most_held.get(tier, 0)) for tier, nbytes in now.items()}
        version = min(rank.version for rank in ranks)
        steps = [rank.steps[-1] for rank in ranks if rank.steps]
        status = "starting"
        if all(rank.finished for rank in ranks):
            status = "done"
        elif steps:
            status = f"loss {sum(step.loss_value for step in steps) / len(steps):.3f}"
        elif all(rank.started for rank in ranks):
            status = "training"
        self._bars.update(self._task, completed=version, status=status)

    def say(self, status: str) -> None:
        self._bars.update(self._task, status=status)


def train_to_end(
    bars: Progress, label: str, settings: TrainingSettings, folder: Path, start: Start | None
) -> list[RankProgress]:
    bar = Bar(bars, label, settings.steps)
    with Trainers(settings, folder, start=start) as trainers:
        ranks = trainers.watch(lambda told: all(rank.finished for rank in told), bar.tell)
        trainers.wait_for_exit()
    return list(ranks)


def fail_and_recover(
    bars: Progress,
    console: Console,
    lives: tuple[TrainingSettings, TrainingSettings],
    failure: FailurePlan,
    workspace: Workspace,
    start: Start | None,
) -> Interrupted:
    bar = Bar(bars, "with a failure", lives[0].steps, lambda: workspace.nodes.occupied_bytes(workspace.durable))
    workspace.interrupted.mkdir()
    with Trainers(lives[0], workspace.interrupted / "first", start=start) as trainers:
        ranks = trainers.watch(lambda told: all(rank.version >= failure.version for rank in told), bar.tell)
        step_s = sorted(step.seconds for step in ranks[0].steps)[len(ranks[0].steps) // 2]
        trainers.run_on(failure.fraction * step_s)
        trainers.kill()
        first = trainers.progress()
    bar.say("killed")
    held = workspace.nodes.held_bytes(workspace.durable)
    most = bar.most_held
    lose(workspace, failure)
    bar.say("restarting")
    begun = time.monotonic()
    with Trainers(lives[1], workspace.interrupted / "second", start=start) as trainers:
        show_recovery(console, trainers.watch(lambda told: all(rank.started for rank in told), bar.tell))
        trainers.watch(lambda told: all(rank.steps for rank in told), bar.tell)
        restart_s = time.monotonic() - begun
        second = trainers.watch(lambda told: all(rank.finished for rank in told), bar.tell)
        trainers.wait_for_exit()
    return Interrupted(first, second, restart_s, held, most)


def lose(workspace: Workspace, failure: FailurePlan) -> None:
    """What the failure takes with it, after all trainers are killed."""
    if failure.stage_lost is None:
        workspace.nodes.fail(failure.nodes_lost)
    else:
        workspace.nodes.lose_stage(failure.stage_lost, workspace.durable, failure.bases_kept_until)


def show_recovery(console: Console, ranks: Sequence[RankProgress]) -> None:
    """Print the availability matrix, which all ranks agree on, and the plan."""
    if not all(rank.recovered for rank in ranks):
        raise RecoveryError("the restarted trainers found nothing to recover, and began from the start")
    reports = [rank.recovered for rank in ranks]
    console.print(availability_table(reports[0]))
    console.print(plan_table(reports))
