"""One rank's training state as the core knows it: what recording takes from it, and recovery gives back to it.

The core (opening, recording, recovery) sees keys, shards and lengths. What is a tensor, and of which framework, only an
implementation knows: :class:`~tiercheck.streams.tensors.tensor_state.TensorState` is the one of torch. A simulation
brings a smaller one. All methods that touch the live state are called in the trainer's thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiercheck.errors import Mismatch
from tiercheck.format.container import Shard
from tiercheck.format.index.assemble import Transfer
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.references import References
from tiercheck.keys import ShardKey
from tiercheck.runtime.runtime import Scheduler
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.loading import Loading
from tiercheck.streams.stage import StageState
from tiercheck.types import Fidelity

__all__ = [
    "Conversion",
    "FoldShards",
    "MakeRuns",
    "Rebuilt",
    "Record",
    "RecordCapture",
    "Run",
    "StateCapture",
    "StateReader",
    "StateStream",
    "TrainingState",
]

# What recording takes


class RecordCapture(Protocol):
    """One version on its way into the first tier's memory."""

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Take the gradients of the coming step, or of a part of it. Errors: ``CapacityExceeded`` if memory does not
        suffice: :meth:`move`, and call this again."""
        ...

    def move(self, memory: memoryview) -> None:
        """Go on in longer memory, which what there is so far is copied to."""
        ...

    def ended(self, *, skipped: bool, audit: bool = False) -> Callable[[], int]:
        """The step is done, or was skipped: take what is as of now. What is returned closes the shard, and returns its
        length in bytes. ``audit``: the record also says what the state is to have, so that a fold to this version can
        be compared with it. Errors of that: ``WrittenUnseen``; ``CapacityExceeded`` if memory does not suffice:
        :meth:`move`, and call it again."""
        ...

    @property
    def is_on_its_way(self) -> bool:
        """Gradients may still be on their way from a device when it has ended: what :meth:`ended` returns waits for
        them, and is called in another thread."""
        ...

    @property
    def nbytes_needed(self) -> int:
        """If memory did not suffice to close it: what would; else 0 or less than there is."""
        ...

    def abandon(self) -> None:
        """The record is given up: what is on its way to its memory has landed when this returns."""
        ...


class ConstantsCapture(Protocol):
    """What the base is the first to refer to, on its way into the first tier's memory."""

    @property
    def key(self) -> ShardKey: ...

    @property
    def nbytes_max(self) -> int:
        """Bytes to reserve for the shard."""
        ...

    def copy(self, memory: memoryview) -> None:
        """Copy it, in any thread."""
        ...

    def finish(self) -> int:
        """Close the shard, in any thread; returns its length in bytes."""
        ...


class StateCapture(Protocol):
    """A base on its way into the first tier's memory."""

    @property
    def key(self) -> ShardKey:
        """It says what the base refers to."""
        ...

    @property
    def constants(self) -> ConstantsCapture | None:
        """What is to be there before the base, if it brings that: it is copied, finished and published first."""
        ...

    @property
    def nbytes_max(self) -> int:
        """Bytes to reserve for the shard."""
        ...

    @property
    def disturbed(self) -> bool:
        """Whether the state was written to before it was read: then the copy is of no one moment. After
        :meth:`finish` also if what the base refers to is of other bits. Such a base is none."""
        ...

    @property
    def unexpected(self) -> tuple[str, ...]:
        """After :meth:`finish`: what has other bits than the step left there, or than the audit says."""
        ...

    @property
    def audited(self) -> bool:
        """Whether it is compared with an audit."""
        ...

    def copy(self, memory: memoryview) -> None:
        """Copy the state, in any thread. It may change from the return on, after :meth:`let_change`."""
        ...

    def let_change(self) -> bool:
        """In training's thread, after :meth:`copy` and before the state changes: what is still on its way from a device
        is ordered before what follows. Does not wait. Returns :attr:`disturbed` as far as can be told now. A fold has
        nothing on its way, and is not asked."""
        ...

    def arrive(self) -> None:
        """In the thread of :meth:`copy`, and after it: wait for what is still on its way. A fold is not asked."""
        ...

    def finish(self) -> int:
        """Close the shard, in any thread; returns its length in bytes."""
        ...

    def arrived(self) -> None:
        """The base is in the first tier."""
        ...


class FoldShards(Protocol):
    """Makes of a base and the differentials after it the base of the last version, apart from the job."""

    def prepare(self, base: Shard) -> None:
        """Make ready what takes long, such as imports and kernels, for bases like this one. Blocking, in any thread,
        while it may happen that nobody waits for it any more. Errors: ``NotExact`` if they cannot be folded here."""
        ...

    def __call__(
        self, base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None]
    ) -> StateCapture:
        """Verified shards of one rank and generation, oldest first, with no version missing. Blocking, in any thread.

        Returns the base, to be copied and finished: to the last byte the one that the job would have captured, or
        :attr:`StateCapture.unexpected` names what differs. It may lie over the shards, and be replayed when it is
        copied. ``check`` raises once the work is to be broken off. Errors, of ``copy`` as well: ``NotExact``;
        ``Corruption``; those of ``check``.
        """
        ...


class StateStream(Protocol):
    """What one rank records of every iteration, and of the state if a base is due: see
    :class:`~tiercheck.streams.records.iteration.IterationStream`."""

    token: str
    doubts: Doubts

    @property
    def defers(self) -> bool: ...

    @property
    def supersedes(self) -> bool: ...

    @property
    def nbytes_max(self) -> int: ...

    @property
    def nbytes_unexpected(self) -> int: ...

    @property
    def nbytes_expected(self) -> int: ...

    @property
    def base_nbytes(self) -> int: ...

    @property
    def constants_nbytes(self) -> int: ...

    @property
    def trained_parameters(self) -> int: ...

    @property
    def constants_unsettled(self) -> bool: ...

    def key(self, generation: int, version: int, rank: int) -> ShardKey: ...

    def begin(self, key: ShardKey, memory: memoryview) -> RecordCapture: ...

    def base(self, key: ShardKey) -> StateCapture: ...

    def leave_out(self, gradients: Mapping[str, Any], version: int) -> None: ...

    def set_reference_base(self, base: Shard | None) -> None: ...

    def load(self, residuals: Mapping[str, Any]) -> None: ...

    def refer_to(self, key: ShardKey, references: References) -> None: ...

    def give_up_constants(self) -> None: ...

    def mark_recorded(self) -> None: ...

    def hurry(self) -> None: ...

    def mark_stepped(self, *, every_bit: bool = False) -> None: ...

    def mark_published(self) -> None: ...

    def frozen_changed(self) -> bool: ...

    def reformed(self) -> bool: ...

    def masters_rewritten(self) -> tuple[str, ...]: ...

    def trained_written(self) -> bool: ...

    def written(self) -> tuple[str, ...]: ...


# What recovery gives back


class Record(Protocol):
    """One version's record, parsed."""

    @property
    def version(self) -> int: ...


class Run(Protocol):
    """Consecutive records, decoded."""

    @property
    def last(self) -> int: ...


MakeRuns = Callable[[int], AsyncGenerator[Any, None]]
"""Runs in temporal order, each made on the event loop when it is asked for, by at most so many threads."""


@dataclass(frozen=True)
class Rebuilt:
    """The state is that of a base and the records after it."""

    host_state: Mapping[str, Any]
    """As of the last version."""
    tally: Any = None
    """What was replayed, for :meth:`StateReader.reached`."""
    residuals: Mapping[str, Any] = field(default_factory=dict)
    """By master, the residuals of training on compressed gradients: what the base holds, less what was sent since
    (:mod:`tiercheck.streams.gradients.encoder`)."""


class StateReader(Protocol):
    """Reads what verified shards say, and puts the state together from it. What it reads is opaque to the core.

    Only :meth:`expect` and :meth:`rebuild` touch the live state; the others run in any thread.
    """

    @property
    def threads(self) -> int:
        """At most so many may run at a time."""
        ...

    @property
    def steps_at_once(self) -> int:
        """Versions that a run has at most."""
        ...

    def expect(self) -> None:
        """Learn from the live state what shards must hold. Idempotent."""
        ...

    def base(self, shard: Shard, constants: Shard | None, *, tier: str, places: str) -> Any:
        """``constants``: what it refers to. Errors: ``Corruption``; ``ConfigurationError`` if it is of another model or
        job."""
        ...

    def led_on(self, base: Any, shard: Shard, *, tier: str) -> Any:
        """What a snapshot leads to from the base. Errors: ``Corruption``; ``ConfigurationError``."""
        ...

    def records(self, shard: Shard, base: Any, *, tier: str) -> Sequence[Record]:
        """Errors: ``Corruption``; ``ConfigurationError`` if one is not of the base's state."""
        ...

    def run(self, records: Sequence[Any], *, threads: int) -> Run:
        """Errors: ``Undecodable``."""
        ...

    async def rebuild(self, base: Any, start: Any, make: MakeRuns, scheduler: Scheduler) -> Rebuilt:
        """Load ``start`` (the base, or what a snapshot leads to from it), and replay the runs. Errors: those of
        ``make``; what the user's objects raise."""
        ...

    def reached(self, base: Any, rebuilt: Rebuilt) -> tuple[Fidelity, tuple[str, ...]]:
        """How true the state is. Why it is less than exact, if it is; and what else there is to know of the replay."""
        ...


class Conversion(Protocol):
    """What was saved under another layout, put together as this rank holds it. Only :meth:`finish` changes the live
    state. What an old rank's base says of itself (``identity``) is opaque to the core."""

    @property
    def wanted(self) -> LogicalIndex:
        """What this rank is to hold."""
        ...

    def read_identity(self, value: Any) -> Any:
        """What a base says of the job that saved it, which is plain. Errors: ``ValueError``."""
        ...

    def refuse(self, identity: Any, places: str) -> None:
        """Errors: ``Mismatch`` if steps of another optimizer were saved."""
        ...

    @property
    def loading(self) -> Loading:
        """What the user allows."""
        ...

    def other_model(self, differing: Sequence[str], identity: Any, places: str, advice: str) -> Mismatch:
        """The error for a checkpoint of another model. ``advice``: what would allow it; it may be empty."""
        ...

    def keep(self, tensors: Collection[str]) -> None:
        """Nothing was saved of these tensors of the model: they keep what the script made. :meth:`begin` follows."""
        ...

    def begin(self, identity: Any) -> bool:
        """Begin, or begin anew. Returns whether differentials can be replayed; if not, a base must do."""
        ...

    def reader(self) -> StateReader:
        """For the shards of the next old rank."""
        ...

    def take(self, transfers: Sequence[Transfer], rebuilt: Rebuilt, *, own: bool, tells: int | None = None) -> None:
        """Copy what this rank wants of the old rank that the last reader has rebuilt. ``own``: it has this number.
        ``tells``: its number, if the others are to be told what it had of its own."""
        ...

    def told(self) -> Any:
        """What other ranks may lack, and this one has taken, as plain values."""
        ...

    def carry_over(self, told: Sequence[Any], *, rank: int, world_size: int, saved_by: int) -> None:
        """Ask the user's function what batches are drawn from here. ``told``: of all ranks. Errors:
        ``ConfigurationError``."""
        ...

    def finish(self, told: Sequence[Any], version: int, *, gone: range = range(0)) -> Rebuilt:
        """Load it. ``told``: of all ranks. ``gone``: ranks that saved, of whose number none is here, and of which this
        rank is to tell. :meth:`TrainingState.refresh` follows."""
        ...

    @property
    def exact(self) -> bool:
        """Whether everything kept its bits."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was carried over, what was not, and why something is not exact."""
        ...


@dataclass(frozen=True)
class ReplayRate:
    """How fast steps are replayed on this machine."""

    elements_per_s: tuple[float, float] | None
    """The slowest and the fastest that was measured: of the trained tensors, times steps; ``None``: not measured."""
    kernel: bool
    """They are replayed by a kernel, and not by calling the optimizer."""
    why_not: str = ""


class TrainingState(Protocol):
    """One rank's training state."""

    def prepare(self, codecs: Collection[str] = ()) -> None:
        """Make ready what takes long, needs no tier and is going to be used, such as a codec's kernels.

        ``codecs``: of the tiers, if gradients are encoded again in this process on their way there.
        """
        ...

    def stream(self, world_size: int) -> StateStream:
        """What is recorded of it. Errors: ``ConfigurationError``; ``UnsupportedSetup``."""
        ...

    def reader(self) -> StateReader: ...

    def replay_rate(self) -> tuple[int, Callable[[], ReplayRate]]:
        """The elements of this rank's trained tensors, and what measures how fast this machine replays steps of its
        optimizer. That takes some tenths of a second, or the seconds in which a kernel is certified; it is done on a
        state that is made up, in any thread."""
        ...

    def layout(self) -> str:
        """What this rank holds of the model, in a few characters: equal ones read each other's shards as they are."""
        ...

    def check_foldable(self) -> None:
        """What needs no kernel to be tried, which takes no time. Errors: ``ConfigurationError``, as of
        :meth:`folding`."""
        ...

    def folding(self, *, certified: bool) -> FoldShards:
        """What folds this state's bases. ``certified``: only by a kernel that was certified for the optimizer. Errors:
        ``ConfigurationError`` if it cannot be exact."""
        ...

    def conversion(self) -> Conversion:
        """Errors: ``UnsupportedSetup`` if nothing tells what the rank's tensors are pieces of."""
        ...

    def stage(self) -> StageState | None:
        """``None``: the rank is no stage of a pipeline."""
        ...

    @property
    def steps_together(self) -> bool:
        """Whether a step takes all ranks, so that they replay the same steps, from the same base."""
        ...

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Per parameter group, its options as plain values."""
        ...

    def host_state(self) -> dict[str, Any]: ...

    def refresh(self) -> None:
        """Rebuild what derives from what was rebuilt. Collective."""
        ...

    def restore_host_state(self, state: Mapping[str, Any]) -> None: ...
