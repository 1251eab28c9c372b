"""What checkpointing costs, as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tiercheck.replication.mover import MoverStatus

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """What checkpointing has done and cost on this rank since it was attached."""

    differentials: int = 0
    bases: int = 0
    captured_bytes: int = 0
    differential_stall_s: float = 0.0
    """Seconds for which training stood still to encode and copy gradients."""
    base_stall_s: float = 0.0
    """Seconds for which training stood still to prepare a base, or until its lazy copy ended."""
    drain_stall_s: float = 0.0
    """Seconds for which training waited for the tiers: for room for a base or a differential, for one that lags behind
    ``lag_max``, or for the ranks to agree on what is whole."""
    failed_saves: int = 0
    refused_decisions: int = 0
    """How often the cadence's decision was refused; those of the other policies are counted by the mover."""
    not_folded: str = ""
    """Why the newest base that was due was captured, though bases are folded if they can be."""
    mover: MoverStatus = field(default_factory=MoverStatus)

    @property
    def stall_s(self) -> float:
        return self.differential_stall_s + self.base_stall_s + self.drain_stall_s

    def to_object(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "stall_s": self.stall_s}

    def plus(self, **more: float) -> Stats:
        """The stats with these amounts added."""
        counts = vars(self)
        return Stats(**{**counts, **{name: counts[name] + value for name, value in more.items()}})
