"""Frozen values every layer shares."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import ClassVar

__all__ = [
    "Buffer",
    "ByteRange",
    "Capabilities",
    "Fidelity",
    "Leftover",
    "ObjectInfo",
    "Payload",
    "PutMode",
    "Survives",
    "Usage",
    "bytes_text",
    "is_unicode",
    "shown",
]

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. A ``memoryview`` must be C-contiguous with format ``B``."""

Payload = Sequence[Buffer]
"""An object's content as the concatenation of buffers; a driver never joins them."""


class Survives(IntEnum):
    """The widest failure that data in a tier outlives."""

    NOTHING = 0
    PROCESS = 1
    NODE = 2
    RACK = 3
    SITE = 4

    @classmethod
    def parse(cls, text: str) -> Survives:
        """``"rack"`` to ``Survives.RACK``; ``ValueError`` lists the names."""
        try:
            return cls[text.upper()]
        except KeyError:
            names = ", ".join(member.name.lower() for member in cls)
            raise ValueError(f"unknown failure class {text!r}: choose one of {names}") from None


class Fidelity(StrEnum):
    """How faithfully a codec keeps gradients, from best to worst."""

    EXACT = "exact"
    EXACT_IF_TRAINED_ON = "exact-if-trained-on"
    APPROXIMATE = "approximate"

    @classmethod
    def worst(cls, *values: Fidelity) -> Fidelity:
        """The lowest of ``values``; ``EXACT`` for none."""
        order = list(cls)
        return max(values, key=order.index, default=cls.EXACT)


@dataclass(frozen=True)
class ByteRange:
    """The half-open range ``[start, stop)`` of an object's bytes."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a byte range needs 0 <= start <= stop, not [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        """True, also of an empty range: ``if range`` asks whether there is one."""
        return True


@dataclass(frozen=True)
class PutMode:
    """On which condition a put publishes: ``OVERWRITE``, ``CREATE`` or ``UPDATE(etag)``."""

    kind: str
    etag: str | None = None

    OVERWRITE: ClassVar[PutMode]
    CREATE: ClassVar[PutMode]

    @staticmethod
    def UPDATE(etag: str) -> PutMode:
        """Publish only if the object's current etag is ``etag``."""
        return PutMode("update", etag)

    @property
    def conditional(self) -> bool:
        return self.kind != "overwrite"


PutMode.OVERWRITE = PutMode("overwrite")
PutMode.CREATE = PutMode("create")


@dataclass(frozen=True)
class ObjectInfo:
    """What a tier knows of an object. ``etag`` changes with every put of the key. In a listing it is empty if
    ``capabilities.lists_etags`` is false."""

    key: str
    nbytes: int
    etag: str
    written_s: float | None = field(default=None, compare=False)
    """In a listing, when the object was written: seconds since the epoch, by the store's clock. ``None``: the driver
    does not tell."""


@dataclass(frozen=True)
class Leftover:
    """What a dead process has left in a tier beside the objects: it is of no use to anybody."""

    what: str
    """Such as ``temporary file``."""
    name: str
    nbytes: int | None
    """``None``: the store does not tell."""
    age_s: float
    """Since somebody last wrote to it."""


@dataclass(frozen=True)
class Usage:
    """Bytes a tier holds, and the most it may hold (``None``: no limit is known)."""

    used_bytes: int
    limit_bytes: int | None

    @property
    def free_bytes(self) -> int | None:
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Capabilities:
    """What a driver can do. Both values of a flag are tested: a call that a false flag excludes raises
    ``Unsupported``."""

    survives: Survives
    """The widest failure the data outlives."""
    mappable: bool = False
    """``reserve`` hands out writable memory inside the tier; ``get`` maps instead of copying."""
    conditional_put: bool = False
    """``CREATE`` and ``UPDATE`` are atomic against every other client of the tier."""
    ranged_get: bool = True
    """``get(range=...)`` transfers only that range."""
    lists_etags: bool = True
    """``list`` tells each object's etag. If false, the etag is empty in a listing, and ``stat`` tells it."""
    part_bytes: int = 8 << 20
    """The unit of transfer at which the driver is fast."""
    parts_in_flight: int = 1
    """Units the driver transfers at once."""
    key_bytes_max: int = field(default=512)
    """The longest key the driver takes, in UTF-8 bytes."""


def bytes_text(nbytes: int, *, at_least: bool = False) -> str:
    """Bytes for people: ``1536`` to ``1.5 KiB``. ``at_least``: rounded up, so that it is enough if it is given."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            tenths = math.ceil(10 * size) if at_least else round(10 * size)
            return f"{size:.0f} {unit}" if unit == "B" else f"{tenths / 10:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit takes every size")


def seconds_text(seconds: float) -> str:
    """``0.0123`` to ``12 ms``."""
    if seconds < 1:
        return f"{max(1, round(1000 * seconds))} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Shown(reprlib.Repr):
    """Shows a few items of each container, and the ends of each text."""

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 256:  # Python prints none of over 4300 digits, and nobody reads one of 78
            return f"<an integer of {value.bit_length()} bits>"
        return repr(value)

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[: self.maxstring])


def shown(value: object, characters_max: int = 80) -> str:
    """``repr(value)`` cut to a length for a message. It is quick and raises nothing, whatever came from outside."""
    short = _Shown()
    short.maxlevel, short.maxstring, short.maxother = 2, characters_max, characters_max
    short.maxdict = short.maxlist = short.maxtuple = 4
    return short.repr(value)[:characters_max]


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be encoded. A lone surrogate cannot, so no log and no file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
