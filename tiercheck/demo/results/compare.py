"""From the progress of both runs to what they show: which bits agree, what was lost, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from tiercheck.demo.failure import Failure, FailurePlan
from tiercheck.demo.results.recovery_view import count_sources
from tiercheck.demo.results.report import DemoResult
from tiercheck.demo.settings import TrainingSettings
from tiercheck.demo.training.progress import RankProgress, Step
from tiercheck.errors import RecoveryError
from tiercheck.types import Fidelity

__all__ = ["Interrupted", "compare", "mean_losses"]

T = TypeVar("T")

WARM_UP_STEPS = 3
"""The first steps of a process are slow for reasons of their own: allocations, caches."""


@dataclass(frozen=True)
class Interrupted:
    """The two lives of the run with the failure, one entry a rank in each. There may be other ranks in the second."""

    first: Sequence[RankProgress]
    second: Sequence[RankProgress]
    restart_s: float
    """From the start of the new processes to the first step that all of them finished."""
    bytes_per_tier: Mapping[str, int]
    """At the moment of the failure, before any memory was lost."""
    most_held: Mapping[str, int]
    """The most bytes that each tier was seen to hold before the failure, all ranks together."""


def compare(
    kind: Failure,
    settings: TrainingSettings,
    failure: FailurePlan,
    reference: Sequence[RankProgress],
    interrupted: Interrupted,
    *,
    plot: Path,
) -> DemoResult:
    """Compare the two runs, whose progress holds one entry a rank.

    Raises:
        RecoveryError: the ranks of the restarted run disagree on the version they recovered, or the text changed
            under the runs, so that their losses cannot be compared.
    """
    first, second = interrupted.first, interrupted.second
    recovered = [rank.recovered for rank in second]
    resumed_at = same("resumed at", [rank.started["version"] for rank in second])
    # A rank whose newest base was lost starts from an older one, and replays more to come to the same version.
    anchor = min(recovery["anchor"] for recovery in recovered)
    replayed = max(recovery["replayed"] for recovery in recovered)
    same("corpus", [rank.started["corpus"] for rank in chain(reference, first, second)])
    failed_at = min(rank.version for rank in first)
    check_trained(second, reference[0].version)
    ranks_changed = len(first) != len(second)
    difference = first_difference(reference, first, *([] if ranks_changed else [second]))
    baseline_s, step_s = comparable_step_seconds(reference, first, second)
    return DemoResult(
        failure=kind,
        seed=settings.seed,
        zero=settings.zero,
        dtype=settings.dtype,
        codec=settings.codec,
        steps=settings.steps,
        ranks=len(first),
        resumed_on=len(second),
        parameters=reference[0].started["parameters"],
        failed_at=failed_at,
        resumed_at=resumed_at,
        anchor=anchor,
        replayed=replayed,
        steps_lost=max(0, failed_at - resumed_at),
        nodes_lost=failure.nodes_lost,
        stages=settings.stages,
        stage_lost=failure.stage_lost,
        on_lost_stage=settings.on_lost_stage,
        notes=tuple(dict.fromkeys(note for recovery in recovered for note in recovery["notes"])),
        sources=count_sources(recovered),
        fidelity=Fidelity.worst(*(Fidelity(recovery["fidelity"]) for recovery in recovered)),
        recover_s=max(recovery["seconds"] for recovery in recovered),
        restart_s=interrupted.restart_s,
        rerun_s=(failed_at - anchor) * step_s,
        step_s=step_s,
        baseline_step_s=baseline_s,
        overhead=step_s / baseline_s - 1,
        stall_share=stall_share(first, second),
        bases_captured=sum(life.captured for life in chain(first, second)),
        bases_folded=sum(life.folded for life in chain(first, second)),
        bytes_per_tier=interrupted.bytes_per_tier,
        bytes_per_parameter={
            tier: nbytes / interrupted.first[0].started["parameters"] for tier, nbytes in interrupted.most_held.items()
        },
        loss_bit_identical=difference is None,
        params_bit_identical=same_wholes(reference, second) if ranks_changed else same_digests(reference, second),
        survivors_bit_identical=same_survivors(reference, second, failure.stage_lost),
        first_difference=difference,
        losses=resumed_losses(first, second, resumed_at),
        uninterrupted_losses=mean_losses([rank.steps for rank in reference]),
        stall_step_s=median_stall_s([*first, *second]),
        drain_s=max(rank.finished["drain_s"] for rank in second),
        plot=str(plot),
    )


def same(label: str, values: Sequence[T]) -> T:
    """The value that all of them are."""
    if any(value != values[0] for value in values):
        raise RecoveryError(f"the ranks disagree on {label}: {', '.join(map(str, values))}")
    return values[0]


def same_digests(reference: Sequence[RankProgress], second: Sequence[RankProgress]) -> bool:
    return [rank.finished["digest"] for rank in reference] == [rank.finished["digest"] for rank in second]


def same_wholes(reference: Sequence[RankProgress], second: Sequence[RankProgress]) -> bool:
    """Whether every rank has put the same whole state together, at the same version."""
    wholes = [rank.state for rank in chain(reference, second)]
    return bool(wholes[0]) and all(whole == wholes[0] for whole in wholes)


def same_survivors(reference: Sequence[RankProgress], second: Sequence[RankProgress], lost: int | None) -> bool | None:
    """Whether every stage but the lost one resumed what it had at that version without a failure."""
    if lost is None:
        return None
    states = [(own.state, other.state) for own, other in zip(reference, second, strict=True)]
    del states[lost]
    return all(bool(own) and own == other for own, other in states)


def check_trained(second: Sequence[RankProgress], last: int) -> None:
    """Errors: ``RecoveryError`` if the restarted run did not train every version up to the last."""
    for life in second:
        resumed, wanted = [step.version for step in life.steps], list(range(life.started["version"] + 1, last + 1))
        if resumed != wanted:
            raise RecoveryError(f"the restarted run trained the versions {resumed}, not {wanted}")


def first_difference(reference: Sequence[RankProgress], *lives: Sequence[RankProgress]) -> int | None:
    """The first version at which some rank's loss, in any of these lives of the interrupted run, is not the
    reference's."""
    differing: list[int] = []
    for truth, *own in zip(reference, *lives, strict=True):
        expected = {step.version: step.loss for step in truth.steps}
        differing += [step.version for life in own for step in life.steps if expected.get(step.version) != step.loss]
    return min(differing, default=None)


def comparable_step_seconds(
    reference: Sequence[RankProgress], first: Sequence[RankProgress], second: Sequence[RankProgress]
) -> tuple[float, float]:
    """Median seconds a step without and with checkpoints, over the versions that both runs trained warm."""
    with_checkpoints = [step for rank in chain(first, second) for step in rank.steps[WARM_UP_STEPS:]]
    without = [step for rank in reference for step in rank.steps[WARM_UP_STEPS:]]
    shared = {step.version for step in with_checkpoints} & {step.version for step in without}
    if not shared:
        raise RecoveryError("the runs are too short to compare the time of their steps")
    return (
        median(step.seconds for step in without if step.version in shared),
        median(step.seconds for step in with_checkpoints if step.version in shared),
    )


def stall_share(*lives: Sequence[RankProgress]) -> float:
    """The worst rank's stalled seconds over the seconds of its steps."""
    shares: list[float] = []
    for rank in zip_longest(*lives):
        steps = [life.steps for life in rank if life is not None and life.steps]
        seconds = sum(step.seconds for life in steps for step in life)
        shares.append(sum(life[-1].stall_s for life in steps) / seconds)
    return max(shares)


def median_stall_s(lives: Sequence[RankProgress]) -> float:
    """The median, over all warm steps of all ranks, of the seconds that checkpointing stalled the step."""
    return median(
        after.stall_s - before.stall_s for life in lives for before, after in pairwise(life.steps[WARM_UP_STEPS - 1 :])
    )


def resumed_losses(first: Sequence[RankProgress], second: Sequence[RankProgress], resumed_at: int) -> dict[int, float]:
    """Of the steps that count: those of the first life up to the recovered version, then the second's."""
    before, after = (mean_losses([rank.steps for rank in life]) for life in (first, second))
    return {version: loss for version, loss in before.items() if version <= resumed_at} | after


def mean_losses(ranks: Sequence[Sequence[Step]]) -> dict[int, float]:
    """By version, the mean loss of the ranks; a version that some rank was killed before reporting is left out."""
    by_rank = [{step.version: step.loss_value for step in steps} for steps in ranks]
    shared = sorted(set.intersection(*(set(losses) for losses in by_rank)))
    return {version: fmean(losses[version] for losses in by_rank) for version in shared}
