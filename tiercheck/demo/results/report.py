"""The outcome of a demo: as a JSON object, and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiercheck.types import bytes_text

__all__ = ["DemoResult", "ranks_text", "render"]


@dataclass(frozen=True)
class DemoResult:
    """What the two runs showed. Times are in seconds, ``overhead`` and ``stall_share`` are fractions."""

    failure: str
    seed: int
    zero: int
    dtype: str
    codec: str
    steps: int
    ranks: int
    resumed_on: int
    """The ranks before the failure, and after it. If they are not as many, sums of gradients round otherwise from there
    on. Then the bits are compared up to the version that was recovered."""
    parameters: int
    failed_at: int
    """The last version whose loss every rank had written when it was killed."""
    resumed_at: int
    """The version that was recovered; the next one is the first to be trained again."""
    anchor: int
    """The oldest base that a rank started from."""
    replayed: int
    """The most differentials that a rank replayed."""
    steps_lost: int
    nodes_lost: tuple[int, ...]
    stages: int
    """Of the pipeline, one a rank; 0 if the ranks are data-parallel."""
    stage_lost: int | None
    """The stage, counted from 0, that was lost with every copy of it."""
    on_lost_stage: str | None
    """What it was to be made of."""
    notes: tuple[str, ...]
    """What the recovery told of itself: among it what a lost stage was made of."""
    sources: Mapping[str, int]
    """Per tier, the objects read from it, all ranks together."""
    fidelity: str
    recover_s: float
    """The slowest rank's recovery: consensus, reading, verifying, replaying."""
    restart_s: float
    """From the start of the new processes to their first finished step; imports take most of it."""
    rerun_s: float
    """What training from the anchor up to the failure again would take."""
    step_s: float
    baseline_step_s: float
    overhead: float
    """Median step with checkpoints over the median step without, less 1."""
    stall_share: float
    """The seconds that checkpointing measured as stall, over the seconds of all steps."""
    stall_step_s: float
    """The median step's measured stall."""
    drain_s: float
    """What closing the checkpointer took at the end of training: everything is in the durable tier then."""
    bases_captured: int
    bases_folded: int
    """Up to the last steps before and after the failure, all ranks together."""
    bytes_per_tier: Mapping[str, int]
    """What each tier held at the moment of the failure, all ranks together."""
    bytes_per_parameter: Mapping[str, float]
    """The most that each tier was seen to take after any step before the failure, with all that it keeps for reuse, all
    ranks together, over the model's parameters."""
    loss_bit_identical: bool
    """On other ranks: before the failure."""
    params_bit_identical: bool
    """Parameters, masters and optimizer states at the end; on other ranks: the whole masters, optimizer states and the
    schedule at the version that was recovered, as they were there without a failure."""
    survivors_bit_identical: bool | None
    """If a stage was lost: whether all others resumed parameters, masters and optimizer states as they were without a
    failure."""
    first_difference: int | None
    """The first version whose losses differ."""
    losses: Mapping[int, float]
    """By version, the mean loss of the ranks along the interrupted run's final course."""
    uninterrupted_losses: Mapping[int, float]
    """The same of the run without a failure."""
    plot: str

    @property
    def promise_kept(self) -> bool:
        """Whether the bits are what the recovery's fidelity promised them to be, and those of all stages that were not
        lost."""
        if self.survivors_bit_identical is False:
            return False
        return self.fidelity != "exact" or (self.loss_bit_identical and self.params_bit_identical)

    @property
    def ranks_changed(self) -> bool:
        return self.resumed_on != self.ranks

    def to_object(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "nodes_lost": list(self.nodes_lost), "notes": list(self.notes)}


def render(result: DemoResult) -> RenderableType:
    """The report as rich prints it."""
    stage = [] if result.stage_lost is None else [stage_table(result), loss_table(result)]
    return Group(recovery_table(result), *stage, cost_table(result), verdict(result))


def ranks_text(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for label, value in rows:
        table.add_row(label, Text(value))
    return table


def recovery_table(result: DemoResult) -> Table:
    lost = {
        0: "none: the memory of all nodes survived",
        1: f"that of node {', '.join(map(str, result.nodes_lost))}",
    }.get(len(result.nodes_lost), "that of all nodes")
    if result.stage_lost is not None:
        lost = f"every copy of stage {result.stage_lost} of {result.stages}, in memory and in the durable tier"
    where = f", on {ranks_text(result.resumed_on)}" if result.ranks_changed else ""
    objects = ", ".join(f"{count} from {tier}" for tier, count in result.sources.items()) or "none"
    return two_columns(
        f"Recovery from a {result.failure} failure",
        [
            ("failed after step", f"{result.failed_at} of {result.steps} (seed {result.seed})"),
            ("memory lost", lost),
            ("anchor (base)", f"version {result.anchor}"),
            ("differentials replayed", str(result.replayed)),
            ("resumed at", f"version {result.resumed_at}{where}"),
            ("steps lost", str(result.steps_lost)),
            ("objects read", objects),
            ("fidelity", result.fidelity),
        ],
    )


def stage_table(result: DemoResult) -> Table:
    same = "have every bit of version" if result.survivors_bit_identical else "are NOT what they were at version"
    return two_columns(
        f"Stage {result.stage_lost} of {result.stages}, of which every copy was lost",
        [
            (f"by {result.on_lost_stage}", "\n".join(result.notes)),
            ("the other stages", f"{same} {result.resumed_at}"),
        ],
    )


def loss_table(result: DemoResult) -> Table:
    """The loss before and after the failure, and what it is without one."""
    table = Table(title="The loss, in nats a byte", title_justify="left", box=box.SIMPLE)
    for column in ("after step", "with the failure", "without", "difference"):
        table.add_column(column, justify="right")
    wanted = {result.failed_at, *(result.resumed_at + steps for steps in (1, 2, 5, 10, 20)), result.steps}
    for version in sorted(wanted & result.losses.keys() & result.uninterrupted_losses.keys()):
        own, other = result.losses[version], result.uninterrupted_losses[version]
        table.add_row(f"{version}", f"{own:.3f}", f"{other:.3f}", f"{own - other:+.3f}")
    return table


def cost_table(result: DemoResult) -> Table:
    held = ", ".join(f"{tier} {bytes_text(nbytes)}" for tier, nbytes in result.bytes_per_tier.items())
    most = ", ".join(f"{tier} {nbytes:.1f}" for tier, nbytes in result.bytes_per_parameter.items())
    noise = "; below zero: the machine's noise exceeds the cost" if result.overhead < 0 else ""
    return two_columns(
        "What it cost",
        [
            (
                "recovery",
                f"{result.recover_s:.2f} s, of the {result.restart_s:.1f} s that new processes took to their "
                "first step (imports mostly)",
            ),
            (
                "re-running instead",
                f"{result.rerun_s:.2f} s for the {result.failed_at - result.anchor} steps since the anchor",
            ),
            (
                "median step",
                f"{result.step_s * 1e3:.0f} ms with checkpoints, {result.baseline_step_s * 1e3:.0f} ms without: "
                f"{result.overhead:+.1%}{noise}",
            ),
            (
                "stall, measured directly",
                f"{result.stall_step_s * 1e3:.1f} ms in the median step; bases and start-up included, "
                f"{result.stall_share:.1%} of the time of all steps",
            ),
            (
                "bases",
                f"{result.bases_captured} captured by the trainers, {result.bases_folded} folded beside them",
            ),
            ("draining at the end", f"{result.drain_s:.2f} s until the durable tier had everything"),
            ("held at the failure", held or "nothing"),
            ("held at most", f"bytes a parameter: {most}" if most else "nothing"),
        ],
    )


def verdict(result: DemoResult) -> Text:
    from_where = f"after the failure at step {result.failed_at}"
    if result.loss_bit_identical and result.params_bit_identical and result.ranks_changed:
        text = Text(
            f"What {ranks_text(result.resumed_on)} resumed at step {result.resumed_at} is what "
            f"{ranks_text(result.ranks)} had there without a failure, to the last bit: all masters, optimizer states "
            "and the schedule. From there on sums of gradients round otherwise.",
            style="bold green",
        )
    elif result.loss_bit_identical and result.params_bit_identical:
        text = Text(
            f"The loss curves are identical to the last bit, before and {from_where}; "
            "so are all parameters, masters and optimizer states at the end.",
            style="bold green",
        )
    else:
        parts = []
        if not result.loss_bit_identical:
            parts.append(f"the losses differ from step {result.first_difference} on")
        if result.survivors_bit_identical is False:
            parts.append("stages that were not lost differ")
        if not result.params_bit_identical:
            parts.append("the resumed states differ" if result.ranks_changed else "the final states differ")
        said = "although the recovery called itself exact"
        if result.fidelity != "exact":
            said = "as its fidelity says it may"
        text = Text(
            f"Not identical to the last bit, {said}: {' and '.join(parts)}.",
            style="bold yellow" if result.promise_kept else "bold red",
        )
    return text.append(f"\nPlot of both curves: {result.plot}", style="not bold default")
