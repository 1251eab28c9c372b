"""Sealed records: the small objects that are read to decide something.

Lineage records, claims, replication jobs, markers and commit records say which versions count, who may write and what
is whole. Each is msgpack behind a magic and a digest over its key and its content, so that a flipped bit, a record cut
short, and a record that lies under another key's name are damage (``Corruption``) and never another meaning. The
digest is no authentication: whoever can write to a tier can write a record that verifies.

A record is a value of :mod:`tiercheck.schema`. Its length, its nesting, the number of its values and the length of its
strings have limits for each kind of key, which are checked before anything is built. A release that gives the fields
another meaning writes a higher ``major`` among them, and a reader refuses a major that it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import xxhash

from tiercheck import schema
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format import host_state
from tiercheck.format.host_state import Limits, Unstorable
from tiercheck.keys import ClaimKey, CommitKey, JobKey, Key, LineageKey, MarkerKey, MetricKey, ShardKey
from tiercheck.tiers.driver import TierDriver
from tiercheck.types import Buffer, shown

__all__ = [
    "HEAD_NBYTES",
    "MAGIC",
    "MAJOR",
    "digest_of",
    "marker_record",
    "metric_record",
    "nbytes_max",
    "read_record",
    "seal",
    "unseal",
]

T = TypeVar("T")

MAGIC = b"tiercheck-record"
MAJOR = 1
"""Of what the fields mean. A record without the field has this one."""
DIGEST_NBYTES = 16
HEAD_NBYTES = len(MAGIC) + DIGEST_NBYTES
AT_ONCE_NBYTES = 64 << 10
"""Longer records are unpacked by a thread: whoever reads one may be serving others."""

_SMALL = Limits(nbytes=4 << 10, values=64, depth=4, text_nbytes=1 << 10, extensions=False)
_LIMITS: Mapping[type[Key], Limits] = MappingProxyType(
    {
        LineageKey: Limits(nbytes=16 << 20, values=1 << 20, depth=4, text_nbytes=1 << 10, extensions=False),
        ClaimKey: _SMALL,
        MarkerKey: _SMALL,
        MetricKey: _SMALL,
        JobKey: Limits(nbytes=64 << 10, values=1 << 10, depth=8, text_nbytes=8 << 10, extensions=False),
        CommitKey: Limits(nbytes=16 << 20, values=1 << 20, depth=8, text_nbytes=1 << 10, extensions=False),
    }
)
"""A commit record has a marker of each rank, a lineage record a branch for each restart since the oldest base that is
left; all others have a few fields."""


def nbytes_max(key: Key) -> int:
    """The longest record that :func:`unseal` takes for this key."""
    return HEAD_NBYTES + _limits(key).nbytes


def seal(key: Key, value: object) -> bytes:
    """``value`` as the record that belongs under ``key``. Errors: ``Unstorable`` for what no reader would take."""
    limits = _limits(key)
    try:
        body = schema.pack(value)
        host_state.unpack(body, limits=limits)
    except (ValueError, TypeError, OverflowError, Corruption) as error:
        raise Unstorable(f"{key} cannot be stored, since it could not be read again: {error}") from error
    return MAGIC + digest_of(key, body) + body


def unseal(content: Buffer, kind: type[T], *, key: Key, tier: str) -> T:
    """The value that was sealed under ``key``, as a ``kind``. ``tier`` is for messages.

    Errors: ``Corruption`` naming key and tier, for anything that :func:`seal` has not made for this very key, and for
    what is no ``kind``; ``ConfigurationError`` for a newer major.
    """
    data = memoryview(content).cast("B")
    try:
        if data.nbytes > nbytes_max(key):
            raise Corruption(f"a record of this kind has at most {nbytes_max(key)} bytes, not {data.nbytes}")
        if data[: len(MAGIC)] != MAGIC or data.nbytes < HEAD_NBYTES:
            raise Corruption("the bytes are no record of TierCheck")
        body = data[HEAD_NBYTES:]
        if data[len(MAGIC) : HEAD_NBYTES] != digest_of(key, body):
            raise Corruption("the record is damaged, or belongs under another key: its checksum does not match")
        value: Any = host_state.unpack(body, limits=_limits(key))
        major = value.get("major", MAJOR) if isinstance(value, dict) else MAJOR
        if major != MAJOR:
            raise ConfigurationError(
                f"{key} in {tier} was written by another release of TierCheck (records of major {shown(major)}; this "
                f"one reads major {MAJOR}): go on with that release, or a later one"
            )
        return schema.read(kind, value)
    except Corruption as error:
        raise Corruption(error.message, tier=tier, key=str(key)) from error
    except ValueError as error:
        raise Corruption(str(error), tier=tier, key=str(key)) from error


def metric_record(key: MetricKey) -> bytes:
    """What lies under a metric's key, for whoever opens it: the key tells the same."""
    return seal(key, {"version": key.version, "name": key.name, "value": key.value})


def marker_record(key: MarkerKey) -> bytes:
    """What lies under a marker's key, for whoever opens it: the key tells the same."""
    return seal(key, {"nbytes": key.nbytes, "digest": key.digest, "token": key.token})


async def read_record(driver: TierDriver, key: Key, kind: type[T], *, nbytes: int | None = None) -> T:
    """The value that lies sealed under ``key`` in a tier, as a ``kind``.

    ``nbytes``: its length, where a listing has told it; else the tier is asked, so that nothing longer than a record
    is fetched. Errors: as :func:`unseal`; those of the driver.
    """
    name = str(key)
    if nbytes is None:
        nbytes = (await driver.stat(name)).nbytes
    if nbytes > nbytes_max(key):
        raise Corruption(
            f"a record of this kind has at most {nbytes_max(key)} bytes, not {nbytes}", tier=driver.url, key=name
        )
    content = await driver.get(name)
    if content.nbytes > AT_ONCE_NBYTES:
        return await asyncio.to_thread(unseal, content, kind, key=key, tier=driver.url)
    return unseal(content, kind, key=key, tier=driver.url)


def _limits(key: Key) -> Limits:
    if isinstance(key, ShardKey):
        raise ValueError(f"{key} names a shard, not a record")
    return _LIMITS[type(key)]


def digest_of(key: Key, body: Buffer) -> bytes:
    """What stands before the body of the record under ``key``."""
    state = xxhash.xxh3_128(f"{key}\0".encode())
    state.update(body)
    return bytes(state.digest())
