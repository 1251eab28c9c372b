"""A training state of NumPy arrays, and its streams: small, without torch, every bit of it compared.

Momentum and a generator of its own make each step depend on all before it, so that a state which skipped or mixed
versions shows. One array changes seldom: bases refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercheck.errors import UnsupportedSetup
from tiercheck.format.container import (
    PackedObject,
    Shard,
    ShardMetadata,
    ShardWriter,
    TensorSpec,
    checksum_of,
    header_room,
    shard_nbytes,
)
from tiercheck.format.host_state import pack
from tiercheck.format.index.boxes import Copy, strided
from tiercheck.format.index.logical import MASTER, LogicalIndex, LogicalTensor, whole
from tiercheck.format.references import REFERENCES, Reference, References, read_references, referred
from tiercheck.keys import ShardKey
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.records.record_names import gradient_name, host_name
from tiercheck.streams.stage import Moments, StagePlace, StageState, state_name
from tiercheck.streams.state import (
    Conversion,
    FoldShards,
    MakeRuns,
    Rebuilt,
    ReplayRate,
)
from tiercheck.types import Fidelity

__all__ = ["NumberState"]

Array = NDArray[np.float32]
SIZE = 24
STAGES = 3
"""If the ranks are stages of a pipeline."""
HOST_BYTES_MAX = 256
REFERENCES_BYTES_MAX = 256
CHANGES_EVERY = 11
"""Between two changes of the array that changes seldom, so many versions."""
STORED = ("weight", "momentum")
LEARNING_RATE, MOMENTUM = np.float32(0.05), np.float32(0.9)


@dataclass
class NumberState:
    """See :class:`tiercheck.streams.state.TrainingState`. Each rank's is another."""

    rank: int
    has_frozen: bool = True
    """Whether there is something that changes seldom, to which bases may refer."""
    steps_together: bool = False

    def __post_init__(self) -> None:
        self.weight: Array = np.arange(SIZE, dtype=np.float32) + self.rank
        self.momentum: Array = np.zeros(SIZE, np.float32)
        self.frozen: Array = np.arange(SIZE if self.has_frozen else 0, dtype=np.float32) - self.rank
        self.draw = self.rank + 1

    @property
    def bits(self) -> tuple[bytes, bytes, bytes, int]:
        return self.weight.tobytes(), self.momentum.tobytes(), self.frozen.tobytes(), self.draw

    def gradient(self, version: int) -> dict[str, Array]:
        """Of the coming step; it moves the generator, and changes what changes seldom."""
        if version % CHANGES_EVERY == 0:
            self.frozen += np.float32(1)
        self.draw = (self.draw * 6364136223846793005 + version) % 2**63
        noise = np.float32(self.draw % 1000) / np.float32(500) - np.float32(1)
        return {"weight": self.weight * np.float32(0.1) + noise}

    def step(self, gradient: Array) -> None:
        self.momentum *= MOMENTUM
        self.momentum += gradient
        self.weight -= LEARNING_RATE * self.momentum

    # What the core asks

    def prepare(self, codecs: Collection[str] = ()) -> None:
        pass

    def stream(self, world_size: int) -> NumberStream:
        return NumberStream(self, world_size)

    def reader(self) -> NumberReader:
        return NumberReader(self)

    def layout(self) -> str:
        return ""

    def check_foldable(self) -> None:
        """Numbers are always folded exactly."""

    def folding(self, *, certified: bool) -> FoldShards:
        return NumberFolding()

    def conversion(self) -> Conversion:
        raise UnsupportedSetup("numbers are of one rank")

    def replay_rate(self) -> tuple[int, Callable[[], ReplayRate]]:
        return 1, lambda: ReplayRate((1e6, 1e6), kernel=False)

    def stage(self) -> StageState | None:
        return NumberStage(self)

    def hyperparameters(self) -> list[dict[str, Any]]:
        return [{"lr": float(LEARNING_RATE)}]

    def host_state(self) -> dict[str, Any]:
        return {"draw": self.draw}

    def refresh(self) -> None:
        pass

    def restore_host_state(self, state: Mapping[str, Any]) -> None:
        self.draw = state["draw"]


class NumberStage:
    """See :class:`tiercheck.streams.stage.StageState`. Each rank is a stage of one layer."""

    def __init__(self, state: NumberState) -> None:
        self._state = state

    @property
    def place(self) -> StagePlace:
        layers = ((f"{self._state.rank}", (("weight", (SIZE,)),)),)
        return StagePlace(self._state.rank, STAGES, 1, layers, tied=(), scheduled=False, kept=("frozen",))

    def index(self) -> LogicalIndex:
        tensor = LogicalTensor(f"{self._state.rank}.weight", "F32", (SIZE,), trained=True)
        return LogicalIndex({tensor.name: tensor}, {f"{MASTER}weight": (whole(tensor),)})

    def norms(self, host_state: Mapping[str, Any]) -> Sequence[float | None]:
        return [float(host_state["draw"] % 1000)]

    def clear(self, stored: Collection[str]) -> None:
        if stored:
            self._state.weight[:] = 0

    def optimizer(self, stored: str) -> Mapping[str, Any]:
        return {"momentum": [SIZE]}

    def moments(self) -> Mapping[str, Moments]:
        """All ranks have taken as many steps."""
        master = f"{MASTER}weight"
        return {master: Moments(1, {"momentum": float(MOMENTUM)}, self.optimizer(master))}

    def expect_optimizer(self, stored: str, told: Mapping[str, Any], like_master: Collection[str] = ()) -> None:
        assert {*told} == {*like_master}, "nothing is tied"
        self._state.momentum[:] = 0

    def finish(self) -> None:
        pass

    def read(self, stored: str, copy: Copy) -> bytes:
        return strided(self._array(stored)[copy.source_start :], copy.lengths, copy.source_strides).tobytes()

    def add(self, stored: str, copy: Copy, elements: bytes, weight: float) -> None:
        target = strided(self._array(stored)[copy.target_start :], copy.lengths, copy.target_strides)
        target += np.float32(weight) * np.frombuffer(elements, np.float32).reshape(copy.lengths)

    def _array(self, stored: str) -> Array:
        master = f"{MASTER}weight"
        return {master: self._state.weight, state_name(master, "momentum"): self._state.momentum}[stored]


class Writing:
    """A shard of given arrays, and of these objects."""

    def __init__(self, memory: memoryview, specs: Sequence[TensorSpec], *held: str) -> None:
        self.writer = ShardWriter(memory, header_room(specs, held))
        self._held = held

    def add(self, name: str, array: Array) -> None:
        slot = self.writer.slot(name, "F32", array.shape)
        np.frombuffer(slot, np.float32)[:] = array

    def finish(self, metadata: ShardMetadata, *objects: Any) -> int:
        for name, each in zip(self._held, objects, strict=True):
            self.writer.add_object(name, PackedObject(pack(each, name=name)))
        return self.writer.finish(metadata)


def specs_of(*names: str, size: int = SIZE) -> list[TensorSpec]:
    return [TensorSpec(name, "F32", (size,)) for name in names]


class NumberStream:
    """See :class:`tiercheck.streams.state.StateStream`. Nothing but its own steps ever writes to the state."""

    defers = supersedes = False

    def __init__(self, state: NumberState, world_size: int) -> None:
        self.state, self.world_size = state, world_size
        self.token = ""
        self.meant: dict[str, Any] = {}
        """What a base says of itself, beside the host state."""
        self.doubts = Doubts()
        size = state.weight.size
        record, self.base_specs = specs_of(gradient_name(0, "weight", ""), size=size), specs_of(*STORED, size=size)
        self.trained_parameters = SIZE
        self.nbytes_max = shard_nbytes(record, {host_name(0): HOST_BYTES_MAX})
        self.nbytes_unexpected = self.nbytes_expected = self.nbytes_max
        self.base_nbytes = shard_nbytes(self.base_specs, {"host": HOST_BYTES_MAX, REFERENCES: REFERENCES_BYTES_MAX})
        self.constants_unsettled = False
        self.constants_nbytes = shard_nbytes(specs_of("frozen"), {"host": HOST_BYTES_MAX})
        self.refers: tuple[ShardKey, References] | None = None
        """What bases may refer to."""
        self._recorded = b""

    def metadata(self, key: ShardKey) -> ShardMetadata:
        return ShardMetadata.of(key, self.world_size, self.token)

    def key(self, generation: int, version: int, rank: int) -> ShardKey:
        return ShardKey.differential(generation, version, version, rank)

    def begin(self, key: ShardKey, memory: memoryview) -> NumberRecord:
        return NumberRecord(self, key, memory)

    def base(self, key: ShardKey) -> NumberBase:
        return NumberBase(self, key)

    def leave_out(self, gradients: Mapping[str, Any], version: int) -> None:
        pass

    def set_reference_base(self, base: Shard | None) -> None:
        pass

    def load(self, residuals: Mapping[str, Any]) -> None:
        pass

    def refer_to(self, key: ShardKey, references: References) -> None:
        self.refers = key, references

    def give_up_constants(self) -> None:
        self.refers = None

    def mark_recorded(self) -> None:
        self._recorded = self.state.frozen.tobytes()

    def mark_stepped(self, *, every_bit: bool = False) -> None:
        pass

    def hurry(self) -> None:
        pass

    def mark_published(self) -> None:
        pass

    def frozen_changed(self) -> bool:
        return self._recorded != self.state.frozen.tobytes()

    def reformed(self) -> bool:
        return False

    def masters_rewritten(self) -> tuple[str, ...]:
        return ()

    def trained_written(self) -> bool:
        return False

    def written(self) -> tuple[str, ...]:
        return ()


class NumberRecord:
    is_on_its_way, nbytes_needed = False, 0

    def __init__(self, stream: NumberStream, key: ShardKey, memory: memoryview) -> None:
        self._stream, self._key = stream, key
        self._name = gradient_name(key.first, "weight", "")
        self._writing = Writing(memory, specs_of(self._name, size=stream.state.weight.size), host_name(key.first))

    def add(self, gradients: Mapping[str, Any]) -> None:
        self._writing.add(self._name, gradients["weight"])

    def move(self, memory: memoryview) -> None:
        self._writing.writer.move(memory)

    def ended(self, *, skipped: bool, audit: bool = False) -> Callable[[], int]:
        assert not skipped
        return partial(self._writing.finish, self._stream.metadata(self._key), self._stream.state.host_state())

    def abandon(self) -> None:
        pass


class NumberConstants:
    """What changes seldom, as it is now."""

    def __init__(self, stream: NumberStream, base: ShardKey) -> None:
        self.key = ShardKey.constant(base.generation, base.first, base.rank)
        self.nbytes_max = stream.constants_nbytes
        self._metadata = stream.metadata(self.key)
        self._frozen = stream.state.frozen.copy()
        held = Reference("F32", (SIZE,), checksum_of(self._frozen.tobytes()))
        self.references = References(stream.token, {"frozen": held})

    def copy(self, memory: memoryview) -> None:
        self._writing = Writing(memory, specs_of("frozen"), "host")
        self._writing.add("frozen", self._frozen)

    def finish(self) -> int:
        return self._writing.finish(self._metadata, {})


class NumberBase:
    disturbed = audited = False
    unexpected: tuple[str, ...] = ()

    def __init__(self, stream: NumberStream, key: ShardKey) -> None:
        self._stream = stream
        self._objects: dict[str, Any] = {"host": stream.state.host_state(), **stream.meant}
        self.nbytes_max = stream.base_nbytes
        self.constants: NumberConstants | None = None
        self.key, self._refers = key, stream.refers
        if not stream.state.frozen.size:
            return
        now = checksum_of(stream.state.frozen.tobytes())
        if self._refers is None or self._refers[1].tensors["frozen"].checksum != now:
            self.constants = NumberConstants(stream, key)
            self._refers = self.constants.key, self.constants.references
        self.key = replace(key, refers_to=(self._refers[0].generation, self._refers[0].first))
        self.refer(self._refers[1])

    def refer(self, references: References) -> None:
        self._objects[REFERENCES] = references.plain

    def arrived(self) -> None:
        self._stream.refers = self._refers

    def copy(self, memory: memoryview) -> None:
        """Of the state as it is now: if training went on too early, the base is of no version."""
        self._writing = Writing(memory, self._stream.base_specs, *self._objects)
        self._writing.add("weight", self._stream.state.weight)
        self._writing.add("momentum", self._stream.state.momentum)

    def let_change(self) -> bool:
        return self.disturbed

    def arrive(self) -> None:
        pass

    def finish(self) -> int:
        return self._writing.finish(self._stream.metadata(self.key), *self._objects.values())


@dataclass(frozen=True)
class Base:
    weight: Array
    momentum: Array
    frozen: Array
    host_state: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    version: int
    gradient: Array
    host_state: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    records: Sequence[Record]

    @property
    def last(self) -> int:
        return self.records[-1].version


def array_in(shard: Shard, name: str) -> Array:
    return np.frombuffer(shard.entry(name).data, np.float32)


class NumberReader:
    """See :class:`tiercheck.streams.state.StateReader`."""

    threads = 1
    steps_at_once = 4

    def __init__(self, state: NumberState) -> None:
        self._state = state

    def expect(self) -> None:
        pass

    def base(self, shard: Shard, constants: Shard | None, *, tier: str, places: str) -> Base:
        frozen = np.zeros(0, np.float32)
        if (references := read_references(shard)) is not None:
            assert constants is not None
            (frozen,) = (np.frombuffer(each.data, np.float32) for each in referred(references, constants))
        return Base(array_in(shard, "weight"), array_in(shard, "momentum"), frozen, shard.object("host"))

    def led_on(self, base: Base, shard: Shard, *, tier: str) -> Base:
        raise AssertionError("there are no snapshots")

    def records(self, shard: Shard, base: Base, *, tier: str) -> list[Record]:
        return [
            Record(version, array_in(shard, gradient_name(version, "weight", "")), shard.object(host_name(version)))
            for version in shard.metadata.key.versions
        ]

    def run(self, records: Sequence[Record], *, threads: int) -> Run:
        return Run([replace(each, gradient=each.gradient.copy()) for each in records])

    async def rebuild(self, base: Base, start: Base, make: MakeRuns, scheduler: Scheduler) -> Rebuilt:
        self._state.weight[:], self._state.momentum[:] = start.weight, start.momentum
        self._state.frozen = start.frozen.copy()
        host_state = start.host_state
        async for run in make(1):
            for record in run.records:
                self._state.step(record.gradient)
                host_state = record.host_state
        return Rebuilt(host_state)

    def reached(self, base: Base, rebuilt: Rebuilt) -> tuple[Fidelity, tuple[str, ...]]:
        return Fidelity.EXACT, ()


class NumberFolding:
    """See :class:`tiercheck.streams.state.FoldShards`. ``differs``: what it makes of that version has other bits than
    training had."""

    def __init__(self, differs: int | None = None) -> None:
        self._differs = differs

    def prepare(self, base: Shard) -> None:
        pass

    def __call__(
        self, base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None]
    ) -> NumberBase:
        made = fold(base, differentials)
        made.unexpected = ("weight",) if made.key.last == self._differs else ()
        return made


def fold(base: Shard, differentials: Sequence[Shard]) -> NumberBase:
    state = NumberState(base.metadata.key.rank, has_frozen=False)
    reader = NumberReader(state)
    began = Base(array_in(base, "weight"), array_in(base, "momentum"), state.frozen, {})
    state.weight, state.momentum = began.weight.copy(), began.momentum.copy()
    expected = base.metadata.key.last
    for shard in differentials:
        for record in reader.records(shard, began, tier=""):
            expected += 1
            assert record.version == expected, "no version is missing"
            state.step(record.gradient)
            state.restore_host_state(record.host_state)
    stream = NumberStream(state, base.metadata.world_size)
    stream.token = base.metadata.token
    key, references = base.metadata.key, read_references(base)
    made = NumberBase(stream, ShardKey.base(key.generation, expected, key.rank, key.refers_to))
    if references is not None:
        made.refer(references)
    return made
