"""How fast shards are copied to a tier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tiercheck.errors import ConfigurationError
from tiercheck.keys import Stream
from tiercheck.policy.compose.checks import check_tier, flat
from tiercheck.types import Survives

__all__ = ["BytesPerSecond", "Copying", "PacingPolicy", "SlowestOf", "Unpaced"]


@dataclass(frozen=True)
class Copying:
    """A shard that is about to be copied to a tier."""

    tier: str
    """The tier's name."""
    survives: Survives
    """The widest failure that the tier survives."""
    stream: Stream
    nbytes: int
    undrained_bases: int
    """Bases of this rank that the durable tier still lacks. Capturing waits when two of them do."""


class PacingPolicy(ABC):
    """Says how fast this rank's shards are copied to a tier. Make it a frozen dataclass."""

    @abstractmethod
    def bytes_per_s(self, seen: Copying) -> float | None:
        """What this shard's bytes count against; ``None``: as fast as the tier takes them. A shard is sent whole as
        soon as those before it are paid for, so this bounds the mean and not each moment."""

    def __and__(self, other: PacingPolicy) -> PacingPolicy:
        """The slower of both."""
        return SlowestOf(flat(SlowestOf, self, other))


@dataclass(frozen=True)
class Unpaced(PacingPolicy):
    """As fast as the tiers take it."""

    def bytes_per_s(self, seen: Copying) -> float | None:
        return None


@dataclass(frozen=True)
class BytesPerSecond(PacingPolicy):
    """Each rank sends at most ``rate`` bytes a second to the tier of this name."""

    tier: str
    rate: float

    def __post_init__(self) -> None:
        check_tier(self.tier)
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float):
            raise ConfigurationError(f"rate must be a number of bytes per second, not {self.rate!r}")
        if not 1 <= self.rate < math.inf:
            raise ConfigurationError(f"rate must be at least 1 byte per second and finite, not {self.rate!r}")

    def bytes_per_s(self, seen: Copying) -> float | None:
        return self.rate if seen.tier == self.tier else None


@dataclass(frozen=True)
class SlowestOf(PacingPolicy):
    """The slowest of ``policies``: what ``&`` makes."""

    policies: tuple[PacingPolicy, ...]

    def bytes_per_s(self, seen: Copying) -> float | None:
        return min((rate for each in self.policies if (rate := each.bytes_per_s(seen)) is not None), default=None)
