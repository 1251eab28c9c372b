"""Where a differential's record lies in its shard. Names carry the version, so that a batch is the concatenation of its
records."""

from __future__ import annotations

from collections.abc import Iterable

from tiercheck.errors import Corruption
from tiercheck.format.container import Shard, TensorEntry

__all__ = [
    "STAMP_DIGITS",
    "audit_name",
    "buffer_prefix",
    "gradient_name",
    "gradient_parts",
    "host_name",
    "record_name",
    "stamp",
]

STAMP_DIGITS = 12
"""Of the version, with which every name begins."""


def gradient_name(version: int, master: str, suffix: str) -> str:
    return f"{stamp(version)}/gradient/{master}" + (f"#{suffix}" if suffix else "")


def buffer_prefix(version: int) -> str:
    return f"{stamp(version)}/buffer/"


def record_name(version: int) -> str:
    return f"{stamp(version)}/record"


def audit_name(version: int) -> str:
    return f"{stamp(version)}/audit"


def host_name(version: int) -> str:
    return f"{stamp(version)}/host"


def stamp(version: int) -> str:
    return f"{version:0{STAMP_DIGITS}d}"


def gradient_parts(shard: Shard, version: int, master: str, suffixes: Iterable[str]) -> dict[str, TensorEntry]:
    """A gradient's parts by suffix, verified. Errors: ``Corruption`` if one is damaged or missing."""
    parts: dict[str, TensorEntry] = {}
    for suffix in suffixes:
        tensor = gradient_name(version, master, suffix)
        if tensor not in shard:
            raise Corruption(f"the part {tensor!r} is missing", tier=shard.tier, key=shard.key)
        parts[suffix] = shard.entry(tensor)
    return parts
