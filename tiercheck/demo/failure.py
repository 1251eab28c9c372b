"""The failures the demo can inject: which processes die, and which memory is lost with them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from tiercheck.demo.settings import RANKS, TrainingSettings
from tiercheck.errors import ConfigurationError

__all__ = ["Failure", "FailurePlan", "plan_failure"]

LAST_STEPS_SPARED = 3
"""Some steps must be left after the failure, for the curves to be compared on."""
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

    @classmethod
    def parse(cls, text: str) -> Failure:
        """``"node"`` to ``Failure.NODE``. Errors: ``ConfigurationError`` with the names there are."""
        try:
            return cls(text)
        except ValueError:
            raise ConfigurationError(f"unknown failure {text!r}: choose one of {', '.join(cls)}") from None

    def nodes_lost(self, seed: int) -> tuple[int, ...]:
        """The nodes (ranks) whose memory is wiped, as the seed says."""
        if self is Failure.SOFTWARE:
            return ()
        if self is Failure.RACK:
            return tuple(range(RANKS))
        return (random.Random(f"node {seed}").randrange(RANKS),)


@dataclass(frozen=True)
class FailurePlan:
    """When the processes die, and what is lost."""

    version: int
    """The kill comes after every rank has finished this version..."""
    fraction: float
    """...by this fraction of a step's time."""
    nodes_lost: tuple[int, ...]


def plan_failure(failure: Failure, settings: TrainingSettings) -> FailurePlan:
    """Draw the moment by the seed: after a base and a batch can have reached every tier, not in the last steps.

    Raises:
        ConfigurationError: the run is too short for such a moment.
    """
    earliest = max(settings.base_every + settings.batch + 1, STEPS_TO_MEASURE)
    latest = settings.steps - LAST_STEPS_SPARED
    if latest < earliest:
        raise ConfigurationError(
            f"{settings.steps} steps are too few: the failure comes at step {earliest} (one base and one batch) "
            f"or later and {LAST_STEPS_SPARED} steps must follow it; use at least "
            f"{earliest + LAST_STEPS_SPARED} steps"
        )
    draw = random.Random(f"failure {settings.seed}")
    return FailurePlan(draw.randint(earliest, latest), draw.random(), failure.nodes_lost(settings.seed))
