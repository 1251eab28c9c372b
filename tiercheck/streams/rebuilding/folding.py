"""Folding: a base and the differentials after it become the next base, without the job that wrote them.

LowDiff+ keeps a replica of the state beside training, and updates it with each gradient (LowDiff, section 5). Here the
differentials are a log, and a base is its compaction. What is folded is, to the last byte, the base that the job would
have captured at that version, or it is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tiercheck import schema
from tiercheck.config import CheckpointConfig
from tiercheck.errors import ConfigurationError, Corruption
from tiercheck.format.container import Shard
from tiercheck.format.index.logical import LogicalIndex
from tiercheck.format.index.message import index_of
from tiercheck.format.references import read_references
from tiercheck.keys import ShardKey
from tiercheck.streams.codecs import codec
from tiercheck.streams.codecs.feedback import Feedback
from tiercheck.streams.doubts import Doubts
from tiercheck.streams.errors import InDoubt, NotExact
from tiercheck.streams.optimizers.registry import find_optimizer
from tiercheck.streams.optimizers.stand_in import find_stand_in
from tiercheck.streams.rebuilding.carry_over import options_at_end
from tiercheck.streams.rebuilding.stored import HOST, StoredReader, StoredState, check_replayable
from tiercheck.streams.records.audit import read_audit
from tiercheck.streams.records.base import BaseCapture, BaseState, tensors_of
from tiercheck.streams.records.constants import CarriedOn
from tiercheck.streams.records.recorded import Differential
from tiercheck.streams.records.snapshot import SNAPSHOT_CODECS
from tiercheck.streams.replay.fidelity import Tally, reached
from tiercheck.streams.replay.kernel_selection import InPlace, OnDevice, is_certified, kernel_for, stepped_tensors
from tiercheck.streams.replay.replay import STEPS_AT_ONCE, Replayer
from tiercheck.streams.replay.runs import GradientsOnDemand, Step, decode_run
from tiercheck.streams.tensors.as_bytes import given
from tiercheck.streams.tensors.provider import Identity, OptimizerIdentity
from tiercheck.types import Fidelity

__all__ = ["TensorFolding", "check_foldable", "check_settings", "fold", "on_one_thread"]

UNFIT = (ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What torch and its optimizers raise if a state is none of theirs."""
FIX = 'leave bases at "capture"'
"""What to do if bases cannot be folded."""
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""What torch's allocator says, in a ``RuntimeError``, if the host has too little memory."""
Copying = Callable[[str], object]
"""Copies a tensor to its place, by its name in the base."""

LARGE_NBYTES, LARGE_AT_ONCE = 64 << 20, 3
"""Of tensors from this size on so few steps are replayed at once. Under ZeRO one may hold all that a rank trains: then
decoded gradients take as much as a base at most."""


@dataclass(frozen=True)
class TensorFolding:
    """See :class:`~tiercheck.streams.state.FoldShards`."""

    certified: bool
    """Whether only a kernel may replay that was certified for the optimizer; else the optimizer itself may, too."""

    def prepare(self, base: Shard) -> None:
        """Compile and certify the kernels."""
        with _or_not_exact():
            held: Any = base.object("optimizer")
            identity = schema.read(Identity, base.object("identity"))
            if self.certified and find_optimizer(identity.optimizer.kind) is None:
                raise NotExact(
                    f"no {identity.optimizer.kind} is registered where folds run (the group tiercheck.optimizers): "
                    "install there what registers it, too"
                )
            certified = is_certified(identity.optimizer, held["hyperparameters"])
            if not certified and (self.certified or identity.optimizer.device != HOST.type):
                raise NotExact(f"no kernel is certified in this process for {identity.optimizer.kind} as it runs")

    def __call__(
        self, base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None]
    ) -> BaseCapture:
        return fold(base, differentials, tier=tier, check=check)


def on_one_thread() -> None:
    """Let an optimizer that is called in this process compute on the thread that calls it."""
    torch.set_num_threads(1)


@contextmanager
def _or_not_exact() -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise NotExact(str(error)) from error
    except UNFIT as error:
        if isinstance(error, torch.OutOfMemoryError) or NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error  # which passes: it speaks against no state
        raise NotExact(f"its steps cannot be replayed here: {type(error).__name__}: {error}") from error


def fold(
    base: Shard, differentials: Sequence[Shard], *, tier: str, check: Callable[[], None], threads: int = 1
) -> BaseCapture:
    """See :class:`~tiercheck.streams.state.FoldShards`. If a kernel replays all steps, they are replayed in the memory
    that the base is copied to, and when it is. Else that takes once the base's bytes, in the process's own memory."""
    with _or_not_exact():
        return _folded(base, differentials, tier, check, threads)


class ReplayedBase(BaseCapture):
    """A base whose tensors are copied, and then replayed where they lie.

    ``replay`` is given the places, and what copies a tensor to its own, both by the names in the base.
    """

    def __init__(
        self, *arguments: Any, replay: Callable[[Mapping[str, torch.Tensor], Copying], None], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._replay = replay

    def copy(self, memory: memoryview) -> None:
        self._lay_out(memory)
        places = {name: self._place(name) for name in self._layout.specs}
        with _or_not_exact():
            self._replay(places, lambda name: places[name].copy_(self._source(name)))


def _folded(
    base: Shard, differentials: Sequence[Shard], tier: str, check: Callable[[], None], threads: int
) -> BaseCapture:
    reader = StoredReader(threads=threads)
    began = reader.base_alone(base, tier=tier)
    if began.residuals:
        raise NotExact("it holds what gradients have left out, of which later versions record nothing")
    records = [each for shard in differentials for each in reader.records(shard, began, tier=tier)]
    references = read_references(base)
    index = index_of(base, references.specs if references is not None else ())
    chain = _Chain(began, records, index, check, threads)
    state = chain.state(began.masters, began.optimizer_state, newest_buffers(began.extras, records))
    check_exact(began.identity, state.identity(), records)
    kernel = kernel_for(state, chain.steps)
    if kernel is None:
        state.copy_all()
        chain.call(state)
        check_exact(began.identity, state.identity(), records)  # it says now whether a step was taken otherwise
        make: Callable[..., BaseCapture] = BaseCapture
    else:
        make = partial(ReplayedBase, replay=partial(chain.replay, kernel))
    host_state = records[-1].host_state
    state.take_options(options_at_end(state.hyperparameters(), host_state))
    key, last = base.metadata.key, differentials[-1].metadata.key.last
    constants = None
    if references is not None and key.constants is not None:
        constants = CarriedOn(state, key.constants, references)
    expected = read_audit(differentials[-1], last, tensors_of(state)[0])
    return make(
        state,
        ShardKey.base(key.generation, last, key.rank),
        base.metadata.world_size,
        token=base.metadata.token,
        host_state=host_state,
        constants=constants,
        expected=expected,
        audited=bool(expected),
    )


@dataclass(frozen=True)
class _Chain:
    """A base that was read, and the records after it. ``check`` raises once the work is to be broken off."""

    began: BaseState
    records: Sequence[Differential]
    index: LogicalIndex
    check: Callable[[], None]
    threads: int

    def state(
        self,
        masters: Mapping[str, torch.Tensor],
        optimizer_state: Mapping[str, Mapping[str, Any]],
        extras: Mapping[str, torch.Tensor],
    ) -> StoredState:
        """Of these tensors themselves, with the options of the base."""
        state = StoredState(self.began.identity, self.began.group_of, index=self.index)
        state.load(
            masters={name: given(each) for name, each in masters.items()},
            optimizer_state={
                name: {key: given(each) if isinstance(each, torch.Tensor) else each for key, each in held.items()}
                for name, held in optimizer_state.items()
            },
            extras={name: given(each) for name, each in extras.items()},
            hyperparameters=self.began.hyperparameters,
        )
        return state

    @property
    def steps(self) -> list[Step]:
        """Of which each gradient is decoded when a kernel comes to it."""
        return [
            Step(each.version, each.hyperparameters, GradientsOnDemand(each))
            for each in self.records
            if not each.skipped
        ]

    def call(self, state: StoredState) -> None:
        """Replay all steps on the state, by its optimizer if need be."""
        replayer = Replayer(state, threads=self.threads)
        for at in range(0, len(self.records), STEPS_AT_ONCE):
            self.check()
            run = decode_run(self.records[at : at + STEPS_AT_ONCE], threads=self.threads)
            replayer.apply(replace(run, buffers={}))  # the state has the newest ones

    def replay(self, kernel: InPlace | OnDevice, places: Mapping[str, torch.Tensor], copy: Copying) -> None:
        """Copy each master and its state to its places, and replay all steps on them there: it is in the processor's
        caches then. ``places``, ``copy``: by the names in the base."""
        names = {
            name: {key: f"state/{name}/{key}" for key, each in held.items() if isinstance(each, torch.Tensor)}
            for name, held in self.began.optimizer_state.items()
        }
        masters = {name: places[f"master/{name}"] for name in self.began.masters}
        held = {name: {key: places[stored] for key, stored in own.items()} for name, own in names.items()}
        trained = {each.name: each for each in stepped_tensors(self.state(masters, held, {}), self.steps)}
        copied: set[str] = set()
        for name in masters:
            own = [f"master/{name}", *names.get(name, {}).values()]
            for stored in own:
                copy(stored)
            copied.update(own)
            for some in trained[name].parts(at_once(masters[name])) if name in trained else ():
                self.check()
                kernel.apply(some, self.threads)
        for stored in places.keys() - copied:
            copy(stored)


def at_once(master: torch.Tensor) -> int:
    """How many steps a kernel takes at once: their gradients, decoded, take memory."""
    return STEPS_AT_ONCE if master.nbytes < LARGE_NBYTES else LARGE_AT_ONCE


def newest_buffers(extras: Mapping[str, torch.Tensor], records: Sequence[Differential]) -> Mapping[str, torch.Tensor]:
    """``extras``, and instead of those that have changed what the records hold of them last. Errors: ``Corruption`` for
    one that is not among them."""
    found = dict(extras)
    for record in records:
        for name, value in record.buffers().items():
            if name not in extras or (extras[name].shape, extras[name].dtype) != (value.shape, value.dtype):
                raise Corruption(f"differential {record.version} has a buffer {name!r} that the base does not have")
            found[name] = value
    return found


def check_exact(saved: Identity, here: Identity, records: Sequence[Differential]) -> None:
    """Errors: ``NotExact`` if the steps replayed by ``here`` may have other bits than those that were taken."""
    tally = sum((Tally.of(map(each.encoding, each.encodings)) for each in records), Tally())
    for doubts, refusal in ((Doubts(), NotExact), (Doubts.of(records[-1].host_state), InDoubt)):
        fidelity, notes = reached(saved, here, tally, doubts)
        if fidelity is not Fidelity.EXACT:
            raise refusal("; ".join(notes))


def check_stand_in(optimizer: OptimizerIdentity, options: Sequence[Mapping[str, Any]]) -> None:
    """Find the kernel on the host that has the bits of an optimizer on this process's GPU: from here on its bases name
    it. Errors: ``ConfigurationError`` if there is none."""
    try:
        find_stand_in(optimizer.kind, optimizer.implementation, options, optimizer.device)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the optimizer steps on {optimizer.device}, bases are folded on the host, and {error}: {FIX}"
        ) from error


def check_settings(identity: Identity, config: CheckpointConfig) -> None:
    """Errors: ``ConfigurationError`` if the settings or the kind of the optimizer do not let bases be folded to the
    bits that the state has. No kernel is tried, so that it takes no time."""
    if config.codec in SNAPSHOT_CODECS:
        raise ConfigurationError(f"the codec {config.codec!r} makes snapshots, which no base is folded of: {FIX}")
    encoding = codec(config.codec)
    if isinstance(encoding, Feedback):
        raise ConfigurationError(f"a base holds what {config.codec!r} has left out, which nothing else records: {FIX}")
    if encoding.fidelity is not Fidelity.EXACT and not config.train_on_compressed:
        raise ConfigurationError(f"gradients by the codec {config.codec!r} do not lead to the bits of the state: {FIX}")
    if identity.optimizer.memory_order:
        raise ConfigurationError(
            "a fused optimizer on the host steps on parameters that are not contiguous (channels_last), of which bases "
            f"do not hold the order in memory: {FIX}"
        )
    try:
        check_replayable(identity)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}: {FIX}") from error


def check_foldable(
    identity: Identity, config: CheckpointConfig, options: Sequence[Mapping[str, Any]], *, certified: bool
) -> None:
    """``options``: of the parameter groups. ``certified``: a kernel must be certified for them. Errors:
    ``ConfigurationError`` if bases of this state cannot be folded to the bits that it has. An optimizer on a GPU is
    compared with the kernels that may stand in for it, which takes seconds, once a process."""
    check_settings(identity, config)
    if identity.optimizer.device != HOST.type:
        check_stand_in(identity.optimizer, options)
    if certified:
        kind = identity.optimizer.kind
        if (optimizer := find_optimizer(kind)) is None:
            raise ConfigurationError(f"no kernel stands for {kind}: {FIX}")
        if reasons := [why for group in options if (why := optimizer.why_called(group))]:
            raise ConfigurationError(f"no kernel stands for {kind} as it runs: {reasons[0]}: {FIX}")
