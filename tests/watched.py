"""A tier that hands out copies, and is watched: how much of what it gave is still alive, and what was asked of it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tiercheck.format import container
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.tiers.driver import TierDriver
from tiercheck.tiers.wrappers.base import WrappingDriver
from tiercheck.types import ByteRange, Capabilities

Tamper = Callable[[str, int, bytearray], bytes | bytearray | None]
"""``tamper(key, nth, content)``: what the nth read (from 1) of the key gives instead; ``None``: the tier is silent."""


class Watched(WrappingDriver):
    """``inner`` without its mappings. Safe to be looked at from any thread."""

    def __init__(self, inner: TierDriver, tamper: Tamper = lambda key, nth, content: content) -> None:
        super().__init__(inner)
        self.reads: Counter[str] = Counter()
        self.live_bytes = self.peak_bytes = 0
        self.tamper = tamper
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, mappable=False)

    async def get(self, key: str, *, range: ByteRange | None = None, into: memoryview | None = None) -> memoryview:
        found = await super().get(key, range=range, into=into)
        self.reads[key] += 1
        given = self.tamper(key, self.reads[key], bytearray(found))
        if given is None:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets the event")
        array = np.frombuffer(bytes(given), np.uint8).copy()
        weakref.finalize(array, self._count, -array.nbytes)
        self._count(array.nbytes)
        return memoryview(array)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def flipped(content: bytearray) -> bytearray:
    """One bit of a tensor is another one."""
    header = container.header_length(content)
    content[header + (len(content) - header) // 2] ^= 1
    return content


def rewritten(
    content: bytes | bytearray,
    *,
    tensors: Callable[[TensorEntry], TensorEntry] = lambda entry: entry,
    objects: Callable[[str, Any], Any] = lambda name, value: value,
) -> bytes:
    """A sound shard under the same key, with other content."""
    shard = container.parse(bytes(content))
    metadata: ShardMetadata = shard.metadata
    held: Mapping[str, Any] = {name: objects(name, value) for name, value in shard.objects.items()}
    return b"".join(container.payload(metadata, [tensors(entry) for entry in shard.entries()], held))
