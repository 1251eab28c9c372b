"""The snapshot stream: what the state has become since a base, quantised. Each snapshot supersedes the last.

A chain of differentials grows with the distance to its base, and is replayed step by step. A snapshot is made of the
state itself, after the step: its size does not depend on the distance, nothing is replayed, and any optimizer will do
whose state is tensors. It is always approximate. Of version v, on base b, there are

- ``master/NAME#PART``: what the master has changed since the base, in blocks of 8 (or 4) bits;
- ``state/NAME/KEY#PART``: the optimizer's tensors, in such blocks too; of a second moment the square root, since that
  is what the optimizer divides by. What is no floating-point tensor of the master's shape is stored whole;
- ``buffer/NAME``: each persistent buffer that differs from the base's,

and the objects ``snapshot`` (how each tensor is encoded, state that is no tensor, options of the parameter groups) and
``host``.

A root that is smaller than half a step of its block's scale would come back as zero, and the optimizer would divide by
next to nothing. It comes back as a quarter of a step instead, which is what such roots are on average, unless the whole
block is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import (
    PackedObject,
    Shard,
    ShardMetadata,
    ShardWriter,
    TensorEntry,
    TensorSpec,
    header_room,
)
from tiercheck.format.header import round_up
from tiercheck.format.host_state import pack
from tiercheck.kernels import BLOCK
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import FLOATS, Encoding, decode
from tiercheck.streams.codecs.blocks import Int8, Nf4
from tiercheck.streams.codecs.floats import to_float32
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.records.base import BaseState
from tiercheck.streams.records.iteration import RECORD_SPARE_BYTES, IterationCapture, IterationStream
from tiercheck.streams.tensors.as_bytes import array_of, dtype_name, tensor_in, tensor_of
from tiercheck.streams.tensors.provider import StateProvider

__all__ = ["SNAPSHOT_CODECS", "SnapshotCapture", "SnapshotStream", "advanced"]

SNAPSHOT_CODECS: Mapping[str, Int8 | Nf4] = {"snapshot": Int8(), "snapshot+nf4": Nf4()}
"""By its name in the configuration, how a snapshot's tensors are encoded."""

SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
"""Adam's and its variants', RMSprop's and Adagrad's names for the sums or averages of squared gradients."""

STATE_MAX = 3, 3
"""Tensors of a master's shape, and numbers, that an optimizer keeps for it: Adam with amsgrad and RMSprop with momentum
have the most of the ones, ASGD of the others."""

SMALLEST_ROOT = {"int8": 0.25, "nf4": 0.02}
"""What stands for a root that was encoded as zero, as a share of its block's scale."""


@dataclass(frozen=True)
class SnapshotTensor:
    """A tensor of the state that a snapshot holds, and where."""

    name: str
    """In the shard, without the suffix of a part."""
    tensor: torch.Tensor
    lossy: bool
    rooted: bool = False


Held = tuple[str, str, tuple[int, ...], bool]
"""A tensor's name (as a :class:`SnapshotTensor` has it), dtype, shape, and whether it is encoded."""


@dataclass(frozen=True)
class Room:
    """Bytes, at most, of what a snapshot holds beside the host state."""

    header_nbytes: int
    tensors_nbytes: int
    record_nbytes: int


class SnapshotStream(IterationStream):
    """What one rank's snapshots have in common: how they are encoded, the room they take, and their base."""

    supersedes = True

    def __init__(self, provider: StateProvider, name: str, world_size: int, *, encode_threads: int = 1) -> None:
        """Errors: ``ConfigurationError`` for a name that is none of :data:`SNAPSHOT_CODECS`."""
        if name not in SNAPSHOT_CODECS:
            raise ConfigurationError(f"there are no {name!r} snapshots: choose one of {', '.join(SNAPSHOT_CODECS)}")
        self.codec = SNAPSHOT_CODECS[name]
        self.threads = encode_threads
        self._base: Shard | None = None
        super().__init__(provider, world_size)

    def key(self, generation: int, version: int, rank: int) -> ShardKey:
        """Errors: ``ValueError`` if there is no base yet."""
        if self._base is None:
            raise ValueError("a snapshot is a change since a base, and there is none")
        return ShardKey.snapshot(generation, self._base.metadata.key.first, version, rank)

    @property
    def nbytes_max(self) -> int:
        room = self._room()
        return room.header_nbytes + room.tensors_nbytes + room.record_nbytes + round_up(self.host_nbytes_max)

    @property
    def nbytes_expected(self) -> int:
        room = self._room()
        return room.header_nbytes + room.tensors_nbytes + 2 * round_up(self.host_nbytes)

    def begin(self, key: ShardKey, memory: memoryview) -> SnapshotCapture:
        return SnapshotCapture(self, key, memory, self._room().header_nbytes)

    def set_reference_base(self, base: Shard | None) -> None:
        self._base = base

    def trained_written(self) -> bool:
        """Whoever writes to a master: a snapshot is of what it holds."""
        return False

    def before(self, name: str) -> NDArray[np.float32] | None:
        """A tensor of :data:`FLOATS` as the base has it, flat; ``None`` if it has none."""
        if self._base is None or name not in self._base:
            return None
        entry = self._base.entry(name)
        return to_float32(np.frombuffer(entry.data, FLOATS[entry.dtype]), entry.dtype)

    def sources(self, state: Mapping[str, Mapping[str, Any]]) -> Iterator[SnapshotTensor]:
        """Everything that a snapshot holds but the buffers; ``state`` is the optimizer's."""
        for name, master in self.provider.masters().items():
            yield SnapshotTensor(f"master/{name}", master, lossy=dtype_name(master, name) in FLOATS)
            for key, value in state.get(name, {}).items():
                if isinstance(value, torch.Tensor):
                    lossy = value.shape == master.shape and dtype_name(value, key) in FLOATS and value.ndim > 0
                    yield SnapshotTensor(f"state/{name}/{key}", value, lossy, rooted=lossy and key in SECOND_MOMENTS)

    def _room(self) -> Room:
        """Upper bounds of what a snapshot holds. A master's first step makes its state, and it may come late: until
        then as much is assumed as any of torch's optimizers keeps (:data:`STATE_MAX`)."""
        state = self.provider.optimizer_state()
        held: list[Held] = [
            (source.name, dtype_name(source.tensor, source.name), tuple(source.tensor.shape), source.lossy)
            for source in self.sources(state)
        ]
        for name, master in self.provider.masters().items():
            if name not in state:
                dtype, shape = dtype_name(master, name), tuple(master.shape)
                lossy = dtype in FLOATS and master.ndim > 0
                tensors, numbers = STATE_MAX
                held += [(f"state/{name}/tensor {index}", dtype, shape, lossy) for index in range(tensors)]
                held += [(f"state/{name}/number {index}", "F32", (), False) for index in range(numbers)]
        for name, tensor in self.provider.buffers().items():
            held.append((f"buffer/{name}", dtype_name(tensor, name), tuple(tensor.shape), False))
        return room_of(tuple(held), self.codec)


class SnapshotCapture(IterationCapture):
    """Snapshot v on its way into the first tier's memory."""

    def __init__(self, stream: SnapshotStream, key: ShardKey, memory: memoryview, header_nbytes: int) -> None:
        self._stream = stream
        self._key = key
        self._writer = ShardWriter(memory, header_nbytes)

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Nothing: the state after the step tells all."""

    def move(self, memory: memoryview) -> None:
        self._writer.move(memory)

    def ended(self, *, skipped: bool, audit: bool = False) -> Callable[[], int]:
        """The state is encoded as it is now. ``CapacityExceeded`` of that is final."""
        provider = self._stream.provider
        state = provider.optimizer_state()
        encodings: dict[str, dict[str, Any]] = {}
        for source in self._stream.sources(state):
            if source.lossy:
                encodings[source.name] = self._encode(source)
            else:
                self._copy(source.name, source.tensor)
        for name, tensor in self._stream.changed_buffers().items():
            self._copy(f"buffer/{name}", tensor)
        values = {
            name: {key: value for key, value in held.items() if not isinstance(value, torch.Tensor)}
            for name, held in state.items()
        }
        record = {"encodings": encodings, "values": values, "hyperparameters": provider.hyperparameters()}
        objects = {
            "snapshot": PackedObject(pack(record, name="snapshot")),
            "host": self._stream.packed_host_state(),
        }
        return partial(self._close, objects)

    def _close(self, objects: Mapping[str, PackedObject]) -> int:
        self.nbytes_needed = self._writer.nbytes_with((), objects)
        self._writer.check_room(self.nbytes_needed, "what is beside the tensors")  # before anything of it is placed
        for name, each in objects.items():
            self._writer.add_object(name, each)
        nbytes = self._writer.finish(ShardMetadata.of(self._key, self._stream.world_size, self._stream.token))
        del self._writer  # the tier reuses the memory only when nobody has a view of it
        return nbytes

    def _encode(self, source: SnapshotTensor) -> dict[str, Any]:
        stream = self._stream

        def slot(suffix: str, dtype: str, shape: tuple[int, ...]) -> memoryview:
            return self._writer.slot(part_name(source.name, suffix), dtype, shape)

        return stream.codec.encode(
            array_of(source.tensor.detach().to("cpu", torch.float32)),
            "F32",
            seed=self._key.last,
            slot=slot,
            threads=stream.threads,
            before=stream.before(source.name) if source.name.startswith("master/") else None,
            rooted=source.rooted,
        ).to_object()

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        dtype, shape = dtype_name(tensor, name), tuple(tensor.shape)
        tensor_in(self._writer.slot(name, dtype, shape), dtype, shape, what=name).copy_(tensor)


def advanced(base: BaseState, shard: Shard, *, tier: str, threads: int = 1) -> BaseState:
    """The state of the version that the snapshot in ``shard`` was made of, given its base's. Verifies what it reads.

    Exact where the snapshot stored tensors whole; of the others each element is off by the codec's error of what was
    encoded. Errors: ``Corruption`` if a checksum or the layout is wrong, or the snapshot is of another state.
    """
    where = str(shard.metadata.key)
    try:
        record: Any = shard.object("snapshot")
        host_state: Any = shard.object("host")
        Doubts.of(host_state)
        encodings, values = dict(record["encodings"]), dict(record["values"])
        hyperparameters = list(record["hyperparameters"])
        state: dict[str, dict[str, Any]] = {name: dict(held) for name, held in values.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"the snapshot's objects lack {error}", tier=tier, key=where) from error
    masters, extras = dict(base.masters), dict(base.extras)
    for name, (found, is_change) in _tensors(shard, encodings, threads).items():
        kind, _, rest = name.partition("/")
        if kind == "master" and rest in masters and masters[rest].shape == found.shape:
            before = masters[rest]
            masters[rest] = (before.to(torch.float32) + found).to(before.dtype) if is_change else found
        elif kind == "state" and (master := rest.rpartition("/")[0]) in masters:
            held = _as_in(base, master, rest, found) if is_change else found
            state.setdefault(master, {})[rest.rpartition("/")[2]] = held
        elif kind == "buffer" and rest in extras and extras[rest].shape == found.shape:
            extras[rest] = found
        else:
            raise Corruption(f"a snapshot of the base has no tensor {name!r}", tier=tier, key=where)
    return replace(
        base,
        masters=masters,
        optimizer_state=state,
        extras=extras,
        hyperparameters=hyperparameters,
        host_state=host_state,
    )


@lru_cache(maxsize=8)
def room_of(held: tuple[Held, ...], codec: Int8 | Nf4) -> Room:
    """Asked for several times a version, of the same tensors."""
    specs: list[TensorSpec] = []
    for name, dtype, shape, lossy in held:
        if lossy:
            planned = codec.plan("F32", shape)
            specs += [TensorSpec(part_name(name, part.suffix), part.dtype, part.shape) for part in planned]
        else:
            specs.append(TensorSpec(name, dtype, shape))
    return Room(
        header_nbytes=header_room(specs, ("snapshot", "host")),
        tensors_nbytes=sum(round_up(spec.nbytes) for spec in specs),
        record_nbytes=round_up(RECORD_SPARE_BYTES + 512 * len(specs)),
    )


def _tensors(shard: Shard, encodings: Mapping[str, Any], threads: int) -> dict[str, tuple[torch.Tensor, bool]]:
    """By name, each tensor of the snapshot, and whether it was encoded: then it is fp32. Errors: ``Corruption``."""
    found: dict[str, tuple[torch.Tensor, bool]] = {}
    parts_of = {name: Encoding.from_object(encoding).parts for name, encoding in encodings.items()}
    whole = set(shard.names)
    for name, suffixes in parts_of.items():
        stored = {suffix: part_name(name, suffix) for suffix in suffixes}
        if not whole.issuperset(stored.values()):
            raise Corruption(f"a part of {name!r} is missing", tier=shard.tier, key=shard.key)
        whole -= set(stored.values())
        parts = {suffix: shard.entry(tensor) for suffix, tensor in stored.items()}
        if encodings[name]["codec"] not in SMALLEST_ROOT:
            raise Corruption(f"{name!r} is not encoded as in any snapshot", tier=shard.tier, key=shard.key)
        values: NDArray[np.float32] = decode(encodings[name], parts, threads=threads)
        if name.startswith("state/") and name.rpartition("/")[2] in SECOND_MOMENTS:
            values = squared(values, parts, str(encodings[name]["codec"]))
        found[name] = tensor_of(values, "F32"), True
    for name in shard.names:
        if name in whole:
            entry = shard.entry(name)
            found[name] = tensor_in(memoryview(entry.data), entry.dtype, entry.shape, what=name), False
    return found


def _as_in(base: BaseState, master: str, rest: str, found: torch.Tensor) -> torch.Tensor:
    """In the dtype of the master, or of what the base holds for it."""
    held = base.optimizer_state.get(master, {}).get(rest.rpartition("/")[2])
    if isinstance(held, torch.Tensor):
        return found.to(held.dtype)
    return found.to(base.masters[master].dtype) if found.shape == base.masters[master].shape else found


def squared(values: NDArray[np.float32], parts: Mapping[str, TensorEntry], codec_name: str) -> NDArray[np.float32]:
    """The second moments of their roots; a root of zero in a block that is not all zero stands for a small one."""
    roots = values.reshape(-1)
    scales = np.frombuffer(parts["scales"].data, np.float32)
    smallest = np.repeat(scales * np.float32(SMALLEST_ROOT[codec_name]), BLOCK)[: roots.size]
    squares: NDArray[np.float32] = np.square(np.where(roots == 0, smallest, roots))
    return squares.reshape(values.shape)


def part_name(tensor: str, suffix: str) -> str:
    return f"{tensor}#{suffix}"
