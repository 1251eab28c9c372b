"""What becomes of one rank's part of a recovery, as the others are told of it."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck import schema
from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Held, HeldByNodes
from tiercheck.recovery.finding.told import Told
from tiercheck.recovery.reading.reader import VerifiedPart

__all__ = ["Attempt", "Nothing", "Part", "behind"]


@schema.ready
@dataclass(frozen=True)
class Attempt:
    """What a rank tells the others of its part of the reading or the replay."""

    succeeded: bool
    told: Told | None = None
    """What it has, if copies have failed since it told the last time."""
    held: Held = ()
    """What each tier could give it, before anything was read."""
    other_nodes: HeldByNodes = ()
    """What other nodes' memory could give it."""


@dataclass(frozen=True)
class Nothing:
    """In the place of what was verified: of this rank, which is lost, nothing is read."""

    point: RecoveryPoint
    constants: None = None


Part = VerifiedPart | Nothing


def behind(version: int | None, best: int | None) -> bool:
    """Whether the ranks could have met at a newer version."""
    return best is not None and (version is None or version < best)
