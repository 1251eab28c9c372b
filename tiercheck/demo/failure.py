"""The failures the demo can inject: which processes die, and which memory is lost with them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from tiercheck.demo.settings import TrainingSettings
from tiercheck.errors import ConfigurationError
from tiercheck.policy.neighbours import Method
from tiercheck.policy.recovery.lost_stage import METHODS

__all__ = ["Failure", "FailurePlan", "plan_failure"]

LAST_STEPS_SPARED = 3
"""Some steps must be left after the failure, for the curves to be compared on."""
VERSIONS_LOST = 5
"""Of a stage that can go back to an older base, bases are lost that are as old, or newer."""
STEPS_TO_MEASURE = 6
"""Before it there must be some to time steps by."""


class Failure(StrEnum):
    """All trainer processes are killed each time; the kinds differ in what else is lost."""

    SOFTWARE = "software"
    """Nothing else: the memory of both nodes survives."""
    NODE = "node"
    """One node's memory."""
    RACK = "rack"
    """All volatile memory."""
    STAGE = "stage"
    """Every copy of an inner stage of the pipeline, also in the neighbour's memory and in the durable tier."""

    @classmethod
    def parse(cls, text: str) -> Failure:
        """``"node"`` to ``Failure.NODE``. Errors: ``ConfigurationError`` with the names there are."""
        try:
            return cls(text)
        except ValueError:
            raise ConfigurationError(f"unknown failure {text!r}: choose one of {', '.join(cls)}") from None

    def nodes_lost(self, seed: int, ranks: int) -> tuple[int, ...]:
        """The nodes (ranks) whose memory is wiped, as the seed says."""
        if self is Failure.SOFTWARE:
            return ()
        if self is Failure.RACK:
            return tuple(range(ranks))
        first, last = (1, ranks - 1) if self is Failure.STAGE else (0, ranks)
        return (random.Random(f"node {seed}").randrange(first, last),)


@dataclass(frozen=True)
class FailurePlan:
    """When the processes die, and what is lost."""

    version: int
    """The kill comes after every rank has finished this version..."""
    fraction: float
    """...by this fraction of a step's time."""
    nodes_lost: tuple[int, ...]
    stage_lost: int | None = None
    """The stage that is lost with every copy of it, counted from 0: its number is its rank's."""
    bases_kept_until: int = -1
    """Its bases up to this version are left in the durable tier."""


def plan_failure(failure: Failure, settings: TrainingSettings) -> FailurePlan:
    """Draw the moment by the seed: after a base and a batch can have reached every tier, not in the last steps.

    Raises:
        ConfigurationError: the run is too short for such a moment, or has no stages to lose.
    """
    if failure is Failure.STAGE and not settings.stages:
        raise ConfigurationError("only a pipeline can lose a stage: name its stages with --pipeline")
    earliest = max(settings.base_every + settings.batch + 1, STEPS_TO_MEASURE)
    latest = settings.steps - LAST_STEPS_SPARED
    if latest < earliest:
        raise ConfigurationError(
            f"{settings.steps} steps are too few: the failure comes at step {earliest} (one base and one batch) "
            f"or later and {LAST_STEPS_SPARED} steps must follow it; use at least "
            f"{earliest + LAST_STEPS_SPARED} steps"
        )
    draw = random.Random(f"failure {settings.seed}")
    version, fraction = draw.randint(earliest, latest), draw.random()
    nodes = failure.nodes_lost(settings.seed, settings.ranks)
    if failure is not Failure.STAGE:
        return FailurePlan(version, fraction, nodes)
    rolls_back = Method.ROLL_BACK in METHODS.get(settings.on_lost_stage or "", ())
    return FailurePlan(version, fraction, nodes, nodes[0], version - VERSIONS_LOST if rolls_back else -1)
