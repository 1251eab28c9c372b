"""A shard that comes in pieces, from its beginning to its end: each tensor is copied to memory that may be kept, and
hashed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tiercheck.format.checksums import RunningChecksum
from tiercheck.format.container import Shard, ShardHeader
from tiercheck.format.header import Extent, round_up
from tiercheck.format.memory import fresh_memory

__all__ = ["LandedShard", "Landing"]

CACHED_NBYTES = 256 << 10
"""What is hashed right after it was copied, while the processor has it in its cache."""


class LandedShard(Shard):
    """A verified shard whose tensors lie in memory of their own, which is nobody else's."""

    is_given = True

    def __init__(self, header: ShardHeader, beginning: memoryview, views: Sequence[memoryview], shard: Shard) -> None:
        super().__init__(header, beginning, key=shard.key, tier=shard.tier)
        self._views = {extent.spec.name: view for extent, view in zip(header.extents, views, strict=True)}

    def _view(self, extent: Extent) -> memoryview:
        return self._views[extent.spec.name]


class Landing:
    """``shard``: of which only the header is there. ``apart``: by a tensor's name, whether it goes to other memory than
    the rest; either memory is given back when none of its tensors is left."""

    def __init__(self, shard: Shard, apart: Callable[[str], bool]) -> None:
        header = shard.header
        chosen = [apart(extent.spec.name) for extent in header.extents]
        room = [0, 0]
        starts = []
        for extent, which in zip(header.extents, chosen, strict=True):
            starts.append(room[which])
            room[which] += round_up(extent.spec.nbytes)
        memory = [fresh_memory(nbytes) for nbytes in room]
        self._views = [
            memory[which][start : start + extent.spec.nbytes]
            for extent, which, start in zip(header.extents, chosen, starts, strict=True)
        ]
        self._checksums = [RunningChecksum() for _ in header.extents]
        self._shard = shard
        self._at = header.nbytes
        """So many bytes of the file were taken."""
        self._next = 0
        """The first tensor that is not whole."""

    def take(self, piece: memoryview) -> None:
        """The next bytes of the file, behind its header. What is beyond its end is left."""
        at = 0
        extents = self._shard.header.extents
        while at < len(piece) and self._next < len(extents):
            extent, view = extents[self._next], self._views[self._next]
            done = self._at - self._shard.header.nbytes - extent.start
            part = piece[at : at + min(CACHED_NBYTES, extent.spec.nbytes - done)]
            into = view[done : done + len(part)]
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(part, np.uint8))  # without Python's lock
            self._checksums[self._next].update(into)
            at, self._at = at + len(part), self._at + len(part)
            if done + len(part) == extent.spec.nbytes:
                self._next += 1

    def finish(self) -> LandedShard:
        """Errors: ``Corruption`` naming a tensor whose bytes are not what the header says, or that did not come."""
        header = self._shard.header
        landed = LandedShard(header, self._shard.beginning, self._views, self._shard)
        checksums = zip(header.extents, self._checksums, strict=True)
        texts = {extent.spec.name: checksum.text for extent, checksum in checksums if not extent.is_padding}
        landed.accept(lambda extent: texts[extent.spec.name])
        return landed
