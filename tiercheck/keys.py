"""Object naming: (rank, generation, stream, version) <-> key.

A key begins with what a reader asks for. A rank lists what is its own, and what concerns the whole job, which is little
however many ranks there are (``docs/adr/0028-keys-begin-with-what-a-reader-asks-for.md``)::

    r00001/g000002/base/000000000040.safetensors                      rank 1's shard of base 40
    r00001/g000002/differential/000000000041-000000000045.safetensors rank 1's batch 41..45
    r00001/g000002/snapshot/000000000041-000000000045.safetensors     what changed from base 40 to version 45
    r00001/g000001/constant/000000000000.safetensors                  what has not changed since version 0
    r00001/g000002/base/000000000040.g000001-000000000000.safetensors a base that refers to it, and lacks it
    done/r00001/g000002/000000000040/1048576-8192-9b1d...-4f0c...     rank 1's shard is whole: its size and checksum
    job/commits/g000002/000000000040                                  all ranks' shards of base 40 are stored whole
    job/commits/g000002/000000000040-000000000045                     and all snapshots that lead from it to version 45
    job/lineage/g000002                                               who opened generation 2, and from where
    job/lineage/g000002.4f0c9a17e2b85d36                              a claim to it, if puts have no conditions
    job/metrics/g000002/000000000040/eval_loss/3fd5c28f5c28f5c3       what the loop reported of version 40: 0.34
    replication/r00001                                                rank 1's replication job

Numbers are zero-padded, so that the order of keys is the order of versions. Commit records come before the lineage: a
listing shows no generation's commits without the generations that had opened before.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

__all__ = [
    "COMMITS",
    "JOB",
    "KEY_BYTES_MAX",
    "LINEAGE",
    "MARKERS",
    "ONE_VERSION",
    "REPLICATION",
    "ClaimKey",
    "CommitKey",
    "JobKey",
    "Key",
    "LineageKey",
    "MarkerKey",
    "MetricKey",
    "ShardKey",
    "Stream",
    "captured_prefix",
    "own_prefixes",
    "parse",
    "parse_reference",
    "rank_prefix",
    "reference",
    "validate_key",
]

KEY_BYTES_MAX = 512
COMPONENT_BYTES_MAX = 255
GENERATION_MAX = 10**6 - 1
VERSION_MAX = 10**12 - 1
RANK_MAX = 10**5 - 1
NBYTES_MAX = 10**15

JOB = "job/"
"""What concerns all ranks."""
LINEAGE = "job/lineage/"
COMMITS = "job/commits/"
MARKERS = "done/"
"""Of all ranks: the coordinator's to list."""
REPLICATION = "replication/"


class Stream(StrEnum):
    BASE = "base"
    DIFFERENTIAL = "differential"
    SNAPSHOT = "snapshot"
    CONSTANT = "constant"


ONE_VERSION = (Stream.BASE, Stream.CONSTANT)
"""The streams whose shards are of one version. The others' are of several."""


@dataclass(frozen=True, order=True)
class ShardKey:
    """One rank's part of a base, of a batch of differentials, or of a snapshot; or its constants.

    A base has one version: ``first == last``. A snapshot leads from the base of version ``first - 1`` to ``last``, and
    to no version in between. Constants are tensors that have not changed since their version; bases refer to them.
    """

    generation: int
    stream: Stream
    first: int
    last: int
    rank: int
    refers_to: tuple[int, ...] = ()
    """Of a base, the generation and the version of the constants that it lacks; empty if it is whole by itself."""

    def __post_init__(self) -> None:
        check_number("generation", self.generation, GENERATION_MAX)
        check_number("version", self.first, VERSION_MAX)
        check_number("version", self.last, VERSION_MAX)
        check_number("rank", self.rank, RANK_MAX)
        if self.last < self.first:
            raise ValueError(f"a batch needs first <= last, not {self.first}..{self.last}")
        if self.stream in ONE_VERSION and self.first != self.last:
            raise ValueError(f"a {self.stream} has one version, not {self.first}..{self.last}")
        if self.refers_to:
            if self.stream is not Stream.BASE:
                raise ValueError(f"a {self.stream} refers to no constants")
            generation, version = self.refers_to
            check_number("generation of the constants", generation, self.generation)
            check_number("version of the constants", version, VERSION_MAX)

    def __hash__(self) -> int:
        # Decisions look shards up all the time: few shards of a rank share these numbers.
        return hash((self.generation, self.first, self.last, self.rank))

    @classmethod
    def base(cls, generation: int, version: int, rank: int, refers_to: tuple[int, ...] = ()) -> ShardKey:
        return cls(generation, Stream.BASE, version, version, rank, refers_to)

    @classmethod
    def constant(cls, generation: int, version: int, rank: int) -> ShardKey:
        return cls(generation, Stream.CONSTANT, version, version, rank)

    @classmethod
    def differential(cls, generation: int, first: int, last: int, rank: int) -> ShardKey:
        return cls(generation, Stream.DIFFERENTIAL, first, last, rank)

    @classmethod
    def snapshot(cls, generation: int, base: int, version: int, rank: int) -> ShardKey:
        """The state's change from version ``base`` to a later ``version``."""
        return cls(generation, Stream.SNAPSHOT, base + 1, version, rank)

    @property
    def versions(self) -> range:
        return range(self.first, self.last + 1)

    @cached_property
    def constants(self) -> ShardKey | None:
        """Of a base, what it refers to."""
        if not self.refers_to:
            return None
        generation, version = self.refers_to
        return ShardKey.constant(generation, version, self.rank)

    def __str__(self) -> str:
        version = f"{self.first:012d}"
        if self.stream not in ONE_VERSION:
            version += f"-{self.last:012d}"
        if self.refers_to:
            version += f".{reference(self.refers_to)}"
        return f"{captured_prefix(self.rank, self.generation)}{self.stream}/{version}.safetensors"


@dataclass(frozen=True, order=True)
class CommitKey:
    """The record which says that what leads to a version is stored whole in this tier, of every rank: its shard of the
    base, or, if ``base`` is an older one, its snapshot that leads from there."""

    generation: int
    version: int
    base: int = -1
    """The version of the base; by default ``version`` itself."""

    def __post_init__(self) -> None:
        if self.base < 0:
            object.__setattr__(self, "base", self.version)
        check_number("generation", self.generation, GENERATION_MAX)
        check_number("version", self.version, VERSION_MAX)
        check_number("base", self.base, self.version)

    @classmethod
    def of(cls, shard: ShardKey) -> CommitKey:
        """Of a base, or of a snapshot."""
        return cls(shard.generation, shard.last, shard.first if shard.stream is Stream.BASE else shard.first - 1)

    @property
    def is_of_base(self) -> bool:
        return self.base == self.version

    def shard(self, rank: int, refers_to: tuple[int, ...] = ()) -> ShardKey:
        """The rank's shard that the record speaks of. The record does not tell what a base ``refers_to``."""
        if self.is_of_base:
            return ShardKey.base(self.generation, self.version, rank, refers_to)
        return ShardKey.snapshot(self.generation, self.base, self.version, rank)

    def __str__(self) -> str:
        return f"{COMMITS}{self._name}"

    @property
    def _name(self) -> str:
        led = "" if self.is_of_base else f"-{self.version:012d}"
        return f"g{self.generation:06d}/{self.base:012d}{led}"


@dataclass(frozen=True, order=True)
class MarkerKey:
    """A rank's statement that its shard of what is to be committed is stored whole in this tier.

    What it states is part of the key, so that a listing tells it. A second statement about the shard is another key.
    """

    commit: CommitKey
    rank: int
    nbytes: int = 0
    """The shard's length."""
    header_nbytes: int = 0
    """The length of its header, which holds the checksums of all the rest."""
    digest: str = "0" * 16
    """The checksum of the header."""
    token: str = ""
    """The generation's token, as the shard has it."""
    refers_to: tuple[int, ...] = ()
    """As the shard's key has it."""

    def __post_init__(self) -> None:
        check_number("rank", self.rank, RANK_MAX)
        check_number("length", self.nbytes, NBYTES_MAX)
        check_number("header", self.header_nbytes, NBYTES_MAX)

    @classmethod
    def of(cls, shard: ShardKey, nbytes: int, header_nbytes: int, digest: str, token: str) -> MarkerKey:
        """Of a base, or of a snapshot."""
        return cls(CommitKey.of(shard), shard.rank, nbytes, header_nbytes, digest, token, shard.refers_to)

    @property
    def said(self) -> str:
        """What it states, for people."""
        whose = f" of {self.token}" if self.token else ""
        return f"{self.nbytes} bytes with a header of {self.header_nbytes} and checksum {self.digest}{whose}"

    @property
    def generation(self) -> int:
        return self.commit.generation

    @cached_property
    def shard(self) -> ShardKey:
        return self.commit.shard(self.rank, self.refers_to)

    def __str__(self) -> str:
        said = f"{self.nbytes}-{self.header_nbytes}-{self.digest}-{self.token}"
        if self.refers_to:
            said += f".{reference(self.refers_to)}"
        return f"{MARKERS}r{self.rank:05d}/{self.commit._name}/{said}"


@dataclass(frozen=True, order=True)
class LineageKey:
    """The record that opens a generation: its parent, and the version at which it left the parent."""

    generation: int

    def __str__(self) -> str:
        return f"{LINEAGE}g{self.generation:06d}"


@dataclass(frozen=True, order=True)
class ClaimKey:
    """One job's claim to the generation that it wants to open: see :mod:`tiercheck.replication.objects.generation`."""

    generation: int
    token: str

    def __str__(self) -> str:
        return f"{LINEAGE}g{self.generation:06d}.{self.token}"


@dataclass(frozen=True, order=True)
class JobKey:
    """The rank's replication job: where its objects are to go. It is kept in the rank's first tier."""

    rank: int

    def __str__(self) -> str:
        return f"{REPLICATION}r{self.rank:05d}"


@dataclass(frozen=True, order=True)
class MetricKey:
    """What the training loop has reported of a version. The value is part of the key, so that a listing tells it."""

    generation: int
    version: int
    name: str
    value: float

    def __post_init__(self) -> None:
        check_number("generation", self.generation, GENERATION_MAX)
        check_number("version", self.version, VERSION_MAX)
        if not is_metric_name(self.name):
            raise ValueError(f"{self.name!r} is no name of a metric")
        if not math.isfinite(self.value):
            raise ValueError(f"the metric {self.name} is {self.value}; a value that is kept is finite")

    def __str__(self) -> str:
        value = struct.pack(">d", self.value).hex()
        return f"{JOB}metrics/g{self.generation:06d}/{self.version:012d}/{self.name}/{value}"


Key = ShardKey | MarkerKey | CommitKey | LineageKey | ClaimKey | JobKey | MetricKey

_SHARD = re.compile(
    r"r(\d{5})/g(\d{6})/(base|differential|snapshot|constant)/(\d{12})(?:-(\d{12}))?"
    r"(?:\.g(\d{6})-(\d{12}))?\.safetensors\Z",
    re.ASCII,
)
_COMMIT = re.compile(r"job/commits/g(\d{6})/(\d{12})(?:-(\d{12}))?\Z", re.ASCII)
_MARKER = re.compile(
    r"done/r(\d{5})/g(\d{6})/(\d{12})(?:-(\d{12}))?"
    r"/(0|[1-9]\d{0,15})-(0|[1-9]\d{0,15})-([0-9a-f]{16})-((?:[0-9a-f]{16})?)"
    r"(?:\.g(\d{6})-(\d{12}))?\Z",
    re.ASCII,
)
_LINEAGE = re.compile(r"job/lineage/g(\d{6})(?:\.([0-9a-f]{16}))?\Z", re.ASCII)
_METRIC = re.compile(r"job/metrics/g(\d{6})/(\d{12})/([A-Za-z_][A-Za-z0-9_]{0,63})/([0-9a-f]{16})\Z", re.ASCII)
_REFERENCE = re.compile(r"g(\d{6})-(\d{12})\Z", re.ASCII)
_METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z", re.ASCII)
_JOB = re.compile(r"replication/r(\d{5})\Z", re.ASCII)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")


def rank_prefix(rank: int) -> str:
    """The beginning of the key of every object that a rank captured."""
    return f"r{rank:05d}/"


def captured_prefix(rank: int, generation: int) -> str:
    """The beginning of the key of every object that a rank captured in a generation."""
    return f"{rank_prefix(rank)}g{generation:06d}/"


def own_prefixes(rank: int, *, coordinator: bool, departed: Iterable[int] = ()) -> tuple[str, ...]:
    """What a rank lists in a tier that all ranks share, in this order: its markers (the ``coordinator``: everybody's),
    what concerns the job, what the rank itself has captured, and what those that ``departed`` have left to it."""
    owned = (rank, *departed)
    markers = (MARKERS,) if coordinator else tuple(f"{MARKERS}r{each:05d}/" for each in owned)
    return (*markers, JOB, *map(rank_prefix, owned))


def parse(text: str) -> Key | None:
    """The key that ``text`` names, or ``None`` if it is no key of TierCheck's."""
    if match := _SHARD.match(text):
        refers_to = _numbers(match[6], match[7])
        return _shard(Stream(match[3]), int(match[2]), int(match[4]), match[5], int(match[1]), refers_to)
    if match := _COMMIT.match(text):
        return _commit(match[1], match[2], match[3])
    if match := _MARKER.match(text):
        commit = _commit(match[2], match[3], match[4])
        sizes = int(match[5]), int(match[6])
        refers_to = _numbers(match[9], match[10])
        if commit is None or max(sizes) > NBYTES_MAX:
            return None
        if refers_to and (not commit.is_of_base or refers_to[0] > commit.generation):
            return None
        return MarkerKey(commit, int(match[1]), *sizes, match[7], match[8], refers_to)
    if match := _LINEAGE.match(text):
        return ClaimKey(int(match[1]), match[2]) if match[2] else LineageKey(int(match[1]))
    if match := _JOB.match(text):
        return JobKey(int(match[1]))
    if match := _METRIC.match(text):
        (value,) = struct.unpack(">d", bytes.fromhex(match[4]))
        return MetricKey(int(match[1]), int(match[2]), match[3], value) if math.isfinite(value) else None
    return None


def _shard(
    stream: Stream, generation: int, first: int, last: str | None, rank: int, refers_to: tuple[int, ...]
) -> ShardKey | None:
    if (stream in ONE_VERSION) != (last is None):
        return None
    if refers_to and (stream is not Stream.BASE or refers_to[0] > generation):
        return None
    until = first if last is None else int(last)
    return ShardKey(generation, stream, first, until, rank, refers_to) if first <= until else None


def _numbers(*texts: str | None) -> tuple[int, ...]:
    return tuple(int(text) for text in texts if text is not None)


def reference(refers_to: tuple[int, ...]) -> str:
    """The generation and the version of constants, as keys and headers have them."""
    generation, version = refers_to
    return f"g{generation:06d}-{version:012d}"


def parse_reference(text: str) -> tuple[int, ...]:
    """What :func:`reference` returned; empty for an empty text. Errors: ``ValueError``."""
    if not text:
        return ()
    if (match := _REFERENCE.match(text)) is None:
        raise ValueError(f"{text[:80]!r} names no constants")
    return _numbers(match[1], match[2])


def _commit(generation: str, base: str, version: str | None) -> CommitKey | None:
    if version is not None and version <= base:
        return None
    return CommitKey(int(generation), int(version or base), int(base))


def is_metric_name(name: str) -> bool:
    """Whether a metric may be called so: letters, digits and ``_``, at most 64."""
    return _METRIC_NAME.match(name) is not None


def validate_key(key: str, *, bytes_max: int = KEY_BYTES_MAX) -> str:
    """Return ``key`` if it is safe to turn into a path or a URL.

    Raises:
        ValueError: the key is empty, absolute or too long, or it has an empty, ``.`` or ``..`` component, a control
            character, a backslash or a lone surrogate.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the key {key!r} is not valid Unicode") from None
    if not encoded:
        raise ValueError("a key cannot be empty")
    if len(encoded) > bytes_max:
        raise ValueError(f"the key {key[:40]!r}... has {len(encoded)} bytes; at most {bytes_max} are allowed")
    if _UNSAFE.search(key):
        raise ValueError(f"the key {key!r} has a control character or a backslash")
    for component in key.split("/"):
        if component in ("", ".", ".."):
            raise ValueError(f"the key {key!r} has the component {component!r}; keys are relative and plain")
        if len(component.encode()) > COMPONENT_BYTES_MAX:
            raise ValueError(f"the key {key[:40]!r}... has a component over {COMPONENT_BYTES_MAX} bytes")
    return key


def check_number(label: str, value: int, maximum: int) -> None:
    if not 0 <= value <= maximum:
        raise ValueError(f"{label} {value} is outside 0..{maximum}")
