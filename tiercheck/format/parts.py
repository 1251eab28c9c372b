"""What is hashed of a shard, in parts of about one length that threads can share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from tiercheck.format.checksums import BLOCK_NBYTES, DIGEST_NBYTES, checksum_of, checksum_of_blocks
from tiercheck.format.header import Extent

__all__ = ["Digests", "Part", "checksums_of", "parts_of"]

Part = list[tuple[Extent, int]]
"""Blocks, each by its tensor and its number in that."""


def parts_of(extents: Iterable[Extent]) -> list[Part]:
    """All blocks of these, in order: one long one a part, or several that are no longer together."""
    parts: list[Part] = []
    room = 0
    for extent in extents:
        for block in range(blocks_in(extent)):
            nbytes = min(BLOCK_NBYTES, extent.spec.nbytes - block * BLOCK_NBYTES)
            if nbytes > room or not parts:
                parts.append([])
                room = BLOCK_NBYTES
            parts[-1].append((extent, block))
            room -= nbytes
    return parts


def blocks_in(extent: Extent) -> int:
    """A tensor without bytes has one block, of none."""
    return max(1, -(-extent.spec.nbytes // BLOCK_NBYTES))


class Digests:
    """The digests of the blocks of tensors, which threads bring in any order."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._found: dict[str, list[bytes]] = {extent.spec.name: [b""] * blocks_in(extent) for extent in extents}

    def take(self, extent: Extent, block: int, content: memoryview) -> None:
        """Hash one block. ``content``: of the whole tensor."""
        start = block * BLOCK_NBYTES
        self._found[extent.spec.name][block] = xxhash.xxh3_64_digest(content[start : start + BLOCK_NBYTES])

    def checksum(self, extent: Extent) -> str:
        """As :func:`~tiercheck.format.checksums.checksum_of`, when every block was taken."""
        digests = b"".join(self._found[extent.spec.name])
        return digests.hex() if len(digests) == DIGEST_NBYTES else checksum_of_blocks(digests)


def checksums_of(extents: Sequence[Extent], content: Callable[[Extent], memoryview], threads: int) -> dict[str, str]:
    """The checksum of each, by its name, computed by at most so many threads. ``content``: its bytes."""
    parts = [] if threads == 1 else parts_of(extents)
    if len(parts) < 2:
        return {extent.spec.name: checksum_of(content(extent)) for extent in extents}
    digests = Digests(extents)

    def take(part: Part) -> None:
        for extent, block in part:
            digests.take(extent, block, content(extent))

    with ThreadPoolExecutor(min(threads, len(parts)), thread_name_prefix="tiercheck-checksum") as pool:
        deque(pool.map(take, parts), maxlen=0)
    return {extent.spec.name: digests.checksum(extent) for extent in extents}
