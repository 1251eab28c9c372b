"""Object naming: (generation, stream, version, rank) <-> key.

The layout keeps one directory a version, so that a parallel file system sees few metadata operations::

    lineage/g000002                                                  who opened generation 2, and from where
    lineage/g000002.4f0c9a17e2b85d36                                 a claim to it, if puts have no conditions
    nominations/r00001                                               rank 1's replication job
    g000002/base/000000000040/r00001.safetensors                     rank 1's shard of base 40
    g000002/base/000000000040/r00001.done                            the shard's marker: its size and checksum
    g000002/base/000000000040/commit                                 all ranks' shards are stored whole
    g000002/differential/000000000041-000000000045/r00001.safetensors   rank 1's batch 41..45
    g000002/snapshot/000000000041-000000000045/r00001.safetensors       what changed from base 40 to version 45
    metrics/g000002/000000000040/eval_loss/3fd5c28f5c28f5c3             what the loop reported of version 40: 0.34

Numbers are zero-padded, so that the order of keys is the order of versions.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "KEY_BYTES_MAX",
    "ClaimKey",
    "CommitKey",
    "JobKey",
    "Key",
    "LineageKey",
    "MarkerKey",
    "MetricKey",
    "ShardKey",
    "Stream",
    "generation_prefix",
    "parse",
    "validate_key",
]

KEY_BYTES_MAX = 512
COMPONENT_BYTES_MAX = 255
GENERATION_MAX = 10**6 - 1
VERSION_MAX = 10**12 - 1
RANK_MAX = 10**5 - 1


class Stream(StrEnum):
    BASE = "base"
    DIFFERENTIAL = "differential"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, order=True)
class ShardKey:
    """One rank's part of a base, of a batch of differentials, or of a snapshot.

    A base has one version: ``first == last``. A snapshot leads from the base of version ``first - 1`` to ``last``, and
    to no version in between.
    """

    generation: int
    stream: Stream
    first: int
    last: int
    rank: int

    def __post_init__(self) -> None:
        check_number("generation", self.generation, GENERATION_MAX)
        check_number("version", self.first, VERSION_MAX)
        check_number("version", self.last, VERSION_MAX)
        check_number("rank", self.rank, RANK_MAX)
        if self.last < self.first:
            raise ValueError(f"a batch needs first <= last, not {self.first}..{self.last}")
        if self.stream is Stream.BASE and self.first != self.last:
            raise ValueError(f"a base has one version, not {self.first}..{self.last}")

    @classmethod
    def base(cls, generation: int, version: int, rank: int) -> ShardKey:
        return cls(generation, Stream.BASE, version, version, rank)

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

    def __str__(self) -> str:
        version = f"{self.first:012d}"
        if self.stream is not Stream.BASE:
            version += f"-{self.last:012d}"
        return f"g{self.generation:06d}/{self.stream}/{version}/r{self.rank:05d}.safetensors"


@dataclass(frozen=True, order=True)
class MarkerKey:
    """A rank's statement that its shard of a base is stored whole in this tier."""

    generation: int
    version: int
    rank: int

    def __str__(self) -> str:
        return f"g{self.generation:06d}/base/{self.version:012d}/r{self.rank:05d}.done"


@dataclass(frozen=True, order=True)
class CommitKey:
    """The record which says that every rank's shard of a base is stored whole in this tier."""

    generation: int
    version: int

    def __str__(self) -> str:
        return f"g{self.generation:06d}/base/{self.version:012d}/commit"


@dataclass(frozen=True, order=True)
class LineageKey:
    """The record that opens a generation: its parent, and the version at which it left the parent."""

    generation: int

    def __str__(self) -> str:
        return f"lineage/g{self.generation:06d}"


@dataclass(frozen=True, order=True)
class ClaimKey:
    """One job's claim to the generation that it wants to open: see :mod:`tiercheck.replication.generation`."""

    generation: int
    token: str

    def __str__(self) -> str:
        return f"lineage/g{self.generation:06d}.{self.token}"


@dataclass(frozen=True, order=True)
class JobKey:
    """The rank's replication job: where its objects are to go. It is kept in the rank's first tier."""

    rank: int

    def __str__(self) -> str:
        return f"nominations/r{self.rank:05d}"


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
        return f"metrics/g{self.generation:06d}/{self.version:012d}/{self.name}/{value}"


Key = ShardKey | MarkerKey | CommitKey | LineageKey | ClaimKey | JobKey | MetricKey

_BASE = re.compile(r"g(\d{6})/base/(\d{12})/(?:r(\d{5})\.(safetensors|done)|(commit))\Z", re.ASCII)
_VERSIONS = re.compile(r"g(\d{6})/(differential|snapshot)/(\d{12})-(\d{12})/r(\d{5})\.safetensors\Z", re.ASCII)
_LINEAGE = re.compile(r"lineage/g(\d{6})(?:\.([0-9a-f]{16}))?\Z", re.ASCII)
_METRIC = re.compile(r"metrics/g(\d{6})/(\d{12})/([A-Za-z_][A-Za-z0-9_]{0,63})/([0-9a-f]{16})\Z", re.ASCII)
_METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z", re.ASCII)
_JOB = re.compile(r"nominations/r(\d{5})\Z", re.ASCII)
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")


def generation_prefix(generation: int) -> str:
    """The beginning of the key of every object that a generation captured."""
    return f"g{generation:06d}/"


def parse(text: str) -> Key | None:
    """The key that ``text`` names, or ``None`` if it is no key of TierCheck's."""
    if match := _BASE.match(text):
        generation, version = int(match[1]), int(match[2])
        if match[5]:
            return CommitKey(generation, version)
        if match[4] == "done":
            return MarkerKey(generation, version, int(match[3]))
        return ShardKey.base(generation, version, int(match[3]))
    if match := _VERSIONS.match(text):
        generation, first, last, rank = (int(match[group]) for group in (1, 3, 4, 5))
        return ShardKey(generation, Stream(match[2]), first, last, rank) if first <= last else None
    if match := _LINEAGE.match(text):
        return ClaimKey(int(match[1]), match[2]) if match[2] else LineageKey(int(match[1]))
    if match := _JOB.match(text):
        return JobKey(int(match[1]))
    if match := _METRIC.match(text):
        (value,) = struct.unpack(">d", bytes.fromhex(match[4]))
        return MetricKey(int(match[1]), int(match[2]), match[3], value) if math.isfinite(value) else None
    return None


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
