"""A tier's lanes: queues of actions that do not wait for each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tiercheck.hierarchy import OpenTier
from tiercheck.replication.actions import COMMITTING, COPYING, COPYING_BASES, DELETING, MARKING, REPORTING

__all__ = ["RECORDING", "Lane"]

RECORDING = "recording"
COMMITS = (REPORTING, COMMITTING)
"""Reports come before a commit, so that a rank that sees a commit sees what was reported before."""
MOVES = (RECORDING, MARKING, DELETING, COPYING)
BASES = (COPYING_BASES,)
"""Copying a base may take long: it has a lane of its own, so that differentials do not wait for it."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One queue of a tier: its actions of some kinds, one after the other, while the other lanes go on."""

    tier: OpenTier
    kinds: tuple[str, ...]
    nudged: asyncio.Event = field(default_factory=asyncio.Event)
    serving: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, tier: OpenTier, *, commits: bool) -> list[Lane]:
        """``commits``: this rank may have to commit what lies in the tier."""
        moving = [cls(tier, MOVES), cls(tier, COMMITS)] if commits else [cls(tier, MOVES + COMMITS)]
        return [*moving, cls(tier, BASES)] if tier.index else moving
