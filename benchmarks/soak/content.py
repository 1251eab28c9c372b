"""Objects that say what they are: key, writer, sequence number, length and checksum, so that any reader can judge them.

An object's bytes follow from its key, its writer and its sequence number alone. It is a header of 64 bytes and
a body taken from a pool of random bytes that all processes have alike.
"""

from __future__ import annotations

import functools
import itertools
import random
import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest as xxh3_64

__all__ = ["HEADER_BYTES", "Damaged", "Stamp", "part_of", "payload_of", "read_stamp", "size_of"]

MAGIC = b"tiersoak"
_HEADER = struct.Struct("<8sQQQQQ8x")
HEADER_BYTES = _HEADER.size + 8
POOL_BYTES = 1 << 20
SMALL_BYTES = 4 << 10
MIDDLE_BYTES = 256 << 10


class Damaged(Exception):
    """The bytes are no object, or another one's, or not all of it."""


@dataclass(frozen=True)
class Stamp:
    """Who wrote what: the ``sequence``-th operation on ``key``, by ``writer``."""

    key: str
    writer: int
    sequence: int
    nbytes: int


def size_of(key: str, sequence: int, large_bytes: int) -> int:
    """Bytes of the object: mostly small, now and then up to ``large_bytes``."""
    chance = random.Random(f"{key} {sequence}")
    limit = chance.choices((SMALL_BYTES, MIDDLE_BYTES, large_bytes), weights=(70, 25, 5))[0]
    return chance.randint(HEADER_BYTES, max(HEADER_BYTES, limit))


def payload_of(stamp: Stamp) -> list[memoryview]:
    """The object's content, in several buffers."""
    body = body_of(stamp)
    digest = xxh3_64(b"".join(body))
    fields = _HEADER.pack(MAGIC, xxh3_64(stamp.key.encode()), stamp.writer, stamp.sequence, stamp.nbytes, digest)
    return [memoryview(fields + xxh3_64(fields).to_bytes(8, "little")), *body]


def part_of(stamp: Stamp, start: int, stop: int) -> bytes:
    """The bytes from ``start`` to ``stop`` of the object's content."""
    return b"".join(payload_of(stamp))[start:stop]


def read_stamp(key: str, content: memoryview) -> Stamp:
    """What the object under ``key`` says of itself, once all of it was checked. Errors: :class:`Damaged`."""
    if content.nbytes < HEADER_BYTES:
        raise Damaged(f"{content.nbytes} bytes are less than a header")
    head = bytes(content[:HEADER_BYTES])
    magic, key_digest, writer, sequence, nbytes, digest = _HEADER.unpack(head[: _HEADER.size])
    if magic != MAGIC or xxh3_64(head[: _HEADER.size]) != int.from_bytes(head[_HEADER.size :], "little"):
        raise Damaged("the header is not one that was written")
    if key_digest != xxh3_64(key.encode()):
        raise Damaged(f"this is another key's object: operation {sequence} of writer {writer}")
    if nbytes != content.nbytes:
        raise Damaged(f"{content.nbytes} bytes of {nbytes}: operation {sequence} of writer {writer}")
    if xxh3_64(content[HEADER_BYTES:]) != digest:
        raise Damaged(f"the body is not the one of operation {sequence} of writer {writer}")
    return Stamp(key, writer, sequence, nbytes)


def body_of(stamp: Stamp) -> list[memoryview]:
    """Pieces of the pool, from a place that the stamp chooses."""
    left = stamp.nbytes - HEADER_BYTES
    start = xxh3_64(f"{stamp.key} {stamp.writer} {stamp.sequence}".encode()) % POOL_BYTES
    pieces = []
    for offset in itertools.chain((start,), itertools.repeat(0)):
        if not left:
            break
        piece = pool()[offset : offset + min(left, POOL_BYTES - offset)]
        pieces.append(piece)
        left -= piece.nbytes
    return pieces


@functools.cache
def pool() -> memoryview:
    return memoryview(random.Random(0).randbytes(POOL_BYTES))
