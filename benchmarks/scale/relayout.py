"""A start on other ranks, as one of them does it: what it asks the store, and what it tells and is told.

An 8B Llama (291 tensors) was saved under FSDP2, a part of the rows of each tensor by each rank. Three quarters of the
ranks go on with it. What the other ranks tell is made up, as they would have told it. What a rank reads lies in the
store.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from benchmarks.scale.store import SharedStore
from tiercheck import schema
from tiercheck.format import container
from tiercheck.format.checksums import checksum_of
from tiercheck.format.container import ShardMetadata, TensorEntry
from tiercheck.format.host_state import pack
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Range
from tiercheck.format.index.message import INDEX, plain_index
from tiercheck.format.index.outline import NOTHING, Area, Outline, outline_of, packed_areas
from tiercheck.hierarchy import OpenHierarchy
from tiercheck.keys import ShardKey
from tiercheck.policy.recovery.lineage import Layout, Lineage
from tiercheck.policy.recovery.relayout import dealt
from tiercheck.recovery.finding.node_memory import NodeMemories
from tiercheck.recovery.layouts.holders import lacking
from tiercheck.recovery.layouts.matching import match
from tiercheck.recovery.layouts.old_ranks import OldRanks
from tiercheck.recovery.layouts.telling import Found, ReachableVersions, SharedParts, part_of
from tiercheck.recovery.ranks import Ranks
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.loading import Loading

__all__ = ["Start", "model", "saved_by"]

T = TypeVar("T")
VERSION = 400
LAYER = {
    "input_norm": (4096,),
    "attention_norm": (4096,),
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
}


def model() -> list[LogicalTensor]:
    shapes = {"embed": (128_256, 4096), "head": (128_256, 4096), "norm": (4096,)}
    shapes |= {f"layers.{layer}.{name}.weight": shape for layer in range(32) for name, shape in LAYER.items()}
    return sorted(
        (LogicalTensor(name, "BF16", shape, trained=True) for name, shape in shapes.items()),
        key=lambda tensor: tensor.key,
    )


def rows_of(tensors: Sequence[LogicalTensor], rank: int, ranks: int) -> list[tuple[int, int]]:
    """By tensor, its first row and the one behind its last; FSDP2 gives all but the last ranks as many."""
    rows = np.array([tensor.shape[0] for tensor in tensors])
    each = -(-rows // ranks)
    first, end = (np.minimum(rows, number * each) for number in (rank, rank + 1))
    return [*zip(first.tolist(), end.tolist(), strict=True)]


def saved_by(tensors: Sequence[LogicalTensor], rank: int, ranks: int) -> LogicalIndex:
    """What FSDP2 gives a rank."""
    stored = {}
    for tensor, (first, end) in zip(tensors, rows_of(tensors, rank, ranks), strict=True):
        row = tensor.elements // tensor.shape[0]
        stored[f"master/{tensor.name}"] = (Range(tensor.name, first * row if first < end else 0, (end - first) * row),)
    return LogicalIndex({tensor.name: tensor for tensor in tensors}, stored)


class Start:
    """One of the ranks that go on."""

    def __init__(self, hierarchy: OpenHierarchy, world: int) -> None:
        self.old, self.new = world, max(1, world * 3 // 4)
        self.rank = self.new // 2
        self.tensors = model()
        wanted = rows_of(self.tensors, self.rank, self.new)
        meeting = {
            old
            for tensor, (first, end) in zip(self.tensors, wanted, strict=True)
            for each in [-(-tensor.shape[0] // self.old)]
            for old in range(first // each, -(-end // each))
        }
        read = meeting | {*dealt(self.rank, self.new, self.old), self.rank}
        self._plain = {old: plain_index(saved_by(self.tensors, old, self.old)) for old in read}
        """What this rank may read."""
        self.group = _Group(self.rank, self.new, self._others())
        ranks = Ranks(self.group, cast(Scheduler, _Scheduler()), 99_999)
        self._ranks = ranks
        self._memories = NodeMemories(hierarchy, ranks)
        self._wanted = saved_by(self.tensors, self.rank, self.new)

    async def lay(self, store: SharedStore) -> None:
        """Bring what this rank will read."""
        for old, plain in self._plain.items():
            key = ShardKey.base(1, VERSION, old)
            entries = [TensorEntry(f"master/{tensor.name}", "U8", (1,), bytes(1)) for tensor in self.tensors]
            metadata, objects = ShardMetadata.of(key, self.old, ""), {"identity": "a job", INDEX: plain}
            await store.lay(str(key), container.payload(metadata, entries, objects))

    async def look(self) -> None:
        """Up to where the ranks meet: from then on a rank reads what it needs."""
        old = OldRanks(self._memories, self._ranks, Lineage(((1, None),)), Layout(self.old), lambda value: value)
        await old.look()
        await old.learn()
        matched = await match(self._ranks, self._wanted, old, Loading(), lambda *_: AssertionError())  # type: ignore[arg-type]  # nothing differs
        plan = await matched.holders.cover(old.visible)
        assert plan.transfers and not lacking(plan)
        await old.find_shared(plan.ranks)

    # What the others tell

    def _others(self) -> list[list[object]]:
        """Of the first exchanges, what each rank tells."""
        first, told = outline_of(saved_by(self.tensors, 0, self.old))
        mine = [dealt(rank, self.new, self.old) for rank in range(self.new)]
        here = [dict.fromkeys(olds, VERSION) for olds in mine]
        found = [
            {old: Found(self._digest(old), Outline(first.tensors, self._areas(old)), "") for old in olds}
            for olds in mine
        ]
        parts = [{first.tensors: part_of(told, range(self.new), rank)} for rank in range(self.new)]
        identities = ["a job", *([None] * (self.new - 1))]
        return [
            [ReachableVersions(each, each, VERSION) for each in here],
            [*found],
            [SharedParts(*each) for each in zip(parts, identities, strict=True)],
        ]

    def _digest(self, old: int) -> str:
        return checksum_of(pack(self._plain[old])) if old in self._plain else f"{old:016x}"

    def _areas(self, old: int) -> bytes:
        rows = rows_of(self.tensors, old, self.old)
        areas = [
            Area(first, end, 0, tensor.elements // tensor.shape[0]) if first < end else NOTHING
            for tensor, (first, end) in zip(self.tensors, rows, strict=True)
        ]
        return packed_areas(areas)


class _Group:
    """Ranks that tell what was made up for them, and then what this one tells."""

    def __init__(self, rank: int, world_size: int, others: Iterable[Sequence[object]]) -> None:
        self.rank, self.world_size = rank, world_size
        self._values = [[schema.pack(each) for each in values] for values in others]
        self._exchanges = iter(self._values)
        self.told_bytes = self.received_bytes = 0
        self.made_s = 0.0
        """Processor time to make the messages of the others."""

    async def all_gather(self, message: bytes, *, what: str, deadline_s: float) -> list[bytes]:
        began = time.process_time()
        values = next(self._exchanges, None)
        told = [message] * self.world_size
        if values is not None:
            told = [schema.pack([what, msgspec.Raw(value)]) for value in values]
            told[self.rank] = message
        self.told_bytes += len(message)
        self.received_bytes += sum(map(len, told))
        self.made_s += time.process_time() - began
        return told

    def close(self) -> None:
        pass


class _Scheduler:
    """What is awaited here runs here."""

    async def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, deadline_s: float) -> T:
        return await coroutine
