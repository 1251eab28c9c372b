"""What the tiers hold, as one rank sees it at one moment: the input of every placement decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tiercheck.keys import CommitKey, Key, LineageKey, MarkerKey, ShardKey, Stream
from tiercheck.policy.lineage import Lineage
from tiercheck.types import Survives

__all__ = ["Contents", "Observation", "Role"]


@dataclass(frozen=True)
class Role:
    """A tier's place in the hierarchy, as far as a decision needs it. Index 0 is the tier captures land in."""

    index: int
    name: str
    survives: Survives

    @property
    def shared(self) -> bool:
        """Whether every rank of the job sees the same objects: what outlives a rack lies outside any node."""
        return self.survives >= Survives.RACK


@dataclass(frozen=True)
class Contents:
    """The objects of one tier: TierCheck's keys and their sizes in bytes."""

    nbytes: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Iterable[tuple[Key, int]]) -> Contents:
        return cls(dict(objects))

    def __contains__(self, key: object) -> bool:
        return key in self.nbytes

    @cached_property
    def shards(self) -> tuple[ShardKey, ...]:
        return tuple(sorted(key for key in self.nbytes if isinstance(key, ShardKey)))

    @cached_property
    def markers(self) -> frozenset[MarkerKey]:
        return frozenset(key for key in self.nbytes if isinstance(key, MarkerKey))

    @cached_property
    def commits(self) -> tuple[CommitKey, ...]:
        """Oldest first."""
        return tuple(sorted(key for key in self.nbytes if isinstance(key, CommitKey)))

    @cached_property
    def newest_generation(self) -> int:
        """The newest generation that opened here; 0 for none."""
        return max((key.generation for key in self.nbytes if isinstance(key, LineageKey)), default=0)

    def bases(self, rank: int) -> list[ShardKey]:
        """The rank's bases, oldest first."""
        return [key for key in self.shards if key.stream is Stream.BASE and key.rank == rank]

    def differentials(self, rank: int) -> list[ShardKey]:
        """The rank's batches, oldest first."""
        return [key for key in self.shards if key.stream is Stream.DIFFERENTIAL and key.rank == rank]

    def snapshots(self, rank: int) -> list[ShardKey]:
        """The rank's snapshots, oldest first; of one version that of the newest base last."""
        found = [key for key in self.shards if key.stream is Stream.SNAPSHOT and key.rank == rank]
        return sorted(found, key=lambda key: (key.generation, key.last, key.first))


@dataclass(frozen=True)
class Observation:
    """What one rank sees: the hierarchy's tiers, fastest first, and what each holds."""

    roles: tuple[Role, ...]
    contents: tuple[Contents, ...]
    rank: int
    world_size: int
    generation: int
    lineage: Lineage
    """The job's own past. What lies outside of it is another future, of use to nobody."""

    def __post_init__(self) -> None:
        if len(self.roles) != len(self.contents) or not self.roles:
            raise ValueError(f"{len(self.roles)} roles do not match {len(self.contents)} contents")

    @cached_property
    def durable(self) -> Role:
        """The tier that survives most; the slowest of those that survive alike."""
        return max(self.roles, key=lambda role: (role.survives, role.index))

    @property
    def newest_generation(self) -> int:
        """The newest generation that any tier knows of. Newer than ``generation``: this job is superseded."""
        return max(contents.newest_generation for contents in self.contents)
