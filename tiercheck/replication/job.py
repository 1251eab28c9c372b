"""What a rank wants moved, written down where its mover finds it again.

A trainer registers its objects to the agent of its node by publishing this record in its first tier, which outlives
the processes of both: an agent that was killed and started again reads there all it needs, and keeps no journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.keys import VERSION_MAX
from tiercheck.named import TEXT_CHARS_MAX
from tiercheck.policy.compose.checks import POLICIES_MAX
from tiercheck.policy.placement import Placement
from tiercheck.policy.policies import PacingPolicy
from tiercheck.policy.watermark import Retention
from tiercheck.replication.named_policies import combined
from tiercheck.schema import Generation, Name, Rank, Version, WorldSize
from tiercheck.tiers.url import URL_CHARS_MAX

__all__ = ["JobTier", "MovingPolicies", "ReplicationJob"]

TIERS_MAX = 16
PolicyTexts = Annotated[
    tuple[Annotated[str, Meta(max_length=TEXT_CHARS_MAX)], ...], Meta(min_length=1, max_length=POLICIES_MAX)
]


class JobTier(Struct, frozen=True, array_like=True):
    name: Name
    url: Annotated[str, Meta(max_length=URL_CHARS_MAX)]
    """Every field of it filled in for the rank. It holds no secrets."""
    codec: Name = ""
    """As :class:`~tiercheck.hierarchy.Tier` has it."""


@dataclass(frozen=True)
class MovingPolicies:
    """What a mover works by."""

    placement: Placement
    retention: Retention
    pacing: PacingPolicy


@dataclass(frozen=True)
class ReplicationJob:
    """One rank's objects, of one generation, and the policies they are moved by."""

    tiers: Annotated[tuple[JobTier, ...], Meta(min_length=1, max_length=TIERS_MAX)]
    """Fastest first."""
    node: Name
    """The agent it is meant for: several, with a name each, can run on one machine."""
    rank: Rank
    world_size: WorldSize
    generation: Generation
    batch: Version
    interval: Annotated[int, Meta(ge=1, le=VERSION_MAX)] = 50
    """The cadence's, by which bases are counted."""
    folds: Literal["no", "exactly", "certified"] = "no"
    """Whether the mover makes the bases that are left to it, and whether only by a certified kernel."""
    fold_every: Annotated[int, Meta(ge=0, le=VERSION_MAX)] = 0
    """Versions between the bases that are folded for the first tier alone."""
    placement: PolicyTexts = ("everywhere",)
    retention: PolicyTexts = ("keep_last",)
    pacing: PolicyTexts = ("unpaced",)
    """Policies by name: see :mod:`tiercheck.replication.named_policies`."""

    @property
    def hierarchy(self) -> Hierarchy:
        return Hierarchy(tuple(Tier(tier.url, tier.name, codec=tier.codec) for tier in self.tiers))

    def policies(self) -> MovingPolicies:
        """Errors: ``ConfigurationError`` for a policy that is not installed here."""
        placement = Placement(self.batch, combined("placement", self.placement), self.interval, self.fold_every)
        return MovingPolicies(
            placement, Retention(combined("retention", self.retention), placement), combined("pacing", self.pacing)
        )

    @property
    def namespace(self) -> str:
        """The URL of the first tier, where the rank's objects are captured."""
        return self.tiers[0].url
