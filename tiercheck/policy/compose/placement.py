"""Which shards go to which tier behind the first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tiercheck.keys import Stream
from tiercheck.policy.compose.checks import check_tier, check_whole, flat
from tiercheck.types import Survives

__all__ = ["AllWant", "BasesOnly", "Candidate", "EveryNth", "Everywhere", "PlacementPolicy"]

INTERVALS_MAX = 100
"""A tier gets a base after so many intervals at the latest, whatever a policy says."""


@dataclass(frozen=True)
class Candidate:
    """A shard that a tier lacks and a faster tier has."""

    tier: str
    """The tier's name."""
    survives: Survives
    """The widest failure that the tier survives."""
    stream: Stream
    first: int
    last: int
    """Its versions: of a base both are the same."""
    number: int
    """Of a base, how many intervals of the cadence lie before it: ``version // interval``. Every rank counts alike, and
    so does a restarted job."""


class PlacementPolicy(ABC):
    """Says which shards go to which tier. Make it a frozen dataclass.

    Every rank must come to the same answer for its own shards, so it may depend on the candidate alone. Whatever a
    policy says, a tier gets every base until it has one of the generation, a base that no differential leads to, and a
    base every :data:`INTERVALS_MAX` intervals.
    """

    @abstractmethod
    def wants(self, shard: Candidate) -> bool:
        """Whether the shard is to be put into the tier."""

    @property
    def named_tiers(self) -> tuple[str, ...]:
        """The names of the tiers that the policy is about; empty if it is about any. A name that no tier behind the
        first has is refused when a job is attached."""
        return ()

    def __and__(self, other: PlacementPolicy) -> PlacementPolicy:
        """A shard goes to a tier if both say so."""
        return AllWant(flat(AllWant, self, other))


@dataclass(frozen=True)
class Everywhere(PlacementPolicy):
    """Every shard goes to every tier."""

    def wants(self, shard: Candidate) -> bool:
        return True


@dataclass(frozen=True)
class BasesOnly(PlacementPolicy):
    """The tier of this name gets bases, and neither differentials nor snapshots."""

    tier: str

    def __post_init__(self) -> None:
        check_tier(self.tier)

    @property
    def named_tiers(self) -> tuple[str, ...]:
        return (self.tier,)

    def wants(self, shard: Candidate) -> bool:
        return shard.tier != self.tier or shard.stream is Stream.BASE


@dataclass(frozen=True)
class EveryNth(PlacementPolicy):
    """The tier of this name gets every ``n``-th base. Its differentials are not concerned."""

    tier: str
    n: int

    def __post_init__(self) -> None:
        check_tier(self.tier)
        check_whole("n", self.n, 1, INTERVALS_MAX)

    @property
    def named_tiers(self) -> tuple[str, ...]:
        return (self.tier,)

    def wants(self, shard: Candidate) -> bool:
        return shard.tier != self.tier or shard.stream is not Stream.BASE or shard.number % self.n == 0


@dataclass(frozen=True)
class AllWant(PlacementPolicy):
    """A shard goes to a tier if all ``policies`` say so: what ``&`` makes."""

    policies: tuple[PlacementPolicy, ...]

    @property
    def named_tiers(self) -> tuple[str, ...]:
        return tuple(name for each in self.policies for name in each.named_tiers)

    def wants(self, shard: Candidate) -> bool:
        return all(each.wants(shard) for each in self.policies)
