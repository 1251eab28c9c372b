"""How fast shards are copied to a tier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tiercheck.errors import ConfigurationError
from tiercheck.keys import Stream
from tiercheck.policy.compose.checks import check_tier, flat
from tiercheck.types import Survives

__all__ = ["BytesPerSecond", "Copying", "PacingPolicy", "SlowestOf", "Spread", "Unpaced"]


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
    left_nbytes: int | None = None
    """Of the shard, what has not been sent yet; ``None``: all of it."""
    interval: int = 1
    """Versions from one base to the next, at most."""
    versions_left: int = 0
    """Of a base: versions until the next one is due, as far as this rank has captured them."""
    version_s: float | None = None
    """Seconds from one version to the next, as measured; ``None``: not known yet."""
    awaited: bool = False
    """Somebody waits until everything, or another base, is where it belongs."""


class PacingPolicy(ABC):
    """Says how fast this rank's shards are copied to a tier. Make it a frozen dataclass."""

    @abstractmethod
    def bytes_per_s(self, seen: Copying) -> float | None:
        """What this shard's bytes count against; ``None``: as fast as the tier takes them. It is asked when a shard
        begins and, if the driver sends it in parts, before each part of a base. What was sent is paid for afterwards,
        so this bounds the mean and not each moment."""

    @property
    def named_tiers(self) -> tuple[str, ...]:
        """As of a placement policy."""
        return ()

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

    @property
    def named_tiers(self) -> tuple[str, ...]:
        return (self.tier,)

    def bytes_per_s(self, seen: Copying) -> float | None:
        return self.rate if seen.tier == self.tier else None


@dataclass(frozen=True)
class Spread(PacingPolicy):
    """Bases go little by little, and are there some time before the next one is due."""

    margin: float = 0.25
    """The share of the interval that is left then."""
    chunk: int = 256 << 20
    """The most bytes of a base that go to a tier a version. What does not fit goes on into the margin."""

    def __post_init__(self) -> None:
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float) or not 0 <= self.margin < 1:
            raise ConfigurationError(f"margin must be a share of the interval, 0 to less than 1, not {self.margin!r}")
        if type(self.chunk) is not int or self.chunk < 1:
            raise ConfigurationError(f"chunk must be a number of bytes, at least 1, not {self.chunk!r}")

    def bytes_per_s(self, seen: Copying) -> float | None:
        """A base that is late, so that the next one is due or somebody waits for it, is not held back."""
        late = seen.versions_left <= 0 or seen.undrained_bases > 1 or seen.awaited
        if seen.stream is not Stream.BASE or seen.version_s is None or late:
            return None
        left = seen.nbytes if seen.left_nbytes is None else seen.left_nbytes
        versions = max(1.0, seen.versions_left - self.margin * seen.interval)
        return max(1.0, min(self.chunk, left / versions) / max(seen.version_s, 1e-9))


@dataclass(frozen=True)
class SlowestOf(PacingPolicy):
    """The slowest of ``policies``: what ``&`` makes."""

    policies: tuple[PacingPolicy, ...]

    @property
    def named_tiers(self) -> tuple[str, ...]:
        return tuple(name for each in self.policies for name in each.named_tiers)

    def bytes_per_s(self, seen: Copying) -> float | None:
        return min((rate for each in self.policies if (rate := each.bytes_per_s(seen)) is not None), default=None)
