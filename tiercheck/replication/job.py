"""What a rank wants moved, written down where its mover finds it again.

A trainer registers its objects to the agent of its node by publishing this record in its first tier, which outlives
the processes of both: an agent that was killed and started again reads there all it needs, and keeps no journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from tiercheck.hierarchy import Hierarchy, Tier
from tiercheck.schema import Generation, Name, Rank, Version, WorldSize
from tiercheck.tiers.url import URL_CHARS_MAX

__all__ = ["JobTier", "ReplicationJob"]

TIERS_MAX = 16


class JobTier(Struct, frozen=True, array_like=True):
    name: Name
    url: Annotated[str, Meta(max_length=URL_CHARS_MAX)]
    """Every field of it filled in for the rank. It holds no secrets."""
    codec: Name = ""
    """As :class:`~tiercheck.hierarchy.Tier` has it."""


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
    keep_last: Version
    keep_every: Version

    @property
    def hierarchy(self) -> Hierarchy:
        return Hierarchy(tuple(Tier(tier.url, tier.name, codec=tier.codec) for tier in self.tiers))

    @property
    def namespace(self) -> str:
        """The URL of the first tier, where the rank's objects are captured."""
        return self.tiers[0].url
