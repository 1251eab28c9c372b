"""Checksums of what a shard holds: of the whole, and of its blocks, so that a part can be verified by itself.

Of up to :data:`BLOCK_NBYTES` a checksum is the XXH3-64 of the bytes. Of more it is that of the digests of their blocks,
one behind the other. So whoever has a list of block digests, which the checksum verifies, verifies any range that
consists of whole blocks; whoever has all the bytes needs no list. Either way each byte is hashed once.
"""

from __future__ import annotations

import xxhash

from tiercheck.format.copying import copy_with_xxh3
from tiercheck.types import Buffer, ByteRange

__all__ = [
    "BLOCKS",
    "BLOCK_NBYTES",
    "DIGEST_NBYTES",
    "RunningChecksum",
    "block_digests",
    "blocks_around",
    "check_blocks",
    "checksum_of",
    "checksum_of_blocks",
    "copy_with_checksum",
]

BLOCK_NBYTES = 4 << 20
"""Part of the format."""
DIGEST_NBYTES = 8
BLOCKS = "blocks"
"""The object of a base that has, by name, the digests of the blocks of each tensor that has several."""


def checksum_of(data: Buffer) -> str:
    """The checksum of ``data``, as 16 lower-case hexadecimal digits."""
    if memoryview(data).nbytes <= BLOCK_NBYTES:
        return str(xxhash.xxh3_64_hexdigest(data))
    return checksum_of_blocks(block_digests(data))


def block_digests(data: Buffer) -> bytes:
    """The XXH3-64 of each block of ``data``, eight bytes each, the most significant first. The last block may be
    shorter."""
    view = memoryview(data).cast("B")
    starts = range(0, len(view), BLOCK_NBYTES)
    return b"".join([xxhash.xxh3_64_digest(view[start : start + BLOCK_NBYTES]) for start in starts])


def checksum_of_blocks(digests: Buffer) -> str:
    """The checksum of the bytes that have these :func:`block_digests`, two at least."""
    return str(xxhash.xxh3_64_hexdigest(digests))


class RunningChecksum:
    """:func:`checksum_of` of bytes that come one part after the other."""

    def __init__(self) -> None:
        self._digests = bytearray()
        """Of the blocks before the one under way."""
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_NBYTES

    def update(self, part: Buffer) -> None:
        view = memoryview(part).cast("B")
        while len(view):
            if not self._room:
                self._digests += self._block.digest()
                self._block = xxhash.xxh3_64()
                self._room = BLOCK_NBYTES
            taken = view[: self._room]
            self._block.update(taken)
            self._room -= len(taken)
            view = view[len(taken) :]

    @property
    def text(self) -> str:
        if not self._digests:
            return str(self._block.hexdigest())
        return checksum_of_blocks(self._digests + self._block.digest())


def copy_with_checksum(into: memoryview, source: memoryview) -> str:
    """Copy bytes, and return the copy's :func:`checksum_of`, at the price of copying alone."""
    if len(into) != len(source):
        raise ValueError(f"{len(source)} bytes cannot be copied to {len(into)}")
    starts = range(0, max(1, len(into)), BLOCK_NBYTES)
    digests = [copy_with_xxh3(into[s : s + BLOCK_NBYTES], source[s : s + BLOCK_NBYTES]) for s in starts]
    if len(digests) == 1:
        return f"{digests[0]:016x}"
    return checksum_of_blocks(b"".join([each.to_bytes(DIGEST_NBYTES, "big") for each in digests]))


# Verifying a part


def blocks_around(part: ByteRange, nbytes: int) -> ByteRange:
    """The whole blocks, of ``nbytes`` in all, in which ``part`` lies: what to read so that it can be verified."""
    if part.stop > nbytes:
        raise ValueError(f"there are {nbytes} bytes, and [{part.start}, {part.stop}) is asked for")
    stop = -(-part.stop // BLOCK_NBYTES) * BLOCK_NBYTES
    return ByteRange(part.start // BLOCK_NBYTES * BLOCK_NBYTES, min(nbytes, stop))


def check_blocks(content: Buffer, start: int, digests: Buffer) -> None:
    """Verify whole blocks that were read from the byte ``start`` on, which begins one. ``digests``: of all blocks.
    Errors: ``ValueError`` naming the bytes that fail."""
    first = start // BLOCK_NBYTES * DIGEST_NBYTES
    for number, found in enumerate(digests_in(block_digests(content))):
        at = first + number * DIGEST_NBYTES
        if bytes(digests[at : at + DIGEST_NBYTES]) != found:
            begin = start + number * BLOCK_NBYTES
            raise ValueError(f"the block that begins at byte {begin} does not match its checksum")


def digests_in(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_NBYTES] for at in range(0, len(digests), DIGEST_NBYTES)]
