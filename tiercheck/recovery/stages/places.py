"""Whether the ranks' stages are a pipeline of which a lost stage can be made anew: what they say of it at the start."""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck.errors import ConfigurationError, RecoveryError
from tiercheck.format.container import checksum_of
from tiercheck.policy.neighbours import ALIKE
from tiercheck.policy.recovery.spans import spans_of, spans_text
from tiercheck.recovery.report import named
from tiercheck.streams.stage import StagePlace, StageState

__all__ = [
    "StageTold",
    "check_pipeline",
    "not_to_be_averaged",
    "refuse_one_name_for_two",
    "stage_state",
    "stage_told",
]

DIGITS = 8
"""Of a digest: enough to tell a model's layers apart."""

StageTold = tuple[int, int, str, list[str]]
"""Which stage a rank is, of how many, the first of its layers that is not tied, and a digest of each layer's shapes."""


def stage_state(state: StageState | None) -> StageState:
    """Errors: ``ConfigurationError`` if there are no stages."""
    if state is None:
        raise ConfigurationError("on_lost_stage is for pipelines, and this job has no stages: leave it out")
    return state


def stage_told(place: StagePlace) -> StageTold:
    own = [name for name, _ in place.layers if name not in place.tied]
    shapes = [checksum_of(repr(parameters).encode())[:DIGITS] for _, parameters in place.layers]
    return place.stage, place.stages, own[0] if own else "", shapes


def check_pipeline(told: Iterable[StageTold]) -> None:
    """At the start, so that nobody learns of it when a stage is lost. Errors: ``ConfigurationError`` if a stage is
    missing, the ranks are of pipelines of different lengths, or two stages have a layer of the same name."""
    found = [(stage, stages, layer) for stage, stages, layer, _ in told]
    if len({stages for _, stages, _ in found}) > 1:
        raise ConfigurationError(
            "on_lost_stage needs one pipeline, and the ranks are stages of pipelines of different lengths"
        )
    stages = found[0][1]
    if missing := set(range(stages)) - {stage for stage, _, _ in found}:
        said = spans_text(spans_of(missing))
        raise ConfigurationError(
            f"on_lost_stage needs a rank for each stage, and none is stage {said} of {stages}: "
            "a rank that has several stages (interleaved schedules) is not supported"
        )
    stage_of: dict[str, int] = {}
    for stage, _, layer in found:
        if layer and stage_of.setdefault(layer, stage) != stage:
            raise ConfigurationError(one_name_for_two(stage_of[layer], stage, [layer]))


def not_to_be_averaged(told: Iterable[StageTold]) -> str | None:
    """Which inner stage could not be made of its neighbours if it were lost, and why. As
    :func:`tiercheck.policy.neighbours.check_layers`, before there is anything to make."""
    layers = {stage: shapes for stage, _, _, shapes in told}
    for stage in range(1, len(layers) - 1):
        own = layers[stage]
        for beside in (stage - 1, stage + 1):
            is_end = beside in (0, len(layers) - 1)
            other = [each for each in layers[beside] if not is_end or each in own] or layers[beside]
            if own != other:
                what = f"{len(own)} and {len(other)} layers" if len(own) != len(other) else "layers of other shapes"
                return f"stage {stage} could not be made from stage {beside} if it were lost: they have {what}; {ALIKE}"
    return None


def refuse_one_name_for_two(lost: StagePlace, other: StagePlace) -> None:
    """Errors: ``RecoveryError`` if another stage has a layer of the lost one's, and it is no tied one."""
    if lost.stage == other.stage:
        return
    names = {name for name, _ in other.layers}
    if both := [name for name, _ in lost.layers if name in names and name not in lost.tied]:
        raise RecoveryError(one_name_for_two(lost.stage, other.stage, both))


def one_name_for_two(stage: int, other: int, layers: list[str]) -> str:
    return (
        f"stages {stage} and {other} both have {named(layers)}, so that one would be taken for the other if it is lost"
        ": name parameters as in the whole model, and not each stage's from the first"
    )
