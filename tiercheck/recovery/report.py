"""What a recovery did: the value that users see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Availability
from tiercheck.types import Fidelity

__all__ = ["Recovery"]


@dataclass(frozen=True)
class Recovery:
    """What a recovery did, as one rank reports it."""

    point: RecoveryPoint
    """The version at which the ranks met, and this rank's way to it."""
    sources: tuple[tuple[str, str], ...]
    """What this rank loaded and replayed, in order: (object, tier)."""
    quarantined: tuple[tuple[str, str, str], ...]
    """Copies of this rank's objects that failed verification, and records set aside: (object, tier, reason)."""
    matrix: tuple[Availability, ...]
    """What each tier could give each rank before anything was read."""
    fidelity: Fidelity
    """The worst of what was replayed, on any rank."""
    notes: tuple[str, ...]
    """Why the fidelity is less than exact, where it is; and what else there is to know of what was replayed."""
    seconds: float
    """From the survey to the restored state, on this rank."""
    read_bytes: int
    """Taken from the tiers by this rank. Objects that a tier does not map are read once to be verified and, but for the
    first ones of the chain, once more to be replayed."""

    @property
    def version(self) -> int:
        """The version the job resumes after."""
        return self.point.last

    @property
    def replayed(self) -> int:
        """The number of differentials replayed."""
        return self.point.replayed

    def to_object(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "generation": self.point.generation,
            "anchor": self.point.anchor,
            "version": self.version,
            "replayed": self.replayed,
            "sources": [{"object": key, "tier": tier} for key, tier in self.sources],
            "quarantined": [{"object": k, "tier": t, "reason": r} for k, t, r in self.quarantined],
            "matrix": [
                {
                    "ranks": [list(span) for span in row.ranks],
                    "tier": row.tier,
                    "anchor": row.anchor,
                    "differentials": [list(span) for span in row.differentials],
                }
                for row in self.matrix
            ],
            "fidelity": str(self.fidelity),
            "notes": list(self.notes),
            "seconds": self.seconds,
            "read_bytes": self.read_bytes,
        }
