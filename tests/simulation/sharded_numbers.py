"""A training state of numbers of which each rank has a part: what some ranks save, any number of others can go on from.

The numbers and the generator come out the same however many ranks train them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.simulation.number_state import HOST_BYTES_MAX, SIZE, Array, NumberReader, NumberState, NumberStream
from tiercheck.errors import Mismatch
from tiercheck.format.container import Shard, shard_nbytes
from tiercheck.format.index.assemble import Transfer
from tiercheck.format.index.boxes import copy_elements
from tiercheck.format.index.logical import LogicalIndex, LogicalTensor, Range
from tiercheck.format.index.message import INDEX, plain_index
from tiercheck.streams.loading import Loading
from tiercheck.streams.state import Rebuilt

__all__ = ["ShardedNumbers", "trained_numbers"]

IDENTITY = "identity"
MEANT_BYTES_MAX = 512
NAME = "weight"


class ShardedNumbers(NumberState):
    """Rank ``rank`` of ``world`` has a range of the numbers. All ranks draw alike."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        each = -(-SIZE // world)
        self.first = min(SIZE, rank * each)
        self.held = slice(self.first, min(SIZE, self.first + each))
        self.weight: Array = np.arange(SIZE, dtype=np.float32)[self.held]
        self.momentum: Array = np.zeros(self.weight.size, np.float32)
        self.frozen: Array = np.zeros(0, np.float32)  # what is converted is stored anew in any case
        self.draw = 1

    def index(self) -> LogicalIndex:
        numbers = LogicalTensor(NAME, "F32", (SIZE,), trained=True)
        return LogicalIndex({NAME: numbers}, {f"master/{NAME}": (Range(NAME, self.first, self.weight.size),)})

    def layout(self) -> str:
        return str(self.world)

    def stream(self, world_size: int) -> NumberStream:
        return ShardedStream(self, world_size)

    def conversion(self) -> NumberConversion:
        return NumberConversion(self)


def trained_numbers(last: int) -> ShardedNumbers:
    """What nothing ever happens to, on one rank."""
    state = ShardedNumbers(0, 1)
    for version in range(1, last + 1):
        state.step(state.gradient(version)["weight"])
    return state


class ShardedStream(NumberStream):
    """Its bases say what they are pieces of."""

    def __init__(self, state: ShardedNumbers, world_size: int) -> None:
        super().__init__(state, world_size)
        self.meant = {INDEX: plain_index(state.index()), IDENTITY: "numbers"}
        sizes = {"host": HOST_BYTES_MAX, **dict.fromkeys(self.meant, MEANT_BYTES_MAX)}
        self.base_nbytes = shard_nbytes(self.base_specs, sizes)


@dataclass
class NumberConversion:
    """See :class:`tiercheck.streams.state.Conversion`."""

    state: ShardedNumbers
    loading: Loading = field(default_factory=Loading)
    exact: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._old: NumberState | None = None
        self.begin("numbers")

    @property
    def wanted(self) -> LogicalIndex:
        return self.state.index()

    def read_identity(self, value: Any) -> Any:
        if value != "numbers":
            raise ValueError(f"{value!r} are no numbers")
        return value

    def refuse(self, identity: Any, places: str) -> None:
        pass

    def other_model(self, differing: Sequence[str], identity: Any, places: str, advice: str) -> Mismatch:
        return Mismatch("; ".join(differing))

    def keep(self, tensors: Collection[str]) -> None:
        assert not tensors

    def begin(self, identity: Any) -> bool:
        self._weight, self._momentum = np.full_like(self.state.weight, np.nan), np.full_like(self.state.weight, np.nan)
        self._host_state: Mapping[str, Any] | None = None
        return True

    def reader(self) -> NumberReader:
        self._old = NumberState(0)
        return SizedReader(self._old)

    def take(self, transfers: Sequence[Transfer], rebuilt: Rebuilt, *, own: bool, tells: int | None = None) -> None:
        assert self._old is not None
        copies = [each.copy for each in transfers]
        copy_elements(copies, self._old.weight, self._weight)
        copy_elements(copies, self._old.momentum, self._momentum)
        self._host_state = rebuilt.host_state

    def told(self) -> Any:
        return None

    def carry_over(self, told: Sequence[Any], *, rank: int, world_size: int, saved_by: int) -> None:
        pass

    def finish(self, told: Sequence[Any], version: int, *, gone: range = range(0)) -> Rebuilt:
        assert self._host_state is not None
        self.state.weight[:], self.state.momentum[:] = self._weight, self._momentum
        return Rebuilt(self._host_state)


class SizedReader(NumberReader):
    """Of an old rank, whose part has a size of its own."""

    def base(self, shard: Shard, constants: Shard | None, *, tier: str, places: str) -> Any:
        base = super().base(shard, constants, tier=tier, places=places)
        self._state.weight, self._state.momentum = base.weight.copy(), base.momentum.copy()
        return base
