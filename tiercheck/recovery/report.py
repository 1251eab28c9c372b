"""What a recovery did: the value that users see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tiercheck.policy.recovery.consensus import RecoveryPoint
from tiercheck.policy.recovery.plan import Availability
from tiercheck.types import Fidelity

__all__ = ["Fit", "Recovery"]

NAMED_MAX = 3


@dataclass(frozen=True)
class Fit:
    """What became of a checkpoint of another model, by the names of its tensors. The same on all ranks."""

    loaded: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    """Of what was loaded: the name that was saved, and the one that it has here."""
    kept: tuple[str, ...]
    """What the script made: nothing was saved of it."""
    dropped: tuple[str, ...]
    """What was saved and is not loaded, by the names that were saved."""
    restarted: tuple[str, ...]
    """Loaded, and trained only here: the optimizer's state of it begins anew."""
    stopped: tuple[str, ...]
    """Loaded, and trained only where it was saved: the optimizer's state of it is dropped."""

    @property
    def exact(self) -> bool:
        """All of it is there, under other names at most."""
        return not (self.kept or self.dropped or self.restarted or self.stopped)

    @property
    def notes(self) -> tuple[str, ...]:
        renamed = [f"{old} as {new}" for old, new in self.renamed]
        told = (
            ("loaded under other names", renamed),
            ("not saved, so that the script's values are kept", self.kept),
            ("saved, and dropped", self.dropped),
            ("trained, and frozen when it was saved, so that the optimizer's state begins anew", self.restarted),
            ("frozen, and trained when it was saved, so that the optimizer's state is dropped", self.stopped),
        )
        return tuple(f"{said}: {counted(names)}, {named(names)}" for said, names in told if names)

    def to_object(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {each.name: list(getattr(self, each.name)) for each in fields(self)}


def counted(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED_MAX]) + (", ..." if len(names) > NAMED_MAX else "")


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
    fit: Fit | None = None
    """If a checkpoint of another model was loaded (:class:`~tiercheck.streams.loading.Loading`): what became of it."""

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
            "fit": self.fit and self.fit.to_object(),
        }
