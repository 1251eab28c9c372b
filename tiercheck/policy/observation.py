"""What the tiers hold, as one rank sees it at one moment: the input of every placement decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from tiercheck.keys import ClaimKey, CommitKey, JobKey, Key, LineageKey, MarkerKey, MetricKey, ShardKey, Stream
from tiercheck.policy.recovery.lineage import Lineage
from tiercheck.types import Survives

__all__ = ["Contents", "Copy", "Observation", "Role", "lasting"]


@dataclass(frozen=True)
class Role:
    """A tier's place in the hierarchy, as far as a decision needs it. Versions are captured in the tier of index 0."""

    index: int
    name: str
    survives: Survives

    @property
    def shared(self) -> bool:
        """Whether every rank of the job sees the same objects: a tier that outlives a rack lies outside any node."""
        return self.survives >= Survives.RACK


@dataclass(frozen=True, order=True)
class Copy:
    """One copy of a shard: the tier's index in the hierarchy, and the key."""

    tier: int
    key: ShardKey


class _Group(Enum):
    """What is kept by no rank."""

    JOB = "commit records and lineage records"
    MARKERS = "the markers of all ranks that were listed"


class _Held:
    """What one tier holds of one rank, or of a group."""

    def __init__(self, nbytes: Mapping[Key, int]) -> None:
        self.nbytes = nbytes

    @cached_property
    def shards(self) -> Mapping[Stream, tuple[ShardKey, ...]]:
        """By stream, the oldest first. Of several snapshots for one version, the newest base's comes last."""
        found: dict[Stream, list[ShardKey]] = {stream: [] for stream in Stream}
        for key in self.nbytes:
            if isinstance(key, ShardKey):
                found[key.stream].append(key)
        found[Stream.SNAPSHOT].sort(key=lambda key: (key.generation, key.last, key.first))
        for stream in (Stream.BASE, Stream.DIFFERENTIAL, Stream.CONSTANT):
            found[stream].sort(key=lambda key: (key.generation, key.first, key.last))
        return {stream: tuple(keys) for stream, keys in found.items()}

    @cached_property
    def of_generation(self) -> Mapping[tuple[Stream, int], tuple[ShardKey, ...]]:
        grouped: dict[tuple[Stream, int], list[ShardKey]] = {}
        for stream, keys in self.shards.items():
            for key in keys:
                grouped.setdefault((stream, key.generation), []).append(key)
        return {group: tuple(keys) for group, keys in grouped.items()}

    @cached_property
    def covered(self) -> Set[tuple[int, int]]:
        """The generation and version of each gradient in the differentials."""
        return {(key.generation, version) for key in self.shards[Stream.DIFFERENTIAL] for version in key.versions}

    @cached_property
    def base_at(self) -> Mapping[tuple[int, int], ShardKey]:
        return {(key.generation, key.first): key for key in self.shards[Stream.BASE]}

    @cached_property
    def oldest_generation(self) -> int | None:
        return min((keys[0].generation for keys in self.shards.values() if keys), default=None)

    @cached_property
    def marked(self) -> Mapping[CommitKey, Mapping[int, tuple[MarkerKey, ...]]]:
        marked: dict[CommitKey, dict[int, tuple[MarkerKey, ...]]] = {}
        for key in self.nbytes:
            if isinstance(key, MarkerKey):
                ranks = marked.setdefault(key.commit, {})
                ranks[key.rank] = (*ranks.get(key.rank, ()), key)
        return marked

    @cached_property
    def commits(self) -> tuple[CommitKey, ...]:
        return tuple(sorted(key for key in self.nbytes if isinstance(key, CommitKey) and key.is_of_base))

    @cached_property
    def snapshot_commits(self) -> tuple[CommitKey, ...]:
        return tuple(sorted(key for key in self.nbytes if isinstance(key, CommitKey) and not key.is_of_base))

    @cached_property
    def generations(self) -> tuple[LineageKey | ClaimKey, ...]:
        return tuple(key for key in self.nbytes if isinstance(key, LineageKey | ClaimKey))

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        return tuple(sorted(key.generation for key in self.generations if isinstance(key, LineageKey)))

    @cached_property
    def metrics(self) -> tuple[MetricKey, ...]:
        return tuple(sorted(key for key in self.nbytes if isinstance(key, MetricKey)))


class Contents:
    """The objects of one tier: TierCheck's keys and their sizes in bytes.

    It is a value, stored by rank. So a question about one rank costs as much as that rank has there, however many ranks
    there are, and :meth:`changed` shares with the old contents whatever has not changed.
    """

    def __init__(self, held: Mapping[int | _Group, _Held] | None = None) -> None:
        self._held = {} if held is None else held

    @classmethod
    def of(cls, objects: Iterable[tuple[Key, int]]) -> Contents:
        return cls().changed(dict(objects))

    def changed(self, changes: Mapping[Key, int | None]) -> Contents:
        """The contents after these changes: an object is put (its size), or deleted (``None``)."""
        by_rank: dict[int | _Group, dict[Key, int]] = {}
        for key, nbytes in changes.items():
            rank = _rank_of(key)
            if rank not in by_rank:
                before = self._held.get(rank)
                by_rank[rank] = dict(before.nbytes) if before else {}
            if nbytes is None:
                by_rank[rank].pop(key, None)
            else:
                by_rank[rank][key] = nbytes
        held = {**self._held, **{rank: _Held(each) for rank, each in by_rank.items()}}
        return Contents({rank: each for rank, each in held.items() if each.nbytes})

    def __contains__(self, key: Key) -> bool:
        held = self._held.get(_rank_of(key))
        return held is not None and key in held.nbytes

    def __iter__(self) -> Iterator[Key]:
        """Every key, in no particular order."""
        for held in self._held.values():
            yield from held.nbytes

    @cached_property
    def nbytes(self) -> Mapping[Key, int]:
        """Every object of every rank, and its size in bytes."""
        return {key: nbytes for held in self._held.values() for key, nbytes in held.nbytes.items()}

    @property
    def ranks(self) -> list[int]:
        """The ranks that have objects here, besides markers."""
        return [rank for rank in self._held if not isinstance(rank, _Group)]

    def left_behind(self, generation: int) -> list[int]:
        """The ranks that have shards of older generations here."""
        oldest = ((rank, self._held[rank].oldest_generation) for rank in self.ranks)
        return [rank for rank, each in oldest if each is not None and each < generation]

    @property
    def commits(self) -> tuple[CommitKey, ...]:
        """Of bases, oldest first."""
        return self._of_no_rank.commits

    @property
    def snapshot_commits(self) -> tuple[CommitKey, ...]:
        """Of snapshots, oldest first."""
        return self._of_no_rank.snapshot_commits

    @property
    def generations(self) -> tuple[LineageKey | ClaimKey, ...]:
        """The lineage records, and claims to one."""
        return self._of_no_rank.generations

    @property
    def recorded(self) -> tuple[int, ...]:
        """The generations that have a lineage record here, ascending."""
        return self._of_no_rank.recorded

    @property
    def newest_generation(self) -> int:
        """The newest generation that opened here; 0 if there is none."""
        return self.recorded[-1] if self.recorded else 0

    @property
    def metrics(self) -> tuple[MetricKey, ...]:
        """Oldest first."""
        return self._of_no_rank.metrics

    def bases(self, rank: int) -> tuple[ShardKey, ...]:
        """The rank's bases, oldest first."""
        return self._held.get(rank, _NOTHING).shards[Stream.BASE]

    def constants(self, rank: int) -> tuple[ShardKey, ...]:
        """The rank's constants, oldest first."""
        return self._held.get(rank, _NOTHING).shards[Stream.CONSTANT]

    def shard(self, commit: CommitKey, rank: int) -> ShardKey | None:
        """The rank's shard of what is committed, or to be committed, if it is here."""
        if commit.is_of_base:
            return self._held.get(rank, _NOTHING).base_at.get((commit.generation, commit.version))
        shard = commit.shard(rank)
        return shard if shard in self else None

    def completes(self, base: ShardKey) -> bool:
        """Whether what the base refers to is here."""
        return base.constants is None or base.constants in self

    def differentials(self, rank: int) -> tuple[ShardKey, ...]:
        """The rank's batches, oldest first."""
        return self._held.get(rank, _NOTHING).shards[Stream.DIFFERENTIAL]

    def covers(self, key: ShardKey) -> bool:
        """Whether every version of the differential is here, whatever batches it is in."""
        covered = self._held.get(key.rank, _NOTHING).covered
        return all((key.generation, version) in covered for version in key.versions)

    def snapshots(self, rank: int) -> tuple[ShardKey, ...]:
        """The rank's snapshots, oldest first. Of several for one version, the newest base's comes last."""
        return self._held.get(rank, _NOTHING).shards[Stream.SNAPSHOT]

    def of_generation(self, generation: int, stream: Stream, rank: int) -> tuple[ShardKey, ...]:
        """The rank's shards of one generation and stream, oldest first."""
        return self._held.get(rank, _NOTHING).of_generation.get((stream, generation), ())

    def marked(self, commit: CommitKey) -> Mapping[int, tuple[MarkerKey, ...]]:
        """By rank, the markers of what is to be committed."""
        return self._held.get(_Group.MARKERS, _NOTHING).marked.get(commit, {})

    def markers(self, rank: int) -> list[MarkerKey]:
        """The rank's markers, oldest first."""
        marked = self._held.get(_Group.MARKERS, _NOTHING).marked
        return [key for commit in sorted(marked) for key in marked[commit].get(rank, ())]

    @property
    def _of_no_rank(self) -> _Held:
        return self._held.get(_Group.JOB, _NOTHING)


_NOTHING = _Held({})


def _rank_of(key: Key) -> int | _Group:
    match key:
        case ShardKey() | JobKey():
            return key.rank
        case MarkerKey():
            return _Group.MARKERS
    return _Group.JOB


def lasting(roles: Sequence[Role]) -> tuple[Role, ...]:
    """The tiers that outlive the node. If none does: those that survive most."""
    least = min(Survives.NODE, max(role.survives for role in roles))
    return tuple(role for role in roles if role.survives >= least)


@dataclass(frozen=True)
class Observation:
    """What one rank sees: the hierarchy's tiers, fastest first, and what each holds."""

    roles: tuple[Role, ...]
    contents: tuple[Contents, ...]
    rank: int
    world_size: int
    generation: int
    lineage: Lineage
    """The job's own past. What lies outside of it is another future, which nobody needs."""
    mark: int | None = None
    """Without a shared tier, the version that the ranks agreed on last (:mod:`tiercheck.policy.recovery.agreement`);
    ``None``: this rank was not told."""
    relisted: bool = False
    """Whether the first tier was listed whole, other ranks' objects among them, after the generation has settled
    (:func:`tiercheck.policy.watermark.is_settled`). Before, other ranks may have brought more than is known of them."""
    differing: int | None = None
    """The newest version whose folded base differed from what training had: bases after it are captured."""
    short_of_room: frozenset[int] = frozenset()
    """The tiers, by index, that have refused something of this rank's for want of room, once or more."""
    under_pressure: bool = False
    """This rank needs a base that is not due, and the first tier has no room for it before the ranks agree on a newer
    mark."""

    def __post_init__(self) -> None:
        if len(self.roles) != len(self.contents) or not self.roles:
            raise ValueError(f"{len(self.roles)} roles do not match {len(self.contents)} contents")

    @cached_property
    def durable(self) -> Role:
        """The tier that survives most; if several do, the slowest of them."""
        return max(self.roles, key=lambda role: (role.survives, role.index))

    @cached_property
    def recorded_versions(self) -> tuple[int, ...]:
        """The versions of this rank's differentials of the present generation, whatever tier has them, ascending."""
        batches = (held.of_generation(self.generation, Stream.DIFFERENTIAL, self.rank) for held in self.contents)
        return tuple(sorted({version for keys in batches for key in keys for version in key.versions}))

    def led_from(self, bases: frozenset[int]) -> Mapping[int, int]:
        """By version, the newest of these bases from which consecutive recorded versions lead there; itself, of a
        base. A version to which none leads is left out."""
        if (known := self._led.get(bases)) is not None:
            return known
        led = {base: base for base in bases}
        for version in self.recorded_versions:
            if version not in led and version - 1 in led:
                led[version] = led[version - 1]
        self._led[bases] = led
        return led

    @cached_property
    def _led(self) -> dict[frozenset[int], Mapping[int, int]]:
        return {}

    def own(self, role: Role) -> list[ShardKey]:
        """This rank's shards in the tier, the constants among them."""
        held, rank = self.contents[role.index], self.rank
        return [*held.bases(rank), *held.differentials(rank), *held.snapshots(rank), *held.constants(rank)]

    def refers(self, rank: int, constants: ShardKey) -> ShardKey | None:
        """A base of the rank, in any tier, that refers to these constants."""
        bases = (base for contents in self.contents for base in contents.bases(rank))
        return next((base for base in bases if base.constants == constants), None)

    def after(self, puts: Iterable[tuple[int, Key]]) -> Observation:
        """The observation after these objects (tier index, key) were put."""
        more: list[dict[Key, int | None]] = [{} for _ in self.roles]
        for index, key in puts:
            more[index][key] = 0
        contents = tuple(held.changed(new) if new else held for held, new in zip(self.contents, more, strict=True))
        return replace(self, contents=contents)

    def without(self, gone: Mapping[int, Iterable[Key]]) -> Observation:
        """The observation after these objects, by tier index, were deleted."""
        contents = tuple(held.changed(dict.fromkeys(gone.get(i, ()))) for i, held in enumerate(self.contents))
        return replace(self, contents=contents)

    @property
    def newest_generation(self) -> int:
        """The newest generation that any tier knows of. If it is newer than ``generation``, this job is superseded."""
        return max(contents.newest_generation for contents in self.contents)
